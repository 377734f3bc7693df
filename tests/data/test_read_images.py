"""Images of texts to compare: their places in packed rows, texts that are equal, what is refused."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from jaxglue.data.config import DataConfig, Source
from jaxglue.data.files import Row
from jaxglue.data.packing import plan_packing
from jaxglue.data.read_rows import UnitText
from jaxglue.data.reads import select_reads
from jaxglue.data.store import TokenStore
from jaxglue.data.text_rows import POSITIVE, TextEncoder
from jaxglue.generation.sight import make_rules
from jaxglue.objectives.embed import EmbedTask
from jaxglue.settings.recipe import SHIPPED

FOLDER = SHIPPED / "quickstart" / "seeing"


def png(color, size=(64, 32)):
    Image.new("RGB", size, color).save(data := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


@pytest.fixture(scope="module")
def encode():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rules = make_rules(FOLDER, tokenizer, files=None)
    task = EmbedTask(shared_prompt=False, stays_whole=True, longest=40)
    task.adopt(tokenizer)

    def make(*rows, sees=True):
        encoder = task.encoder(tokenizer, "")
        encoder.images = rules if sees else None
        encoded = encoder.encode([Row(f"rows:{number}", row) for number, row in enumerate(rows, 1)])
        store = TokenStore(
            tokens=encoded.tokens,
            mask=encoded.mask,
            offsets=np.cumsum([0, *encoded.lengths]).astype(np.int64),
            columns=encoded.columns,
            info={"digest": "", "max_token": 0},
            images=encoded.images,
        )
        config = DataConfig(data=("-",), seq_len=128)
        return select_reads(store, config, Source(name="-"), task, None, rules).dataset, rules

    return make


ROWS = (
    {"anchor": "A red cross.", "positive": {"image": png("red")}, "negative": [{"image": png("blue")}, "A cross."]},
    {"anchor": {"images": [png("green"), png("blue")], "text": "Which?"}, "positive": {"image": png("red")}},
)


def test_each_texts_images_stand_among_its_tokens(encode):
    data, rules = encode(*ROWS)
    plan = plan_packing(data.lengths, seq_len=128)
    batch = data.build_batch(plan, np.arange(plan.rows), plan.documents, seq_len=128, max_segments=8)
    tokens, index = np.asarray(batch.tokens), batch.images.index
    np.testing.assert_array_equal(index >= 0, tokens == rules.tokens[0])
    patches = [image.decoded(rules.processor).patches[0].reshape(3, -1) for image in batch.images.rows[0]]
    colors = [tuple(patch[:, 0].tolist()) for patch in patches]
    red, blue, green = (255, 0, 0), (0, 0, 255), (0, 128, 0)
    assert colors == [red, blue, green, blue, red] or colors == [green, blue, red, red, blue]
    segments = np.asarray(batch.segments.segment_ids)[0]
    first = int(np.flatnonzero(index[0] >= 0)[0])
    begin = int(np.flatnonzero(segments == segments[first])[0])
    assert batch.images.positions[0, begin].tolist() == [0, 0, 0]


def test_texts_of_other_images_are_others(encode):
    """Negatives that are equal to a positive are left out of the loss."""
    data, _ = encode(*ROWS, {"anchor": "A red cross.", "positive": "A cross."})
    cross, red, blue, text, _, again, other, same = data.text_ids.tolist()
    assert red == again and len({cross, red, blue, text}) == 4 and (cross, text) == (other, same)


@pytest.mark.parametrize(
    ("row", "sees", "message"),
    [
        ({"anchor": "a", "positive": {"image": png("red")}}, False, "sees no images"),
        ({"anchor": "<|image_pad|>", "positive": "b"}, True, "names tokens of images by itself"),
        ({"anchor": "a", "positive": {"image": png("red", (512, 512))}}, True, "at most 40 are read"),
        ({"anchor": "a", "positive": {"image": "/etc/hostname"}}, True, "files are not read here"),
        ({"anchor": "a", "positive": {"image": None}}, True, "must be a text"),
    ],
)
def test_other_rows_are_refused_by_name(encode, row, sees, message):
    with pytest.raises(ValueError, match=f"^rows:1: .*{message}"):
        encode(row, sees=sees)


def test_a_beginning_that_names_tokens_of_images_is_refused():
    """A template's protection splits such tokens; a query without a template has none."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    encoder = TextEncoder(tokenizer)
    encoder.images = make_rules(FOLDER, tokenizer, files=None)
    part = encoder.part(POSITIVE, {"image": png("red")})
    with pytest.raises(ValueError, match="names tokens of images by itself"):
        encoder.encode_units([UnitText(["<|image_pad|>"], [part])])
