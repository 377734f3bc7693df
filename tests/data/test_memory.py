"""Rows in memory become a file that is named by their content."""

import io
import json
from collections import UserDict

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from jaxglue.data.formats import row_images
from jaxglue.data.memory import holds_rows, name_sources
from jaxglue.data.messages import read_chat
from jaxglue.vision.images import image_source, read_image

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ä", "completion": "d"}]
KINDS = {
    "list": lambda: ROWS,
    "tuple of mappings": lambda: tuple(map(UserDict, ROWS)),
    "generator": lambda: (row for row in ROWS),
    "datasets": lambda: datasets.Dataset.from_list(ROWS),
    "stream of a table": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "stream of a generator": lambda: datasets.IterableDataset.from_generator(lambda: iter(ROWS)),
    "pandas": lambda: pd.DataFrame(ROWS, index=[5, 3]),
    "pyarrow": lambda: pa.Table.from_pylist(ROWS),
}


def read(path: str) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_of_any_kind_share_a_file(kind, tmp_path):
    assert holds_rows(KINDS[kind]())
    (path,) = name_sources(KINDS[kind](), tmp_path)
    assert read(path) == ROWS
    assert name_sources(ROWS, tmp_path) == (path,) and len([*tmp_path.iterdir()]) == 1


def test_names_and_rows_stand_side_by_side(tmp_path):
    assert not holds_rows("a.jsonl") and not holds_rows(["a.jsonl"]) and not holds_rows(()) and not holds_rows(None)
    assert name_sources("a.jsonl", tmp_path / "none") == ("a.jsonl",)
    name, first, second = name_sources(["a.jsonl", ROWS, datasets.Dataset.from_list(ROWS[:1])], tmp_path)
    assert name == "a.jsonl" and read(first) == ROWS and read(second) == ROWS[:1]


def test_missing_values_of_tables_are_left_out(tmp_path):
    table = pd.DataFrame([{"text": "a", "score": 1.5, "label": True}, {"text": "b"}])
    for data in (table, pa.Table.from_pandas(table), datasets.Dataset.from_pandas(table)):
        assert read(*name_sources(data, tmp_path)) == [{"text": "a", "score": 1.5, "label": True}, {"text": "b"}]


def test_numpy_values_become_numbers_and_other_bytes_are_left_out(tmp_path):
    row = {
        "text": "a",
        "n": np.int64(3),
        "x": np.float32(0.5),
        "ids": np.arange(2),
        "thumbnail": {"bytes": b"x"},
        "raw": b"y",
    }
    assert read(*name_sources([row], tmp_path)) == [{"text": "a", "n": 3, "x": 0.5, "ids": [0, 1]}]


def test_images_in_memory_are_those_of_files(tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    stored = {"bytes": file.getvalue(), "path": None}
    features = datasets.Features({"image": datasets.Image()})
    parts = [{"type": "image", "image": Image.fromarray(pixels)}]
    for data in (
        [{"images": [stored]}, {"image": file.getvalue()}, {"messages": [{"role": "user", "content": parts}]}],
        datasets.Dataset.from_list([{"image": stored}], features=features),
    ):
        for row in read(*name_sources(data, tmp_path)):
            (value,) = row_images(row) or read_chat(row["messages"], None, "messages", sees=True).images
            seen = read_image(image_source(value, None).read())
            np.testing.assert_array_equal(np.asarray(seen), pixels)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter([]), "data: no rows in memory: pass at least one"),
        (5, "data: expected rows, as a list of dictionaries, .* got int"),
        ({"prompt": ["a"]}, "data: expected rows, .* got dict"),
        ([ROWS[0], "b"], "data: row 2: expected a dictionary, got str"),
        ([{"text": float("nan")}], "data: row 1: .*nan.*; rows hold texts, numbers, lists and dictionaries"),
        ([{"messages": [{"content": {"x"}}]}], "data: row 1: {'x'} is a set; rows hold"),
        ([{"text": "\ud800"}], "data: row 1: .*surrogates"),
    ],
)
def test_bad_rows_are_named_and_leave_nothing(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        name_sources(data, tmp_path)
    assert not [*tmp_path.iterdir()]
