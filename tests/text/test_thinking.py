"""Thinking apart from what an answer says."""

import pytest

from jaxglue.text.stream import TAGS
from jaxglue.text.thinking import Thought, said, split_thinking

ANALYSIS = "<|channel|>analysis<|message|>Three and four."
FINAL = "<|channel|>final<|message|>Seven."


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ("Seven.", {}, ("", "Seven.")),
        ("<think>\nThree and four.\n</think>\n\nSeven.", {}, ("Three and four.", "Seven.")),
        ("Three and four.\n</think>\n\nSeven.", {"opened": True}, ("Three and four.", "Seven.")),
        ("<think>\nThree and", {}, ("Three and", "")),
        ("<think></think>\n\nSeven.", {}, ("", "Seven.")),
        ("Say <think> and </think>.", {}, ("", "Say <think> and </think>.")),
        ("<thin ice>", {}, ("", "<thin ice>")),
        (f"{ANALYSIS}<|end|><|start|>assistant{FINAL}", {"channels": True}, ("Three and four.", "Seven.")),
        (f"{ANALYSIS}{FINAL}", {"channels": True}, ("Three and four.", "Seven.")),
        ("<|channel|>commentary<|message|>I look.<|end|>", {"channels": True}, ("", "I look.")),
        ("Seven.", {"channels": True}, ("", "Seven.")),
        (f"Say {ANALYSIS}", {}, ("", f"Say {ANALYSIS}")),
        ("[THINK]Three and four.[/THINK]Seven.", {"tags": TAGS[1]}, ("Three and four.", "Seven.")),
        ("<|channel>thought\nThree and four.\n<channel|>Seven.", {"tags": TAGS[2]}, ("Three and four.", "Seven.")),
        ("<|channel>thought\n<channel|>Seven.", {"tags": TAGS[2]}, ("", "Seven.")),
    ],
)
def test_thinking_is_split_from_what_is_said_whole_or_growing(text, options, wanted):
    options = {"opened": False, "channels": False, **options}
    assert split_thinking(text, **options) == wanted
    before = "", ""
    for end in range(len(text) + 1):
        if options["channels"] and "<" in text[:end].rpartition(">")[2]:
            continue  # a special token comes as a whole
        found = split_thinking(text[:end], **options, grows=True)
        assert all(new.startswith(old) for new, old in zip(found, before, strict=True)), (found, before)
        assert all(whole.startswith(part) for whole, part in zip(wanted, found, strict=True))
        before = found


@pytest.mark.parametrize(
    ("text", "thinks", "wanted"),
    [
        ("<think>\nThree and four.\n</think>\n\nSeven.", Thought.POSSIBLE, "Seven."),
        ("Three and four.</think>Seven.", Thought.BEGUN, "Seven."),
        ("Three and four", Thought.BEGUN, ""),
        ("Seven.", Thought.POSSIBLE, "Seven."),
        ("<think>Hm.</think>Seven.", Thought.NONE, "<think>Hm.</think>Seven."),
    ],
)
def test_what_is_said_comes_in_pieces(tokenizer, text, thinks, wanted):
    pieces = list(said(text, tokenizer, thinks))
    assert "".join(pieces) == wanted and max(map(len, pieces)) <= 2
