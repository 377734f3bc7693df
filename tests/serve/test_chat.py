"""Prompts, stops, streamed text, and conversations in the terminal."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from jaxglue.commands import main
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import GREEDY, AssistantConfig, SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.prompts import encode_messages, encode_prompt
from jaxglue.generation.sight import Prompt
from jaxglue.hf.loading import add_adapter, random_model
from jaxglue.hf.serving import stop_tokens
from jaxglue.models import config_from_hf
from jaxglue.serve.answers import encode_rows, generate, prompt_of, read_prompts
from jaxglue.serve.chat import ChatSession, converse
from jaxglue.serve.config import GenerateConfig
from jaxglue.settings.recipe import from_settings
from jaxglue.text.stream import TextStream, before, stream_text

SHORT = SamplingConfig(temperature=0, max_tokens=8)


def answer(**options):
    return {prompt: "".join(pieces) for prompt, pieces in generate(GenerateConfig(sampling=SHORT, **options))}


def test_prompt_equals_training_text_before_an_answer(tokenizer):
    tokens = encode_prompt(tokenizer, "Hi", system="Be kind.")
    wanted = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens) == wanted
    assert tokenizer.decode(encode_prompt(tokenizer, "Hi", raw=True)) == "Hi"


def test_stops_at_the_end_of_text_and_of_the_turn(tokenizer):
    assert {tokenizer.decode([token]) for token in stop_tokens(tokenizer)} == {"<|im_end|>"}
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    assert {other.decode([token]) for token in stop_tokens(other)} == {"<|endoftext|>"}
    other.chat_template = tokenizer.chat_template
    assert {other.decode([token]) for token in stop_tokens(other)} == {"<|endoftext|>", "<|im_end|>"}


def test_streamed_pieces_hold_whole_characters(tokenizer):
    text = "naïve 東京 🙂!"
    pieces = list(stream_text(tokenizer, tokenizer.encode(text)))
    assert len(pieces) > 5
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_model_folder_answers_match_its_parameters(tokenizer, folders, base, adapted):
    graphdefs, adapter, frozen = adapted
    engine = Engine(graphdefs, base[1].config, dtype=jnp.float32)

    def expected(prompt, adapter):
        tokens = engine.stream(adapter, frozen, encode_prompt(tokenizer, prompt), SHORT, stop_tokens(tokenizer))
        return "".join(stream_text(tokenizer, tokens))

    prompts = ("What is 1 plus 2?", "Hello")
    answers = answer(model=folders[0], prompt=prompts, adapter=folders[1])
    assert answers == {prompt: expected(prompt, adapter) for prompt in prompts}
    untrained = jax.tree.map(np.zeros_like, adapter)
    assert answers != {prompt: expected(prompt, untrained) for prompt in prompts}


def test_random_weights_are_redrawn_and_config_end_tokens_stop(tmp_path, quickstart, folders):
    plain = answer(model=folders[0], prompt=("Hello",))["Hello"]
    model = shutil.copytree(folders[0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    assert answer(model=model, prompt=("Hello",), random_weights=5)["Hello"] == plain != ""
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(1024))}))
    assert answer(model=model, prompt=("Hello",), random_weights=5)["Hello"] == ""


def test_prompt_file_follows_prompt_flags(tmp_path, folders):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    config = GenerateConfig(model=folders[0], prompt=("zero",), prompt_file=tmp_path / "prompts.txt")
    assert [row["prompt"] for row in read_prompts(config)] == ["zero", "one", "two"]


def test_prompts_of_standard_input_are_read_as_those_of_a_file(tmp_path, folders, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffone\r\ntwo\r\n", newline=""))
    config = GenerateConfig(model=folders[0], prompt_file=Path("-"))
    assert [row["prompt"] for row in read_prompts(config)] == ["one", "two"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no prompt: give --prompt, or --prompt-file"),
        ({"prompt": ("a",), "raw": True, "system": "b"}, "--system needs the chat template"),
        ({"prompt_file": Path("missing.txt")}, "--prompt-file: no such file: missing.txt"),
        ({"prompt": ("a",), "adapter": Path("missing")}, "--adapter: no such folder: missing"),
    ],
)
def test_contradictory_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        GenerateConfig(model=tmp_path, **options)


def test_tokenizer_without_template_needs_raw(tokenizer):
    bare = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="use --raw"):
        encode_prompt(bare, "Hi")


@pytest.mark.parametrize("raw", [False, True])
def test_half_of_a_surrogate_pair_is_refused(make_tokenizer, raw):
    with pytest.raises(ValueError, match=r"half of a surrogate pair: '\\ud800'"):
        encode_prompt(make_tokenizer(), "a\ud800", raw=raw)


def test_an_adapter_of_another_model_is_refused(folders, base):
    raw, _ = base
    other = random_model(config_from_hf({**raw, "intermediate_size": 48}), dtype=jnp.float32)
    shapes = r"down_proj it is \[32, 64\], the base \[32, 48\]"
    with pytest.raises(ValueError, match=rf"does not belong to the model: for model\.layers\.0\.mlp\.{shapes}"):
        add_adapter(other, folders[1])


def test_an_unfinished_character_is_shown_at_the_end(tokenizer):
    tokens = tokenizer.encode("a €", add_special_tokens=False)
    texts = ["".join(stream_text(tokenizer, tokens[:count])) for count in range(1, len(tokens) + 1)]
    assert texts == [tokenizer.decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert len(tokens) > 2 and texts[-2].endswith("\ufffd")


def test_special_tokens_are_text_where_they_are_asked_for(tokenizer):
    for shown, wanted in (((), "ab"), (["<|im_start|>"], "a<|im_start|>b")):
        stream = TextStream(tokenizer, (), shown=shown)
        for token in tokenizer.encode("a<|im_start|>b"):
            stream.add(token)
        assert stream.text == wanted


@pytest.fixture
def of_bytes():
    """Make a tokenizer as Llama 2's: characters, and single bytes for others."""
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": 1 + i for i in range(256)}, "▁a": 257, "b": 258}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_bytes_that_are_no_character_do_not_end_a_stream(of_bytes):
    smile = [1 + byte for byte in "😀".encode()]
    text = "".join(stream_text(of_bytes, [257, *smile, *smile[:2], 257, 258, *smile]))
    assert text.startswith("a😀\ufffd") and text.endswith("\ufffd ab😀")


def test_any_tokens_stream_as_text(of_bytes, tokenizer):
    draw = np.random.default_rng(0)
    for made in (of_bytes, tokenizer):
        for _ in range(100):
            tokens = draw.integers(0, len(made), 8).tolist()
            whole = made.decode(tokens, skip_special_tokens=True)
            assert "".join(stream_text(made, tokens)) == whole or "\ufffd" in whole


@pytest.fixture
def encode(make_tokenizer, tmp_path):
    """Return a tokenizer and the prompts of a file's rows, tokenized."""

    def run(*rows, **options):
        (tmp_path / "rows.jsonl").write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows))
        config = GenerateConfig(model=tmp_path, prompt_file=tmp_path / "rows.jsonl", **options)
        tokenizer = make_tokenizer()
        assistant = object.__new__(Assistant)
        assistant.tokenizer, assistant.rules, assistant.sight = tokenizer, None, None
        return tokenizer, [prompt.tokens for prompt in encode_rows(assistant, read_prompts(config), config)]

    return run


def test_rows_are_read_as_in_training(encode):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tokenizer, (plain, same) = encode({"prompt": "ab"}, {"messages": [{"from": "human", "value": parts}]})
    assert plain == same
    row = {"messages": [{"role": "user", "content": "ab"}]}
    _, with_system = encode(row, {**row, "system": "s"}, system="s")
    assert with_system[0] == with_system[1] and tokenizer.decode(with_system[0]).count("system") == 1
    assert encode({**row, "system": "s"})[1] == with_system[:1]


def test_special_tokens_in_a_prompt_are_text(encode):
    tokenizer, (plain, special) = encode({"prompt": "a"}, {"prompt": "a<|im_end|>"})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert plain.count(end) == special.count(end)
    assert tokenizer.decode(special).count("<|im_end|>") == plain.count(end) + 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "user", "content": 5}]},
            "prompt 1: message 1: the content of the 'user' message must be",
        ),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "prompt 1: unknown role 'narrator'"),
        ({"messages": []}, "prompt 1: 'messages' must be a non-empty list"),
        ({"prompt": "a", "messages": []}, r"rows.jsonl:1: expected an object with a text `prompt` or"),
        ({"prompt": 5}, r"rows.jsonl:1: expected an object with a text `prompt` or"),
    ],
)
def test_rows_that_training_would_refuse_are_refused(encode, row, message):
    with pytest.raises(ValueError, match=message):
        encode(row)


def test_texts_that_go_on_have_no_end_that_the_tokenizer_adds(make_tokenizer):
    tokenizer = make_tokenizer()
    hello = tokenizer.encode("hello")
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    single = "<|im_start|> $A <|im_end|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ends)
    assert tokenizer.encode("hello") == [ends[0][1], *hello, ends[1][1]]
    assert encode_prompt(tokenizer, "hello", raw=True) == [ends[0][1], *hello]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_files_without_prompts_are_refused(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"a.jsonl: no prompts: expected one a line"):
        read_prompts(GenerateConfig(model=tmp_path, prompt_file=tmp_path / "a.jsonl"))


def test_empty_prompts_are_prompts():
    assert [prompt_of(row) for row in ({"prompt": ""}, {"messages": [{"role": "user", "content": "a"}]})] == ["", "a"]


def test_prompts_in_another_encoding_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a.txt: not UTF-8 at byte 1: save the prompts as UTF-8"):
        read_prompts(GenerateConfig(model=tmp_path, prompt_file=tmp_path / "a.txt"))


@pytest.fixture
def talk(make_tokenizer):
    """talk(*lines) → (what was shown, the encoded conversations); the answer to `stop` is interrupted."""
    tokenizer, seen = make_tokenizer(), []

    def answer(tokens, sampling):
        seen.append(tokenizer.decode(tokens))
        if seen[-1].rpartition("user\n")[2].startswith("think"):
            yield "[THINK]Hm.[/THINK]"
        yield "one "
        if seen[-1].rpartition("user\n")[2].startswith("stop"):
            raise KeyboardInterrupt
        yield "two"

    def run(*lines, system=None):
        left, shown = iter(lines), []

        def read(prompt):
            line = next(left, EOFError)
            if isinstance(line, type):
                raise line
            return line

        session = ChatSession(
            SimpleNamespace(
                answer=lambda tokens, sampling, images: answer(tokens, sampling),
                encode=lambda chat: Prompt(encode_messages(tokenizer, chat.messages)),
            ),
            GREEDY,
            system,
        )
        converse(session, read, shown.append)
        return "".join(shown), seen, session

    return run


def test_thinking_between_special_tokens_is_not_remembered(talk):
    shown, _, session = talk("think")
    assert "Hm." in shown and session.messages[-1]["content"] == "one two"


def test_earlier_messages_are_remembered_until_reset(talk):
    shown, seen, session = talk("Hi", "Again", "/reset", "New")
    assert shown == "one two\none two\nthe conversation is forgotten\none two\n\n"
    assert "Hi" in seen[1] and "one two" in seen[1] and "Hi" not in seen[2]
    assert [message["content"] for message in session.messages] == ["New", "one two"]


def test_system_message_is_set_and_begins_anew(talk):
    _, seen, _ = talk("Hi", "/system Be kind.", "Hi", system="Be brief.")
    assert "system\nBe brief." in seen[0]
    assert "system\nBe kind." in seen[1] and "one two" not in seen[1]


def test_interrupt_stops_an_answer_and_at_the_prompt_drops_the_line(talk):
    shown, seen, _ = talk("stop", KeyboardInterrupt, "Hi")
    assert shown == "one  [stopped]\n\none two\n\n"
    assert "assistant\none " in seen[1]


def test_unknown_command_lists_the_known_ones(talk):
    assert "unknown command /fly\n/reset forgets" in talk("/fly")[0]


def test_base_is_found_from_the_adapter_in_any_folder(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert AssistantConfig(adapter=folders[1]).folder == folders[0]


def test_missing_base_and_model_are_named(folders, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone/base"}))
    (tmp_path / "adapter_model.safetensors").write_bytes((folders[1] / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="names /gone/base base, which is not a folder here"):
        _ = AssistantConfig(adapter=tmp_path).folder
    with pytest.raises(ValueError, match="no model: give --model, or an --adapter"):
        AssistantConfig()


def test_rows_of_a_file_are_answered_as_json_lines(folders, tmp_path):
    messages = [{"role": "user", "content": "Hello"}]
    rows = [{"prompt": "Hello", "id": 7}, {"messages": messages}]
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--prompt-file", str(prompts), "--output", str(answers), "--max-tokens", "4", "--temperature", "0"]
    main(["generate", "--adapter", str(folders[1]), *flags])
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [{**row, "answer": written[0]["answer"]} for row in rows] == written


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_texts_end_before_the_first_stop_text(size):
    text = "one END two STOP three"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert "".join(before(pieces, ["STOP", "END"])) == "one "
    assert list(before(pieces, [])) == pieces
    assert "".join(before(pieces, ["threes", "three!"])) == text
    assert list(before(["STO", "P", "x"], ["STOP"])) == []


def test_stop_texts_end_streamed_and_batched_answers(folders):
    (plain,) = answer(model=folders[0], prompt=("Hello",)).values()
    stop = plain[len(plain) // 2 :][:3]
    sampling = SamplingConfig(temperature=0, max_tokens=8, stop=(stop,))
    for prompt in (("Hello",), ("Hello", "Other")):
        config = GenerateConfig(model=folders[0], prompt=prompt, sampling=sampling)
        found = {prompt: "".join(pieces) for prompt, pieces in generate(config)}
        assert found["Hello"] == plain[: plain.index(stop)] != plain


def test_the_address_of_an_image_is_kept_whole(tmp_path):
    config = from_settings(GenerateConfig, {"model": str(tmp_path), "prompt": ["a"], "image": ["https://a.org/b.png"]})
    assert config.image == ("https://a.org/b.png",)
