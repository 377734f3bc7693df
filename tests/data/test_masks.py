"""Loss masks of the same rows as TRL's, and as axolotl's by its documented rules (goldens of `make_masks.py`)."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
GOLDENS = json.loads((ROOT / "tests" / "goldens" / "masks.json").read_text(encoding="utf-8"))


def encode(row, format, loss_on="assistant", template=GOLDENS["template"]):
    tokenizer = load_tokenizer(ROOT / "jaxglue" / "recipes" / "quickstart" / "model")
    tokenizer.chat_template = template
    return Encoder(tokenizer, format=format, loss_on=loss_on).encode([Row("row", row)])


def assert_equal(encoded, golden, untrained_end=0):
    """Compare tokens and masks, except of the first token, which has no loss in any program."""
    assert encoded.tokens.tolist() == golden["tokens"]
    expected = np.zeros(len(encoded.tokens), np.uint8)
    for first, last in golden["trained"]:
        expected[first:last] = 1
    expected[len(expected) - untrained_end :] = 0
    np.testing.assert_array_equal(encoded.mask[1:], expected[1:])


@pytest.mark.parametrize(
    "name, row",
    [(name, index) for name, golden in GOLDENS["trl"].items() for index in range(len(golden["rows"]))],
)
def test_masks_are_those_of_trl(name, row):
    golden = GOLDENS["trl"][name]
    loss_on = "assistant" if name == "messages" else "completion"  # the default of TRL, but for assistant_only_loss
    newline = name == "completion of messages"  # TRL trains the one after the end of turn, which is never generated
    assert_equal(encode(golden["rows"][row], golden["format"], loss_on), golden["masks"][row], int(newline))


def test_whole_chats_of_trl_are_all_tokens():
    (row,) = GOLDENS["trl"]["whole messages"]["rows"][:1]
    np.testing.assert_array_equal(encode(row, "messages", "all").mask, encode(row, "messages", "completion").mask)


@pytest.mark.parametrize("row", range(len(GOLDENS["axolotl"]["rows"])))
def test_masks_follow_the_rules_of_axolotl(row):
    golden = GOLDENS["axolotl"]
    assert_equal(encode(golden["rows"][row], "messages"), golden["masks"][row])


@pytest.mark.parametrize("row", range(len(GOLDENS["trl"]["messages"]["rows"])))
def test_spans_without_markers_are_those_with_them(row):
    golden = GOLDENS["trl"]["messages"]
    plain = GOLDENS["template"].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert_equal(encode(golden["rows"][row], "messages", template=plain), golden["masks"][row])
