"""Ends of trained turns and texts, special tokens in messages, and thinking that templates begin."""

import json

import pytest

from jaxglue.data.config import DataConfig
from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.data.prepare import prepare_data
from jaxglue.data.template import trained_stops
from jaxglue.data.tokenize import encode_here

TWO_TURNS = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f g"},
]
WITH_REASONS = [
    {**message, **({"reasoning_content": "why"} if message["role"] == "assistant" else {})} for message in TWO_TURNS
]
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content, reason = m.content, m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set reason = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + reason + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""As of Qwen3-Thinking: the prompt begins the thinking, which earlier turns do not show."""


VICUNA = """
{%- for m in messages %}{{ m.role|upper + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"""
"""Turns end where the next begins."""


PHI = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"""
"""As of Phi-3: a token ends conversations, but where an answer follows."""


@pytest.fixture
def make(make_tokenizer):
    """Make a tokenizer with a template and further special tokens."""

    def tokenizer(template="plain", special=(), **tokens):
        made = make_tokenizer(template if len(template) < 20 else "plain", **tokens)
        made = type(made)(
            tokenizer_object=type(made.backend_tokenizer).from_str(made.backend_tokenizer.to_str()),
            **{key: value for key, value in made.special_tokens_map.items() if isinstance(value, str)},
            chat_template=made.chat_template,
        )
        if len(template) >= 20:
            made.chat_template = template
        made.add_special_tokens({"additional_special_tokens": list(special)}) if special else None
        return made

    return tokenizer


def shown(tokenizer, row, format="messages", loss_on="assistant", **settings) -> str:
    """Return a row's tokens as text, with trained parts in brackets."""
    encoder = Encoder(tokenizer, format=format, loss_on=loss_on, **settings)
    encoded = encoder.encode([Row("row", row)])
    text, before = "", False
    for token, trained in zip(encoded.tokens.tolist(), [*encoded.mask.tolist()], strict=True):
        text += ("[" if trained and not before else "]" if before and not trained else "") + tokenizer.decode([token])
        before = bool(trained)
    return text + "]" * before


@pytest.fixture
def notes(write_jsonl, tmp_path):
    """Return the notes on rows, but those on columns."""

    def read(tokenizer, *rows, task=None, **settings):
        config = DataConfig(data=(write_jsonl(rows),), cache_dir=str(tmp_path / "cache"), workers=1, **settings)
        return prepare_data(config, tokenizer, task=task).report.notes

    return read


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        ("text", {"text": "one two<|im_end|>"}, "[one two<|im_end|>]"),
        ("text", {"text": "one two"}, "[one two<|im_end|>]"),
        ("text", {"text": "one<|im_end|>\n"}, "[one<|im_end|>\n<|im_end|>]"),
        ("prompt_completion", {"prompt": "q:", "completion": " two<|im_end|>"}, "q:[ two<|im_end|>]"),
        ("prompt_completion", {"prompt": "q:", "completion": " two"}, "q:[ two<|im_end|>]"),
    ],
)
def test_texts_end_in_one_eos(make, format, row, expected):
    assert shown(make(), row, format) == expected


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_answers_end_in_one_eos(make, end):
    tokenizer = make()
    pair = {"prompt": "q: ", "chosen": f"yes{end}", "rejected": f"no{end}"}
    label = {"prompt": "q: ", "completion": f"yes{end}", "label": True}
    for format, row in (("preference", pair), ("labeled", label)):
        encoded = Encoder(tokenizer, format=format, loss_on="assistant").encode([Row("row", row)])
        ends = (encoded.tokens == tokenizer.eos_token_id).sum()
        assert ends == (encoded.lengths > 0).sum()


def test_a_doubled_beginning_is_said(make, notes):
    tokenizer = make(bos_token="<|im_start|>")
    post = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": post}
    tokenizer = type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(state)),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    assert tokenizer("a")["input_ids"][0] == 1
    (note,) = notes(tokenizer, {"text": "<|im_start|>a"}, {"text": "b"})
    assert note.startswith("1 row begins with <|im_start|>, which the tokenizer adds as well")
    assert not notes(tokenizer, {"text": "a"})


def test_turns_without_a_trained_end_are_said(make, notes, chat_rows):
    inside, end = make("marked"), "{{- '<|im_end|>' }}"
    outside = make(inside.chat_template.replace(f"{end}{{% endgeneration %}}", f"{{% endgeneration %}}{end}"))
    assert outside.chat_template != inside.chat_template
    (note,) = notes(outside, *chat_rows(3))
    assert note.startswith("no trained turn ends with an end-of-turn token (<|im_end|>)")
    assert notes(inside, *chat_rows(3)) == notes(make(), *chat_rows(3)) == ()
    assert trained_stops(outside) == trained_stops(inside) == {2}


def test_turns_that_end_where_the_next_begins_are_said(make, notes, chat_rows):
    vicuna = make(VICUNA)
    assert any("does not learn to stop" in note for note in notes(vicuna, *chat_rows(3)))
    assert not notes(vicuna, *chat_rows(3), loss_on="all", stop_tokens=("<|im_end|>",))[1:]


def test_special_tokens_in_messages_are_counted_and_allowed_by_name(make, notes):
    tokenizer = make(special=["<act>", "</act>"])
    chat = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "<act>wave</act> hi"}]
    quoted = [{"role": "user", "content": "what is <act>?"}, {"role": "assistant", "content": "<act>"}]
    (note,) = notes(tokenizer, {"messages": chat}, {"messages": quoted}, {"messages": TWO_TURNS})
    assert note.startswith("special tokens inside messages are read as text: <act> in 2 rows, </act> in 1 row; ")
    act, stop = (tokenizer.convert_tokens_to_ids(token) for token in ("<act>", "</act>"))

    def encode(**settings):
        encoder = Encoder(tokenizer, format="messages", loss_on="assistant", **settings)
        return encoder.encode([Row("row", {"messages": chat})])

    assert not {act, stop} & set(encode().tokens.tolist())
    some, both = encode(allowed=["<act>"]), encode(allowed=["<act>", "</act>"])
    assert act in some.tokens and stop not in some.tokens and some.findings == {"</act>": 1}
    assert {act, stop} <= set(both.tokens[both.mask > 0].tolist()) and both.findings == {}
    assert not notes(tokenizer, {"messages": chat}, allow_special_tokens=("<act>", "</act>"))
    with pytest.raises(ValueError, match="allow_special_tokens: the tokenizer has no token '<acts>'"):
        notes(tokenizer, {"messages": chat}, allow_special_tokens=("<acts>",))


def test_a_stream_says_what_its_first_window_holds(make, notes, monkeypatch):
    monkeypatch.setattr("jaxglue.data.stream.encode_in_processes", lambda *given, workers: encode_here(*given))
    chat = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "<act>"}]
    said = notes(make(special=["<act>"]), *[{"messages": chat}] * 3, streaming=True, stream_tokens=30)
    assert any(note.startswith("special tokens inside messages are read as text: <act> in ") for note in said)


def test_special_thinking_tokens_reach_the_templates_logic(make):
    content = [TWO_TURNS[0], {"role": "assistant", "content": "<think>\nlong reason\n</think>\n\nc d"}, *TWO_TURNS[2:]]
    special = make(THINKING, special=["<think>", "</think>"])
    expected = (
        "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n[c d<|im_end|>]\n<|im_start|>user\ne<|im_end|>\n"
    )
    expected += "<|im_start|>assistant\n<think>\n[\n</think>\n\nf g<|im_end|>]\n"
    assert shown(special, {"messages": content}) == shown(make(THINKING), {"messages": content}) == expected
    encoded = Encoder(special, format="messages", loss_on="assistant").encode([Row("r", {"messages": content[:2]})])
    assert special.convert_tokens_to_ids("</think>") in encoded.tokens


def test_special_tokens_that_a_template_reads_elsewhere_are_refused(make):
    reads = "{% for m in messages %}{{ m.role + (m.content.split('<cut>')|last) + '<|im_end|>' }}{% endfor %}"
    chat = [{"role": "user", "content": "x<cut>y"}, {"role": "assistant", "content": "z"}]
    with pytest.raises(ValueError, match=r"row: the chat template reads special tokens inside messages \(<cut>\)"):
        shown(make(reads, special=["<cut>"]), {"messages": chat}, loss_on="all")


@pytest.mark.parametrize("messages", [TWO_TURNS, WITH_REASONS])
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_prompts_that_begin_thinking_train_each_turn(make, messages, special):
    reason = messages[-1].get("reasoning_content", "")
    text = shown(make(THINKING, special=special), {"messages": messages})
    one, two = text.split("<|im_start|>user\n")[1:]
    assert one == "a b<|im_end|>\n<|im_start|>assistant\n[c d<|im_end|>]\n"
    assert two == f"e<|im_end|>\n<|im_start|>assistant\n<think>\n[{reason}\n</think>\n\nf g<|im_end|>]\n"
    alone = shown(make(THINKING, special=special), {"messages": messages[:2]})
    assert alone.endswith(f"assistant\n<think>\n[{reason}\n</think>\n\nc d<|im_end|>]\n")


def test_many_conversations_of_a_shape_have_the_same_spans(make):
    encoder = Encoder(make(THINKING), format="messages", loss_on="assistant")
    encoded = encoder.encode([Row("row", {"messages": TWO_TURNS})] * 12)
    assert encoded.mask.sum() == 12 * encoded.mask[: encoded.lengths[0]].sum()


@pytest.mark.parametrize(("weights", "trained"), [((1, 1), ["f g"]), ((0, 1), ["f g"]), ((1, 0), [])])
def test_the_last_turn_alone_is_trained_on(make, weights, trained):
    turns = [{**m, "weight": weights[i // 2]} if m["role"] == "assistant" else m for i, m in enumerate(TWO_TURNS)]
    text = shown(make(), {"messages": turns}, loss_on="last-turn")
    assert [part.split("<|im_end|>]")[0] for part in text.split("[")[1:]] == trained
    assert shown(make(), {"text": "a"}, "text", loss_on="last-turn") == "[a<|im_end|>]"


def test_empty_thinking_is_masked_on_request(make):
    plain, reasons = ({"messages": chat} for chat in (TWO_TURNS, WITH_REASONS))
    for template in (THINKING, THINKING.replace("'<|im_start|>assistant\\n<think>\\n'", "'<|im_start|>assistant\\n'")):
        masked = shown(make(template), plain, mask_empty_thinking=True)
        assert masked.endswith("<think>\n\n</think>\n\n[f g<|im_end|>]\n") and "[c d<|im_end|>]" in masked
        assert shown(make(template), reasons, mask_empty_thinking=True) == shown(make(template), reasons)


@pytest.mark.parametrize("condition", ["not add_generation_prompt", "messages[-1].role == 'assistant'"])
def test_a_token_that_ends_conversations_is_no_part_of_a_turn(make, condition):
    tokenizer = make(PHI.replace("{% else %}", f"{{% elif {condition} %}}"), eos_token="<|endoftext|>")
    encoder = Encoder(tokenizer, format="messages", loss_on="assistant")
    for turns in range(1, 9):  # derived spans, and those between tokens once these agreed
        encoded = encoder.encode([Row("r", {"messages": TWO_TURNS * turns})])
        trained = tokenizer.decode(encoded.tokens[encoded.mask > 0])
        assert trained == "c d<|im_end|>f g<|im_end|>" * turns
        assert tokenizer.decode(encoded.tokens).endswith("<|im_end|>\n<|endoftext|>")
    assert {tokenizer.convert_ids_to_tokens(t) for t in trained_stops(tokenizer)} == {"<|im_end|>", "<|endoftext|>"}
