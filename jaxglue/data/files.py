"""Rows of one file, by its type."""

import csv
import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from jaxglue.files.json_file import (
    MAX_BYTES,
    MalformedJSONError,
    numbered_lines,
    parse_array,
    parse_json,
    without_nulls,
)
from jaxglue.files.regular_file import open_regular

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET_ROWS, _PARQUET_BUFFER = 64, 2**20
"""Rows decoded and bytes of a column read at a time."""
_ARRAY_BYTES = 2**31
"""Longest array of rows, which is read whole."""
_TEXTS = 'write each text as a row, {"text": "…"} a line of a .jsonl file'
_REMEDIES = {".txt": _TEXTS, ".md": _TEXTS, ".arrow": "name the folder that save_to_disk of `datasets` wrote"}
"""Remedies by the types of files that are not read."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of data files; all but Parquet files may be compressed, with a further suffix."""


class Row(NamedTuple):
    """A row as read."""

    origin: str
    """`file:line`, or file and row number, for error messages."""
    value: dict[str, Any]
    size: float = 0
    """Bytes that it takes in the file, decompressed."""


def is_compressed(path: Path) -> bool:
    """Tell from the name whether a file is compressed."""
    return path.suffix.lower() in _COMPRESSION


def file_type(path: Path) -> str:
    """Return the suffix of a file without that of its compression."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def file_rows(path: Path, skip: int = 0) -> Iterator[Row]:
    """Read the rows of a file after the first `skip`, which are not parsed where the type allows.

    Raises:
        ValueError: an unknown type, damaged compression, or malformed content, with file and line.
    """
    kind = file_type(path)
    if kind == ".parquet" and not is_compressed(path):
        return _parquet_rows(path, skip)
    if kind not in SUFFIXES or kind == ".parquet":
        hint = f"; {_REMEDIES[kind]}" if kind in _REMEDIES else ""
        raise ValueError(f"data: {path} has an unknown file type: expected {expected_files()}{hint}")
    if kind in _DELIMITERS:
        return islice(_table_rows(path, _DELIMITERS[kind]), skip, None)
    return _json_rows(path, skip) if kind == ".json" else _jsonl_rows(path, skip)


def expected_files() -> str:
    """Name the readable types, for errors."""
    return f"{', '.join(SUFFIXES)}, or the text files among them with {' or '.join(_COMPRESSION)}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed."""
    if not is_compressed(path):
        with open_regular(path) as file:
            yield file
        return
    import pyarrow as pa

    compression = _COMPRESSION[path.suffix.lower()]
    if not path.stat().st_size:
        raise ValueError(f"{path}: damaged {compression} file: it has no bytes")
    try:
        with io.BufferedReader(pa.input_stream(str(path), compression=compression)) as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path}: damaged {compression} file: {_in_line(error)}") from error


def _jsonl_rows(path: Path, skip: int) -> Iterator[Row]:
    with _opened(path) as file:
        for number, line in islice(numbered_lines(file, str(path)), skip, None):
            origin = f"{path}:{number}"
            yield _checked(origin, _line_value(line, origin), len(line))


def _line_value(line: bytes, origin: str) -> Any:
    try:
        return parse_json(line.rstrip(), origin, unique_keys=True)
    except MalformedJSONError as error:
        hint = "each line of a .jsonl file holds one row, and a .json file may hold them as an array"
        raise ValueError(f"{error}; {hint}") from error


def _json_rows(path: Path, skip: int) -> Iterator[Row]:
    """Read a `.json` file holding an array of rows or JSON lines."""
    with _opened(path) as file:
        is_array = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_array:
        yield from _jsonl_rows(path, skip)
        return
    with _opened(path) as file:
        text = file.read(_ARRAY_BYTES + 1)
    if len(text) > _ARRAY_BYTES:
        raise ValueError(f"{path}: an array of more than {_ARRAY_BYTES:,} bytes: write a row a line, as .jsonl")
    items = islice(parse_array(text, str(path)), skip, None)
    for number, (value, size) in enumerate(items, skip + 1):
        yield _checked(f"{path}, row {number}", value, size)


def _table_rows(path: Path, delimiter: str) -> Iterator[Row]:
    """Read a table whose first line names its columns; all values are strings."""
    csv.field_size_limit(MAX_BYTES)
    with _opened(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(_bounded_lines(lines), delimiter=delimiter, strict=True)
        try:
            _check_columns(reader.fieldnames or (), delimiter)
            for row in reader:
                yield Row(f"{path}:{reader.line_num}", _full_row(row), sum(map(len, row.values())) + len(row))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{_undecodable_line(path)}: not UTF-8: save the file as UTF-8") from error
        except (csv.Error, ValueError) as error:
            reason = str(error).replace("unexpected end of data", "a quotation mark after this line is never closed")
            raise ValueError(f"{path}:{reader.line_num}: {reason}") from error


def _check_columns(names: Sequence[str], delimiter: str) -> None:
    """Refuse columns of one name, and a first line that is separated by another character."""
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    if len(names) == 1 and (others := set(";\t,|") - {delimiter}) & set(names[0]):
        raise ValueError(
            f"the first line names one column, {names[0]!r:.60}, with {min(others & set(names[0]))!r} in it: separate "
            "columns by commas in a .csv, by tabs in a .tsv file"
        )


def _undecodable_line(path: Path) -> int:
    with _opened(path) as file:
        return next(number for number, line in enumerate(file, 1) if not _is_utf8(line))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bounded_lines(lines: TextIO) -> Iterator[str]:
    for line in iter(partial(lines.readline, MAX_BYTES + 1), ""):
        if len(line) > MAX_BYTES:
            raise ValueError(f"a line of more than {MAX_BYTES:,} characters")
        yield line


def _full_row(row: dict[Any, Any]) -> dict[str, str]:
    if None in row or None in row.values():
        raise ValueError("the row has more or fewer fields than the first line names")
    return row


def _parquet_rows(path: Path, skip: int) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, buffer_size=_PARQUET_BUFFER, page_checksum_verification=True)
        groups, begun = _groups_from(file.metadata, skip)
        batches = file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=groups)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {_in_line(error)}") from error
    if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
        raise ValueError(f"{path}: two columns have the same name")
    size = path.stat().st_size / max(1, file.metadata.num_rows)
    values = (value for batch in batches for value in batch.to_pylist())
    try:
        for number, value in enumerate(islice(values, skip - begun, None), skip + 1):
            yield Row(f"{path}, row {number}", without_nulls(value), size)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged Parquet file: {_in_line(error)}") from error
    except (ValueError, OverflowError) as error:  # a date beyond Python's
        raise ValueError(f"{path}: a value that Python cannot hold: {_in_line(error)}") from error


def _groups_from(metadata: Any, skip: int) -> tuple[list[int], int]:
    """Return the row groups that hold the rows after `skip`, and the rows before these groups."""
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    ends = [*accumulate(sizes)]
    first = bisect_right(ends, skip)
    return [*range(first, len(sizes))], ends[first - 1] if first else 0


def _in_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _checked(origin: str, value: Any, size: float) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{origin}: a row must be a JSON object, got {type(value).__name__}")
    return Row(origin, value, size)
