"""Images as processors of transformers make them, and as strangers send them."""

import base64
import io
import json
import math
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageDraw
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jaxglue.vision.images import ImageSource, image_size, image_source, read_image
from jaxglue.vision.processor import read_processor
from jaxglue.vision.records import ImageRecords, record_image

QWEN = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}


def picture(width, height, mode="RGB"):
    rng = np.random.default_rng([width, height])
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))
    ImageDraw.Draw(image).ellipse((2, 2, width // 2, height // 2), (250, 10, 10))
    return image.convert(mode)


def claiming(width, height):
    """An image of one pixel whose header tells other sizes."""
    data = bytearray(stored(Image.new("1", (1, 1))))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def stored(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    settings = {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return read_processor(folder, QWEN, 600)


@pytest.mark.parametrize("size", [(300, 500), (8, 8), (1999, 40), (1500, 1200), (256, 256), (337, 1009)])
def test_sizes_patches_and_tokens_are_those_of_transformers(processor, size):
    image = picture(*size)
    limits = {"shortest_edge": 65536, "longest_edge": 600 * 1024}
    theirs = Qwen2VLImageProcessorPil(size=limits, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    made = theirs(images=[image], return_tensors="np")
    grid = processor.grid(*size[::-1])
    assert [1, *grid] == made["image_grid_thw"][0].tolist()
    assert processor.tokens(grid) == grid.patches // 4 <= 600
    patches = processor.patches(stored(image), grid).astype(np.float32)
    expected = made["pixel_values"].reshape(grid.patches, 3, 2, 256)
    normal = ((patches * np.float32(1 / 255) - 0.5) / 0.5).reshape(grid.patches, 3, 256)
    for frame in range(2):
        np.testing.assert_allclose(normal, expected[:, :, frame], rtol=0, atol=1e-6)


def test_places_follow_the_patches(processor):
    grid = processor.grid(300, 500)
    places = processor.places(grid)
    assert places.shape == (grid.patches, 4) and len({tuple(p) for p in places[:, :2].tolist()}) == grid.patches
    assert places[:5, :2].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    assert (places[:, 2:] == grid).all()


@pytest.mark.parametrize("size", [(1400, 900), (5, 4), (3000, 20)])
def test_limits_that_are_no_whole_tokens_are_those_of_transformers(tmp_path, size):
    limits = {"shortest_edge": 3_000, "longest_edge": 1_000_000}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": limits}))
    theirs = Qwen2VLImageProcessorPil(size=limits, patch_size=16)(images=[picture(*size)], return_tensors="np")
    assert [1, *read_processor(tmp_path, QWEN).grid(*size[::-1])] == theirs["image_grid_thw"][0].tolist()


@pytest.mark.parametrize("size", [(1, 200), (85, 959), (1560, 18), (100, 150)])
@pytest.mark.parametrize("most", [4, 7, 64])
def test_no_shape_takes_more_tokens_than_the_limit(tmp_path, size, most):
    limited = read_processor(tmp_path, QWEN, most)
    assert limited.tokens(limited.grid(*size)) <= most


@pytest.mark.parametrize("size", [(1600, 1200), (640, 480), (3000, 40)])
def test_bounds_of_pixels_are_those_of_llama_factory(tmp_path, size):
    """It makes an image smaller before transformers' processor, in whole pixels (`_preprocess_image`)."""
    files = {"shortest_edge": 65536, "longest_edge": 16777216}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": files}))
    image, most = picture(*size), 512 * 512
    if image.width * image.height > most:
        factor = math.sqrt(most / (image.width * image.height))
        image = image.resize((int(image.width * factor), int(image.height * factor)))
    theirs = Qwen2VLImageProcessorPil(size=files, patch_size=16)(images=[image], return_tensors="np")
    bounded = read_processor(tmp_path, QWEN, pixels=most)
    assert [1, *bounded.bounded_grid(*size[::-1])] == theirs["image_grid_thw"][0].tolist()


def test_bounds_of_pixels_stand_in_place_of_tokens(tmp_path):
    bounded = read_processor(tmp_path, QWEN, pixels=4_000_000, frame_pixels=128 * 128)
    assert bounded.tokens(bounded.bounded_grid(2000, 2000)) == 62 * 62
    assert bounded.tokens(bounded.bounded_grid(2000, 2000, is_frame=True)) == 16
    assert bounded.key != read_processor(tmp_path, QWEN, pixels=4_000_000).key
    both = read_processor(tmp_path, QWEN, 100, pixels=4_000_000)
    assert both.tokens(both.bounded_grid(2000, 2000)) == 100


def test_settings_of_other_processors_are_refused(tmp_path):
    for settings in (
        {"size": {"shortest_edge": 224}},
        {"size": 448},
        {"do_resize": False},
        {"do_normalize": False},
        {"rescale_factor": 1.0},
        {"image_mean": 0.5},
        {"image_std": [0, 0, 0]},
        {"resample": "bicubic"},
        {"max_pixels": "large"},
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match="image processor"):
            read_processor(tmp_path, QWEN)


def test_frames_have_the_budget_of_their_own_file(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 560}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 140}))
    read = read_processor(tmp_path, {"model_type": "gemma4", "vision_config": {}})
    assert (read.max_tokens, read.frame_tokens) == (560, 140)


def test_limits_of_tokens_are_below_the_files_by_default(tmp_path):
    default = read_processor(tmp_path, QWEN)
    assert default.tokens(default.grid(4000, 6000)) <= 2048
    assert read_processor(tmp_path, {"model_type": "qwen3"}) is None
    with pytest.raises(ValueError, match="--image-max-tokens 1"):
        read_processor(tmp_path, QWEN, 1)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "CMYK", "P", "1", "I;16", "I"])
def test_every_mode_becomes_eight_bits_of_three_colors(mode):
    if mode in ("I;16", "I"):
        values = np.linspace(0, 65535, 48 * 32).reshape(32, 48).astype(np.uint16 if mode == "I;16" else np.int32)
        image, format = Image.fromarray(values), "PNG" if mode == "I;16" else "TIFF"
    else:
        image, format = picture(48, 32).convert(mode), "TIFF" if mode == "CMYK" else "PNG"
    read = read_image(stored(image, format))
    assert read.mode == "RGB" and read.size == (48, 32)
    if mode in ("I;16", "I"):
        assert 100 < np.asarray(read).mean() < 155  # not clipped at 255


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white_as_in_transformers(mode):
    image = picture(24, 16).convert(mode)
    if mode == "P":
        image.info["transparency"] = image.getpixel((0, 0))
    else:
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = stored(image)
    expected = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    np.testing.assert_array_equal(np.asarray(read_image(data)), expected)
    assert (expected != np.asarray(image.convert("RGB"))).any()


def test_images_are_turned_as_their_metadata_say():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = stored(picture(40, 20), "JPEG", exif=exif)
    assert image_size(data) == (40, 20) and read_image(data).size == (20, 40)


def test_of_an_animated_image_the_first_frame_is_seen():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    assert read_image(stored(frames[0], "GIF", save_all=True, append_images=frames[1:])).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image that can be read"),
        (b"GIF89a nothing", "no image that can be read"),
        (stored(picture(64, 64))[:-400], "damaged image"),
        (claiming(20_000, 20_000), "pixels"),
        (stored(Image.new("1", (900, 2))), "more than 200 times"),
    ],
)
def test_broken_and_huge_images_are_refused(processor, data, message):
    with pytest.raises(ValueError, match=f"image 3: .*{message}"):
        record_image(ImageSource(data=data), processor, 3)


def test_images_are_found_in_every_form(tmp_path):
    data = stored(picture(8, 8))
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    forms = [
        data,
        {"bytes": data, "path": None},
        {"path": "a.png"},
        "a.png",
        str(tmp_path / "a.png"),
        url,
        {"url": url},
    ]
    forms += [{"base64": text}, {"bytes": None, "path": "a.png"}, {"image_url": {"url": url}}]
    for form in forms:
        assert image_source(form, tmp_path).read() == data
    for form, message in [
        ("https://example.org/a.png", "not fetched"),
        ("data:image/png,abc", "base64"),
        ({"nothing": 1}, "needs one of"),
        (3, "must be a path"),
        ("data:image/png;base64,!!", "cannot be decoded"),
        ("data:image/png;base64,é", "an image in base64 that cannot be decoded"),
    ]:
        with pytest.raises(ValueError, match=message):
            image_source(form, tmp_path)
    with pytest.raises(ValueError, match="files are not read"):
        image_source("a.png", None)


def test_records_tell_a_changed_file(tmp_path, processor):
    path = tmp_path / "a.png"
    path.write_bytes(stored(picture(40, 30)))
    documents = [
        [],
        [record_image(ImageSource(path=str(path)), processor, 1)],
        [record_image(ImageSource(data=stored(picture(9, 9))), processor, 1)],
    ]
    records = ImageRecords.joined([ImageRecords.of(documents), ImageRecords.of(documents[1:])], [3, 2])
    assert records.owners.tolist() == [1, 2, 3, 4] and records.changed() is None
    assert records.record(0).read() == records.record(2).read() == path.read_bytes() and records.record(
        3
    ).read() == stored(picture(9, 9))
    assert list(records.of_document(2)) == [1] and list(records.of_document(0)) == []
    path.write_bytes(stored(picture(41, 30)))
    assert records.changed() == str(path)
    with pytest.raises(ValueError, match="changed while it was in use"):
        records.record(0).read()


@pytest.mark.parametrize(("size", "budget"), [((300, 500), 280), ((8, 8), 70), ((1999, 40), 280), ((1500, 1200), 1120)])
def test_gemma4s_patches_are_those_of_transformers(tmp_path, size, budget):
    raw = {"model_type": "gemma4", "vision_config": {"patch_size": 16, "pooling_kernel_size": 3}}
    processor, image = read_processor(tmp_path, raw, budget), picture(*size)
    made = Gemma4ImageProcessorPil(max_soft_tokens=budget)(images=[image], return_tensors="np")
    grid = processor.grid(*size[::-1])
    assert processor.tokens(grid) == made["num_soft_tokens_per_image"][0] <= budget
    patches = processor.patches(stored(image), grid).astype(np.float32) / 255
    places = processor.places(grid)
    expected = made["pixel_values"][0][: processor.tokens(grid) * 9].reshape(-1, 16, 16, 3)
    columns = made["image_position_ids"][0][:, 0].max() + 1
    order = places[:, 0] * columns + places[:, 1]
    np.testing.assert_allclose(patches, expected[order].reshape(patches.shape), rtol=0, atol=1e-6)


def test_gemma4s_limits_are_its_budgets(tmp_path):
    raw = {"model_type": "gemma4", "vision_config": {}}
    assert [read_processor(tmp_path, raw, limit).max_tokens for limit in (None, 279, 2048)] == [280, 140, 1120]
    with pytest.raises(ValueError, match=r"--image-max-tokens 69: .* 70, 140"):
        read_processor(tmp_path, raw, 69)
