"""Videos of rows: frames and their times, as Qwen's processors take them in pairs."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from jaxglue.vision.images import digest_of, frames_of, image_size
from jaxglue.vision.processor import AreaProcessor, Grid
from jaxglue.vision.videos import frame_pairs


def drawn(number, size=(40, 24)):
    return Image.fromarray(np.full((*size[::-1], 3), 20 * number, np.uint8))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "clip").mkdir()
    for number in range(5):
        drawn(number).save(tmp_path / "clip" / f"{number}.png")
    (tmp_path / "clip" / "notes.txt").write_text("no frame")
    drawn(0).save(
        tmp_path / "clip.gif", save_all=True, append_images=[drawn(n) for n in range(1, 5)], duration=300, loop=0
    )
    return tmp_path


def shade(frame):
    return round(float(np.asarray(Image.open(io.BytesIO(frame)).convert("RGB")).mean()) / 20)


def shades(pairs):
    return [[shade(frame) for frame in frames_of(pair.data)] for _, pair in pairs]


def times(pairs):
    return [time for time, _ in pairs]


def test_frames_of_lists_and_folders_come_in_pairs_with_their_mean_times(folder):
    listed = frame_pairs({"video": [f"clip/{number}.png" for number in range(5)], "fps": 4}, folder)
    assert times(listed) == ["<0.1 seconds>", "<0.6 seconds>", "<1.0 seconds>"]
    assert shades(listed) == [[0, 1], [2, 3], [4, 4]]
    assert [pair.data for _, pair in frame_pairs({"video": "clip", "fps": 4}, folder)] == [p.data for _, p in listed]
    assert times(frame_pairs({"video": "clip"}, folder)) == ["<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"]


def test_animations_are_sampled_by_time(folder):
    """Frames of 0.3 s are seen at 0, 0.5 and 1 s: the first, second and fourth."""
    pairs = frame_pairs({"video": "clip.gif"}, folder)
    assert shades(pairs) == [[0, 1], [3, 3]] and times(pairs) == ["<0.2 seconds>", "<1.0 seconds>"]
    assert shades(frame_pairs({"video": "clip.gif", "fps": 10}, folder))[:3] == [[0, 0], [0, 1], [1, 1]]


def test_a_pair_is_an_image_of_twice_the_values(folder):
    (_, pair), *_ = frame_pairs({"video": "clip"}, folder)
    raw = {"vision_config": {"patch_size": 4}}
    processor = AreaProcessor.of({"min_pixels": 64, "max_pixels": 10_000}, raw, None)
    assert image_size(pair.data) == (24, 40)
    grid = processor.grid(24, 40)
    patches = processor.patches(pair.data, grid)
    assert grid == Grid(6, 10) and patches.shape == (60, 2 * 48)
    assert (patches[:, :48] == 0).all() and (patches[:, 48:] == 20).all()
    assert digest_of(pair.data) != digest_of(frames_of(pair.data)[0])


@pytest.mark.parametrize(
    ("video", "error"),
    [
        ({}, "needs 'video'"),
        ({"video": []}, "without frames"),
        ({"video": "clip", "fps": 0}, "'fps' of a video"),
        ({"video": "clip", "fps": "2"}, "'fps' of a video"),
        ({"video": ["clip/0.png"] * 769}, "at most 768"),
        ({"video": "clip.gif", "fps": 1000}, "more than 768 frames"),
        ({"video": "clip/notes.txt"}, "no image that can be read"),
        ({"video": "https://example.com/clip.gif"}, "not fetched"),
    ],
)
def test_other_videos_are_refused(folder, video, error):
    with pytest.raises(ValueError, match=error):
        frame_pairs(video, folder)


def test_videos_in_requests_are_those_of_files(folder):
    """Frames as images, as vLLM takes them, and an animation; no file is named there."""
    files = [(folder / "clip" / f"{number}.png").read_bytes() for number in range(3)]
    texts = [base64.b64encode(file).decode() for file in files]
    expected = frame_pairs({"video": [f"clip/{number}.png" for number in range(3)]}, folder)
    assert frame_pairs({"video": [f"data:image/png;base64,{text}" for text in texts]}, None) == expected
    joined = {"url": f"data:video/jpeg;base64,{','.join(texts)}"}
    assert frame_pairs({"type": "video_url", "video_url": joined}, None) == expected
    gif = base64.b64encode((folder / "clip.gif").read_bytes()).decode()
    urls = {"video_url": {"url": f"data:image/gif;base64,{gif}"}}
    assert frame_pairs(urls, None) == frame_pairs({"video": "clip.gif"}, folder)


@pytest.mark.parametrize(
    ("video", "error"),
    [
        ({"video": "clip"}, "files are not read here"),
        ({"video": ["clip/0.png"]}, "files are not read here"),
        ({"video_url": {"url": "data:video/mp4;base64,AAAA"}}, "no program decodes videos here"),
        ({"video_url": {"url": "https://example.com/clip.mp4"}}, "not fetched"),
    ],
)
def test_requests_name_no_files_and_send_no_videos_that_need_a_program(video, error):
    with pytest.raises(ValueError, match=error):
        frame_pairs(video, None)
