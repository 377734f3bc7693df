"""Readers of rows, with their origins, from files, folders and `datasets`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxglue.data.json_text import parse_json

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
HUB_PREFIX = "hf:"


class Row(NamedTuple):
    """A row as read."""

    origin: str
    """`file:line`, or file and row number, for error messages."""
    value: dict[str, Any]


def read_rows(sources: Sequence[str], *, split: str = "train") -> Iterator[Row]:
    """Read the rows of all sources in order; files of a folder by name.

    Raises:
        ValueError: a missing source, an unknown file type, malformed JSON or UTF-8 (with file and line), or a row that
            is not an object.
    """
    for source in sources:
        if source.startswith(HUB_PREFIX):
            yield from _hub_rows(source, split)
        elif _is_saved_dataset(Path(source)):
            yield from _saved_rows(Path(source), split)
        else:
            for path in data_files(source):
                yield from _file_rows(path)


def data_files(source: str) -> list[Path]:
    """Return a local source's data files, sorted by name.

    Raises:
        ValueError: no such file or folder, or no data file in it.
    """
    path = Path(source)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and (_is_saved_dataset(path) or p.suffix in SUFFIXES))
    else:
        hint = f"a data set of the Hugging Face hub is named {HUB_PREFIX}owner/name"
        raise ValueError(f"data: no such file or folder: {source} ({hint})")
    if not files:
        raise ValueError(f"data: no data file in {source}: expected {', '.join(SUFFIXES)}")
    return files


def _file_rows(path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(path)
        case ".json":
            return _json_rows(path)
        case ".parquet":
            return _parquet_rows(path)
    raise ValueError(f"data: {path} has an unknown file type: expected {', '.join(SUFFIXES)}")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                origin = f"{path}:{number}"
                yield _checked(origin, _parse(line, origin))


def _json_rows(path: Path) -> Iterator[Row]:
    """Read a `.json` file holding an array of rows or JSON lines."""
    with path.open("rb") as file:
        is_array = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_array:
        yield from _jsonl_rows(path)
        return
    for number, value in enumerate(_parse(path.read_bytes(), str(path)), 1):
        yield _checked(f"{path}, row {number}", value)


def _parse(data: bytes, origin: str) -> Any:
    try:
        return parse_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(path).iter_batches(batch_size=1024)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable Parquet file: {error}") from error
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            yield Row(f"{path}, row {number}", _without_nulls(value))


def _saved_rows(path: Path, split: str) -> Iterator[Row]:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ValueError(f"data: {path} has no split {split!r}: choose --split from {', '.join(loaded)}")
        loaded = loaded[split]
    yield from _arrow_rows(loaded, str(path))


def hub_fingerprint(source: str, split: str) -> str:
    """Return the fingerprint of a hub data set's content.

    Raises:
        ValueError: the data set cannot be loaded.
    """
    return _load_from_hub(source, split)._fingerprint


def _hub_rows(source: str, split: str) -> Iterator[Row]:
    yield from _arrow_rows(_load_from_hub(source, split), source)


def _load_from_hub(source: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.removeprefix(HUB_PREFIX), split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"data: cannot load {source}, split {split!r}, from the hub: {error}") from error


def _arrow_rows(dataset: Any, name: str) -> Iterator[Row]:
    for number, value in enumerate(dataset, 1):
        yield Row(f"{name}, row {number}", _without_nulls(value))


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _checked(origin: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{origin}: a row must be a JSON object, got {type(value).__name__}")
    return Row(origin, value)


def _without_nulls(value: Any) -> Any:
    """Drop nulls: Arrow fills absent fields with them, which would confuse chat templates."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
