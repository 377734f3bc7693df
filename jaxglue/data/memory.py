"""Rows in memory, written to a file of the cache folder that is named by their content.

A run reads that file as any other: checks, token cache, `--resume` and the recorded recipe are the same.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxglue.data.config import DataConfig
from jaxglue.data.formats import MEDIA_COLUMNS
from jaxglue.data.readers import arrow_values
from jaxglue.files.atomic import temporary_beside
from jaxglue.files.json_file import without_nulls
from jaxglue.vision.images import png_of

_ROWS_AT_ONCE = 64
"""Rows of a table that become Python objects together."""
_WRITTEN = re.compile(r"rows-[0-9a-f]{32}\.jsonl")
_NAMED = 120
"""Characters of a value that a message shows."""


def holds_rows(data: Any) -> bool:
    """Tell whether a setting of data is not names alone."""
    return data is not None and not all(map(_is_name, _parts(data)))


def with_named_tokenizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which a tokenizer, if it is an object, is a folder of the cache, named by its content.

    Raises:
        ValueError: neither a name nor a tokenizer of transformers.
    """
    tokenizer = settings.get("tokenizer")
    if tokenizer is None or _is_name(tokenizer):
        return {**settings}
    if not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(f"tokenizer: expected a folder or a tokenizer of transformers, got {tokenizer!r:.100}")
    folder = Path(settings.get("cache_dir") or DataConfig.cache_dir) / "tokenizers"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder))
    tokenizer.save_pretrained(temporary)
    digest = hashlib.sha256()
    for path in sorted(temporary.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    target = folder / digest.hexdigest()[:32]
    try:
        os.rename(temporary, target)
    except OSError:  # it is there
        shutil.rmtree(temporary)
    return {**settings, "tokenizer": str(target)}


def name_sources(data: Any, folder: Path) -> tuple[str, ...]:
    """Return data sources by name, after writing those that are rows in memory to files.

    Args:
        data: a name, rows, or several of both. Rows are mappings in a list, a generator or any other iterable; a
            `datasets.Dataset` or `IterableDataset`; or a table of pandas or pyarrow.
        folder: for the files; made where it is missing.

    Raises:
        ValueError: no rows, a row that is not a mapping, or a value that JSON does not hold.
    """
    return tuple(os.fspath(part) if _is_name(part) else str(write_rows(part, folder)) for part in _parts(data))


def _parts(data: Any) -> Sequence[Any]:
    """Return several sources, or one alone: rows in a list are one."""
    several = isinstance(data, list | tuple) and not any(isinstance(each, Mapping) for each in data)
    return data if several else [data]


def _is_name(data: Any) -> bool:
    return isinstance(data, str | os.PathLike)


def write_rows(data: Any, folder: Path) -> Path:
    """Write rows as JSON lines to a file named by their SHA-256, and return it; equal rows share one file.

    Raises:
        ValueError: as `name_sources`.
    """
    digest, count = hashlib.sha256(), 0
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(folder / "rows.jsonl")
    try:
        with open(temporary, "wb") as file:
            for count, row in enumerate(_mappings(data), start=1):
                line = _line(row, count)
                digest.update(line)
                file.write(line)
        if not count:
            raise ValueError("data: no rows in memory: pass at least one")
        return temporary.replace(folder / f"rows-{digest.hexdigest()[:32]}.jsonl")
    finally:
        temporary.unlink(missing_ok=True)


def holds_memory(path: Path) -> bool:
    """Tell whether a file was written by `write_rows`."""
    return _WRITTEN.fullmatch(path.name) is not None


def _mappings(data: Any) -> Iterator[Any]:
    """Yield the rows of a table or an iterable; nulls that Arrow fills in are dropped."""
    if hasattr(data, "iterrows"):  # a table of pandas, whose missing values are NaN, NaT or NA
        import pyarrow as pa

        data = pa.Table.from_pandas(data, preserve_index=False)
    if hasattr(data, "to_batches"):
        batches = data.to_batches(max_chunksize=_ROWS_AT_ONCE)
        return (without_nulls(row) for batch in batches for row in batch.to_pylist())
    if hasattr(data, "with_format") and hasattr(data, "features"):
        return arrow_values(data)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise ValueError(
            f"data: expected rows, as a list of dictionaries, a table of pandas or pyarrow, or a data set of "
            f"`datasets`, got {type(data).__name__}"
        )
    return iter(data)


def _line(row: Any, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise ValueError(f"data: row {number}: expected a dictionary, got {type(row).__name__}")
    try:
        texts = {key: value for key, value in row.items() if key in MEDIA_COLUMNS or not _is_binary(value)}
        return json.dumps(texts, ensure_ascii=False, allow_nan=False, default=_plain).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"data: row {number}: {error}; rows hold texts, numbers, lists and dictionaries") from error


def _is_binary(value: Any) -> bool:
    """Tell whether a column holds a picture or a sound."""
    return isinstance(value, bytes) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))


def _plain(value: Any) -> Any:
    """Return a scalar or array of numpy, a mapping, bytes or an image of Pillow in JSON's types."""
    if isinstance(value, bytes | bytearray):
        return {"base64": base64.b64encode(value).decode()}
    if hasattr(value, "getexif"):
        return {"base64": base64.b64encode(png_of(value)).decode()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.{_NAMED}} is a {type(value).__name__}")
