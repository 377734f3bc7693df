"""Rows from every file type, and errors about broken files."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxglue.data import files
from jaxglue.data.config import Source, parse_source
from jaxglue.data.readers import read_rows, source_files, source_parts
from jaxglue.files.json_file import parse_array

ROWS = [{"text": "Grüße"}, {"text": "zwei"}]


def values(*sources, **options):
    return [row.value for source in sources for row in read_rows(parse_source(str(source), **options))]


def write_json(path):
    path.write_text(json.dumps(ROWS))


def write_json_lines(path):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n")


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_csv(path):
    with pa.output_stream(path, compression="detect") as file:
        file.write('\ufefftext\r\nGrüße\r\n"zwei"\r\n'.encode())


def write_compressed(path):
    lines = "\n".join(json.dumps(row) for row in ROWS)
    with pa.output_stream(path, compression={".gz": "gzip", ".zst": "zstd"}[path.suffix]) as file:
        file.write(lines.encode())


FILES = {
    "a.jsonl": write_json_lines,
    "A.JSONL": write_json_lines,
    "a.json": write_json,
    "lines.json": write_json_lines,
    "a.parquet": write_parquet,
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.csv.gz": write_csv,
    "a.jsonl.gz": write_compressed,
    "a.json.zst": write_compressed,
}


@pytest.mark.parametrize(("name", "write"), FILES.items(), ids=FILES)
def test_every_file_type_reads_alike(tmp_path, name, write):
    write(tmp_path / name)
    assert values(tmp_path / name) == ROWS
    assert values(tmp_path) == ROWS


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".backups").mkdir()
    for name in (".backups/c.jsonl", ".d.jsonl"):
        (tmp_path / name).write_text("not read")
    assert values(tmp_path) == [{"text": "a"}, {"text": "b"}]


def test_reads_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "dict")
    assert values(tmp_path / "one") == values(tmp_path / "dict") == ROWS
    assert {path.parent.name for path in source_files(Source(name=str(tmp_path / "dict")))} == {"train"}
    with pytest.raises(ValueError, match="no split 'test': choose --split from train"):
        values(tmp_path / "dict", split="test")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"one: a damaged data set: .*; save it again with save_to_disk"):
        values(tmp_path / "one")


@pytest.mark.parametrize(
    ("split", "numbers"),
    [("train[:25%]", range(2)), ("train[5:]", range(5, 8)), ("train[-2:]", (6, 7)), ("train[:1]+train[6:7]", (0, 6))],
)
def test_a_slice_of_a_split_is_read_alike_from_files_and_saved_datasets(tmp_path, split, numbers):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": str(number)} for number in range(8)]
    (tmp_path / "folder").mkdir()
    for name, part in (("a", rows[:3]), ("b", rows[3:])):
        (tmp_path / f"folder/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "dict")
    for name in ("folder", "one", "dict"):
        assert values(tmp_path / name, split=split) == [rows[number] for number in numbers], name
    (part,) = source_parts(Source(name=str(tmp_path / "folder"), split=split))
    assert [row.value for row in part(1)] == [rows[number] for number in numbers][1:]
    with pytest.raises(ValueError, match=r"folder, split 'test\[:1\]': Unknown split"):
        values(tmp_path / "folder", split="test[:1]")


def test_reads_hub_data_sets(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name, split):
        if (name, split) != ("owner/name", "train"):
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values("hf:owner/name") == ROWS
    with pytest.raises(ValueError, match="cannot load hf:owner/other, split 'train', from the hub: no network"):
        values("hf:owner/other")
    for name in ("hf:", "hf:../x", "hf:a/b/c", "hf::fine"):
        with pytest.raises(ValueError, match=f"data: {name}: expected hf:owner/name"):
            values(name)


def test_columns_are_renamed(tmp_path):
    write_json_lines(tmp_path / "a.jsonl")
    assert values(f"{tmp_path}/a.jsonl?columns=prompt=text") == [{"prompt": row["text"]} for row in ROWS]
    with pytest.raises(ValueError, match=r"a.jsonl:1: no column 'answer' to rename; the columns are 'text'"):
        values(f"{tmp_path}/a.jsonl", rename="completion=answer")


def test_null_fields_from_arrow_are_dropped(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "c"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n  {"text": \n',
            r"a.jsonl:3: malformed JSON at column 11.*; each line .* one row",
        ),
        (
            "a.json",
            b'{\n "text": "a"\n}',
            r"a.json:1: malformed JSON at column 2.*a .json file may hold them as an array",
        ),
        ("a.jsonl", b'{"text": {"a": 1, "a": 2}}\n', r"a.jsonl:1: the key 'a' is there twice"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl:2: not UTF-8 at byte 11"),
        ("a.jsonl", b"[1]\n", r"a.jsonl:1: a row must be a JSON object, got list"),
        ("a.json", b'[{"text": "a"},\n {"text"]', r"a.json: malformed JSON at line 2, column 9"),
        ("a.jsonl", b'{"text": ' + b"[" * 99 + b"]" * 99 + b"}", r"a.jsonl:1: nested more than 64 levels deep"),
        ("a.jsonl", b"{}\n" + b"[" * 10**6, r"a.jsonl:2: nested more than 64 levels deep"),
        (
            "a.jsonl",
            b'{"text": 1' + b"0" * 5000 + b"}",
            r"a.jsonl:1: malformed JSON: a number of more than 4,300 digits",
        ),
        ("a.json", b"[3]", r"a.json, row 1: a row must be a JSON object, got int"),
        ("a.parquet", b"not parquet", r"a.parquet: not a readable Parquet file"),
        ("a.txt", b"a,b", r"a.txt has an unknown file type: expected .jsonl.*; write each text as a row"),
        ("a.parquet.gz", b"a,b", r"a.parquet.gz has an unknown file type: expected .jsonl"),
        ("a.csv", b"text,b\na,b\nc\n", r"a.csv:3: the row has more or fewer fields than the first line names"),
        ("a.csv", b"a,b\na,b,c\n", r"a.csv:2: the row has more or fewer fields"),
        ("a.tsv", b"a\ta\n", r"a.tsv:1: two columns have the same name"),
        (
            "a.csv",
            b"a;b\n1;2\n",
            r"a.csv:1: the first line names one column, 'a;b', with ';' in it: separate columns by",
        ),
        ("a.csv", b'a,b\n"a', r"a.csv:.: a quotation mark after this line is never closed"),
        ("a.csv", b"text\n\xff\n", r"a.csv:2: not UTF-8: save"),
        ("a.jsonl.gz", b"hello", r"a.jsonl.gz: damaged gzip file"),
        ("a.jsonl.gz", gzip.compress(bytes(99999), mtime=0)[:50], r"a.jsonl.gz: damaged gzip file: Truncated"),
        ("a.csv.zst", b"hello", r"a.csv.zst: damaged zstd file"),
        ("a.jsonl.gz", b"", r"a.jsonl.gz: damaged gzip file: it has no bytes"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        values(tmp_path / name)


def test_missing_sources_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"no such file or folder: .*missing.jsonl \(a data set of the .* hub is named hf:"
    ):
        values(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="no data file in"):
        values(tmp_path)


def test_flipped_bits_of_checksummed_pages_are_found(tmp_path):
    pq.write_table(pa.table({"text": ["a" * 99]}), tmp_path / "a.parquet", write_page_checksum=True, compression=None)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"a" * 99, b"a" * 98 + b"b", 1))
    with pytest.raises(ValueError, match=r"a.parquet: damaged Parquet file: .*CRC"):
        values(tmp_path / "a.parquet")


def test_parquet_text_that_is_not_utf8_is_refused(tmp_path):
    texts = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: damaged Parquet file: .*utf-8"):
        values(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.date32(), pa.duration("s")])
def test_parquet_dates_beyond_pythons_are_refused(tmp_path, kind):
    far = pa.array([2**30 if kind == pa.date32() else 2**62]).cast(pa.int64())
    column = far.cast(pa.int32()).cast(kind) if kind == pa.date32() else far.cast(kind)
    pq.write_table(pa.table({"text": ["a"], "at": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: a value that Python cannot hold"):
        values(tmp_path / "a.parquet")


def test_parquet_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text"] * 2), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: two columns have the same name"):
        values(tmp_path / "a.parquet")


def test_long_lines_and_arrays_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 8)
    monkeypatch.setattr(files, "_ARRAY_BYTES", 8)
    for name, content, message in (
        ("a.csv", "text\n" + "a" * 9, "a line of more than 8"),
        ("b.csv", 'text\n"aaa\naaa\naaa"\n', "field larger than field limit"),
        ("c.json", '[{"text": "a"}]', "an array of more than 8 bytes"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}.*{message}"):
            values(tmp_path / name)


def test_items_of_arrays_are_read_as_they_are_asked_for(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(' [ {"text": "a"},\n{"text": "b"} , oops')
    rows = read_rows(parse_source(str(path)))
    assert [next(rows).value, next(rows).value] == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ValueError, match=r"a.json: malformed JSON at line 2, column 17: Expecting value"):
        next(rows)
    for text, message in (
        ("[1] 2", "column 5: Extra data"),
        ("[1 2]", "column 4: Expecting ',' delimiter"),
        ("[1,]", "column 4: Expecting value"),
        ("[1", "column 3: Expecting ',' delimiter"),
        ("[" * 65 + "]" * 65, "nested more than 64 levels deep"),
    ):
        with pytest.raises(ValueError, match=message):
            list(parse_array(text, "a"))
    assert list(parse_array("[]", "a")) == []
    assert list(parse_array(" [[1], {} ]", "a")) == [([1], 3), ({}, 2)]


def test_unused_columns_are_not_decoded(tmp_path):
    datasets = pytest.importorskip("datasets")
    file = {"bytes": b"RIFF", "path": "x.wav"}
    saved = {"text": ["a", "b"], "audio": [file] * 2, "pictures": [[file]] * 2, "meta": [{"a": 1}, 2]}
    text, stored = datasets.Value("string"), {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = {"text": text, "audio": stored, "pictures": datasets.List(stored), "meta": datasets.Json()}
    datasets.Dataset.from_dict(saved, features=datasets.Features(features)).save_to_disk(tmp_path)
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    kinds = {"audio": {"_type": "Audio"}, "pictures": {"_type": "List", "feature": {"_type": "Image"}}}
    info["features"] |= kinds
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    assert values(tmp_path) == [
        {"text": "a", "audio": file, "pictures": [file], "meta": {"a": 1}},
        {"text": "b", "audio": file, "pictures": [file], "meta": 2},
    ]


def test_llama_factorys_description_of_a_folder_is_no_data(tmp_path):
    write_json_lines(tmp_path / "a.jsonl")
    (tmp_path / "dataset_info.json").write_text('{"a": {"file_name": "a.jsonl"}}')
    assert values(tmp_path) == ROWS
