"""Columns that no format uses, in the report."""

import pytest

from jaxglue.data.config import DataConfig
from jaxglue.data.files import Row
from jaxglue.data.formats import unused_columns
from jaxglue.data.prepare import prepare_data
from jaxglue.data.store_files import open_or_write

EXCHANGE = {"question": "What is 1?", "answer": "It is 1."}
MESSAGE = {"role": "assistant", "content": "It is 1."}


@pytest.fixture
def notes(tmp_path, make_tokenizer):
    """notes(*sources) → the report's notes."""

    def read(*data, **options):
        config = DataConfig(data=data, cache_dir=str(tmp_path / "cache"), **options)
        return prepare_data(config, make_tokenizer()).report.notes

    return read


def test_each_source_names_its_columns_once_and_from_the_cache(notes, write_jsonl):
    first = write_jsonl([EXCHANGE | {"context": "1", "id": n} for n in range(3)], "first.jsonl")
    second = write_jsonl([EXCHANGE], "second.jsonl")
    line = f"{first}: columns that the format question_answer does not use: 'context', 'id'"
    assert notes(first, second) == (line,)
    assert notes(first, second) == (line,)


def test_renamed_columns_are_used(notes, write_jsonl):
    path = write_jsonl([{"problem": "What is 1?", "answer": "It is 1."}])
    assert notes(path, columns="question=problem") == ()


def test_caches_of_earlier_versions_are_told_apart(notes, write_jsonl, monkeypatch):
    path = write_jsonl([EXCHANGE | {"context": "1"}])

    def without_columns(folder, write):
        store, damage = open_or_write(folder, write)
        store.info.pop("unused")
        return store, damage

    monkeypatch.setattr("jaxglue.data.tokenize.open_or_write", without_columns)
    assert "does not use: 'context'" in notes(path)[0]


@pytest.mark.parametrize(
    ("format", "row", "unused"),
    [
        ("messages", {"messages": [], "tools": [{}], "system": "Be brief.", "weight": 1, "id": 7}, ["id"]),
        ("alpaca", {"instruction": "a", "input": "b", "output": "c", "text": "abc"}, ["text"]),
        ("text", {"text": "a", "system": "b", "train": True}, ["system"]),
        ("question_answer", EXCHANGE | {"context": None, "hint": "", "tags": []}, []),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1, "messages": [MESSAGE]},
            ["messages"],
        ),
        ("preference", {"conversations": [MESSAGE], "chosen": MESSAGE, "rejected": MESSAGE}, []),
        ("labeled", {"prompt": "a", "completion": "b", "label": True, "score": 0}, ["score"]),
    ],
)
def test_columns_by_format(format, row, unused):
    assert unused_columns([Row("data.jsonl:1", row, 1.0)], format) == unused
