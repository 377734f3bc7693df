"""Conversations in the terminal, prompts from files, and bases found from adapters."""

import json
from types import SimpleNamespace

import pytest

from jaxglue.commands import main
from jaxglue.generation.config import GREEDY, AssistantConfig
from jaxglue.generation.session import Session, converse


@pytest.fixture
def talk(make_tokenizer):
    """talk(*lines) → (what was shown, the encoded conversations); the answer to `stop` is interrupted."""
    tokenizer, seen = make_tokenizer(), []

    def answer(tokens, sampling):
        seen.append(tokenizer.decode(tokens))
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

        session = Session(SimpleNamespace(tokenizer=tokenizer, answer=answer), GREEDY, system)
        converse(session, read, shown.append)
        return "".join(shown), seen, session

    return run


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
