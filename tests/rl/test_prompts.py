"""Prompts of rollouts have the tokens of generation, and answers of rows those of training."""

import pytest

from jaxglue.data.config import DataConfig
from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.rl.prompts import read_prompts

USER, ANSWER = {"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "It is 1."}


@pytest.fixture
def read(write_jsonl, make_tokenizer):
    def run(*rows, template="plain", change=str):
        config, tokenizer = DataConfig(data=(write_jsonl(rows),), seq_len=64), make_tokenizer(template)
        tokenizer.chat_template = change(tokenizer.chat_template)
        return read_prompts(config, tokenizer, answer=16, limit=128).prompts

    return run


@pytest.mark.parametrize("template", ["plain", "marked", "closing"])
@pytest.mark.parametrize("row", [{"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}])
def test_an_answer_of_a_row_ends_where_training_ends_it(read, make_tokenizer, row, template):
    (prompt,) = read(row, template=template)
    encoder = Encoder(make_tokenizer(template), format="messages", loss_on="assistant")
    encoded = encoder.encode([Row("row", {"messages": [USER, ANSWER]})])
    assert prompt.tokens == encoded.tokens[: len(prompt.tokens)].tolist()
    assert prompt.given == encoded.tokens[encoded.mask > 0].tolist()


def test_a_template_that_leaves_out_a_message_is_refused(read):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    row = {"messages": [USER, call, {"role": "tool", "content": "1"}]}
    assert read(row)
    with pytest.raises(ValueError, match=r"data\.jsonl:1: the chat template leaves out tool call 1 of message 2"):
        read(row, change=lambda template: template.replace("message.tool_calls or []", "[]"))


def test_an_answer_that_is_no_message_is_refused_by_row(read):
    with pytest.raises(ValueError, match=r"data\.jsonl:1: .*message"):
        read({"prompt": [USER], "completion": ["It is 1."]})


@pytest.mark.parametrize("key", ["images", "image", "audio", "video"])
@pytest.mark.parametrize("prompt", [[USER], "What is 1?"])
def test_rows_with_images_or_sounds_are_refused(read, key, prompt):
    assert read({"prompt": prompt, key: []})
    with pytest.raises(ValueError, match=rf"data\.jsonl:1: '{key}' is not read, as only text is"):
        read({"prompt": prompt, key: ["a.png"]})


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "a", "system": "b"}, "'system' is for a chat, and the prompt is a text"),
        ({"prompt": "a", "tools": [{}]}, "'tools' is for a chat, and the prompt is a text"),
        ({"prompt": [USER], "system": 7}, "'system' must be a string"),
        ({"prompt": [USER], "chat_template_kwargs": {"a": 1}}, "'chat_template_kwargs' is not read"),
    ],
)
def test_settings_of_rows_that_would_be_left_out_are_refused(read, row, text):
    with pytest.raises(ValueError, match=text):
        read(row)
