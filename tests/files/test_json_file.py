import io

import pytest

from jaxglue.files import json_file
from jaxglue.files.json_file import MAX_DEPTH, numbered_lines, parse_json, read_json


@pytest.mark.parametrize("text", ["{", "[1,]", '"\\x"', "9" * 5000, b"\xff"])
def test_damaged_json_is_one_line(text):
    with pytest.raises(ValueError, match=r"file: (malformed JSON|not UTF-8)"):
        parse_json(text, "file")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5000, 1_000_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth_is_bounded(depth, opening):
    closing = "]" if opening == "[" else "}"
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        parse_json(opening * depth + "1" + closing * depth, "file")


def test_allowed_depth_is_read():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text, "file") is not None


def test_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "MAX_BYTES", 8)
    (tmp_path / "config.json").write_text('{"a": 1234}')
    with pytest.raises(ValueError, match="has 11 bytes: at most 8 are read"):
        read_json(tmp_path / "config.json")


def test_an_object_is_expected(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="should hold a JSON object, but holds a list"):
        read_json(tmp_path / "config.json")


def test_a_line_is_bounded(monkeypatch):
    monkeypatch.setattr(json_file, "MAX_BYTES", 8)
    lines = numbered_lines(io.BytesIO(b"[1]\n\n" + b"[" * 100), "rows.jsonl")
    assert next(lines) == (1, b"[1]\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:3: the line has more than 8 bytes"):
        next(lines)
