"""Readers of rows, with their origins, from files, folders and `datasets`."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jaxglue.data.config import HUB_PREFIX, Source
from jaxglue.data.files import SUFFIXES, Row, expected_files, file_rows, file_type
from jaxglue.data.hub_client import checked_answers
from jaxglue.data.messages import listed
from jaxglue.data.patterns import pair_renderer
from jaxglue.files.json_file import without_nulls

SAVED_INFO = ("state.json", "dataset_dict.json", "dataset_info.json")
"""Files without rows in a folder saved with `datasets`."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{,95}(/[A-Za-z0-9][\w.-]{,95})?")
_SHOWN = 300
"""Longest reason of `datasets`, in characters."""
_ARROW_ROWS = 64
"""Rows read at a time."""
_CHUNK_BYTES = 2**24
"""Bytes of rows after which a chunk ends."""


def read_rows(source: Source) -> Iterator[Row]:
    """Read the rows of a source in order, their columns renamed; files of a folder by name.

    Raises:
        ValueError: a missing source, an unknown file type, malformed content (with file and line), a row that is not an
            object, or one without a column to rename.
    """
    return islice(chain.from_iterable(part() for part in source_parts(source)), source.rows)


def source_parts(source: Source) -> "list[Callable[..., Iterator[Row]]]":
    """Return a reader for each file of a source; its argument is the number of rows to skip.

    Raises:
        ValueError: a missing source, or no data file in it.
    """
    parts: list[Callable[..., Iterator[Row]]]
    if source.name.startswith(HUB_PREFIX):
        parts = [partial(_arrow_rows, _load_from_hub(source), source.name)]
    elif _is_saved_dataset(Path(source.name)):
        parts = [partial(_arrow_rows, _load_saved(source), source.name)]
    else:
        parts = [partial(file_rows, path) for path in data_files(source.name)]
        parts = [partial(_slice, parts, source)] if is_slice(source.split) else parts
    if source.columns:
        parts = [partial(_changed_rows, part, partial(_renamed, columns=source.columns)) for part in parts]
    if source.prompt:
        render = pair_renderer(source.prompt, source.completion)
        parts = [partial(_changed_rows, part, partial(_rendered, render=render)) for part in parts]
    return [*parts]


def is_slice(split: str) -> bool:
    """Tell whether a split is a part of one, such as train[:10%]."""
    return "[" in split


def has_splits(source: Source) -> bool:
    """Tell whether a source's rows are in splits with names: files and folders of files are all of them train."""
    return source.name.startswith(HUB_PREFIX) or _is_saved_dataset(Path(source.name))


def _slice(parts: Sequence[Callable[..., Iterator[Row]]], source: Source, skip: int = 0) -> Iterator[Row]:
    """Yield the rows of a slice of files, which are split train together."""
    counted = sum(1 for part in parts for _ in part())
    for _, first, end in _bounds(source, {"train": counted}):
        rows = islice(chain.from_iterable(part() for part in parts), first, end)
        skipped = min(skip, end - first)
        skip -= skipped
        yield from islice(rows, skipped, None)


def _bounds(source: Source, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return the name, first row and end of each part that a split of several slices has.

    Raises:
        ValueError: a name that is not among the splits, or no such slice.
    """
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(dict(sizes))
    except (ValueError, AssertionError) as error:
        raise ValueError(f"data: {source.name}, split {source.split!r}: {error}") from error
    return [(part.splitname, part.from_, part.to) for part in parts]


def row_chunks(rows: Iterable[Row], most: int) -> Iterator[tuple[Row, ...]]:
    """Group rows into chunks of at most `most`, ended earlier by large rows."""
    chunk: list[Row] = []
    size = 0.0
    for row in rows:
        chunk.append(row)
        size += row.size
        if len(chunk) == most or size > _CHUNK_BYTES:
            yield tuple(chunk)
            chunk, size = [], 0.0
    if chunk:
        yield tuple(chunk)


def data_files(name: str) -> list[Path]:
    """Return a local source's data files, sorted by name; hidden ones of a folder, such as backups, are left out.

    Raises:
        ValueError: no such file or folder, or no data file in it.
    """
    path = Path(name)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        is_saved = _is_saved_dataset(path)
        shown = (p for p in path.rglob("*") if _is_shown(p, path))
        # LLaMA-Factory's folders have a dataset_info.json too, which describes their files.
        files = sorted(p for p in shown if is_saved or (file_type(p) in SUFFIXES and p.name not in SAVED_INFO))
    elif path.exists():
        raise ValueError(f"data: {name} is neither a file nor a folder: write its rows to a file")
    else:
        hint = f"a data set of the Hugging Face hub is named {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name:subset"
        if any(character in name for character in "*?["):
            hint = "patterns are not expanded: name the folder, or each file"
        raise ValueError(f"data: no such file or folder: {name} ({hint})")
    if not files:
        raise ValueError(f"data: no data file in {name}: expected {expected_files()}")
    return files


def source_files(source: Source) -> list[Path]:
    """Return a local source's data files; of saved data sets, those of its split.

    Raises:
        ValueError: as `data_files`.
    """
    split = Path(source.name) / source.split.partition("[")[0]
    is_split = (Path(source.name) / "dataset_dict.json").is_file() and split.is_dir()
    return data_files(str(split) if is_split else source.name)


def _is_shown(path: Path, folder: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)


def hub_fingerprint(source: Source) -> str:
    """Return the fingerprint of a hub data set's content.

    Raises:
        ValueError: the data set cannot be loaded.
    """
    return _load_from_hub(source)._fingerprint


def _changed_rows(part: Callable[..., Iterator[Row]], change: Callable[[Row], Row], skip: int = 0) -> Iterator[Row]:
    return map(change, part(skip))


def _rendered(row: Row, render: Callable[[dict[str, Any]], dict[str, str]]) -> Row:
    """Return a row of prompt and completion, made of another's columns."""
    try:
        return Row(row.origin, render(row.value), row.size)
    except ValueError as error:
        raise ValueError(f"{row.origin}: {error}") from error


def _renamed(row: Row, columns: dict[str, str]) -> Row:
    """Rename columns, given by new name; another column of the new name is dropped."""
    if missing := [old for old in columns.values() if old not in row.value]:
        raise ValueError(f"{row.origin}: no column {listed(missing)} to rename; the columns are {listed(row.value)}")
    kept = {key: value for key, value in row.value.items() if key not in columns.values()}
    return Row(row.origin, {**kept, **{new: row.value[old] for new, old in columns.items()}}, row.size)


def _load_saved(source: Source) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(source.name)
    except Exception as error:  # datasets and pyarrow raise errors of many types for damaged files
        raise _damaged_folder(source.name, error) from error
    if not isinstance(loaded, datasets.DatasetDict):
        if not is_slice(source.split):
            return loaded
        loaded = datasets.DatasetDict(train=loaded)
    if is_slice(source.split):
        bounds = _bounds(source, {name: len(rows) for name, rows in loaded.items()})
        return datasets.concatenate_datasets([loaded[name].select(range(*ends)) for name, *ends in bounds])
    if source.split not in loaded:
        raise ValueError(f"data: {source.name} has no split {source.split!r}: choose --split from {', '.join(loaded)}")
    return loaded[source.split]


def _load_from_hub(source: Source) -> Any:
    import datasets

    name, _, subset = source.name.removeprefix(HUB_PREFIX).partition(":")
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(f"data: {source.name:.200}: expected {HUB_PREFIX}owner/name or {HUB_PREFIX}owner/name:subset")
    try:
        with _torch_unnamed(), checked_answers():
            return datasets.load_dataset(name, *([subset] if subset else []), split=source.split)
    except Exception as error:  # datasets raises errors of many types for what it finds on the hub
        reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        raise ValueError(f"data: cannot load {source.name}, split {source.split!r}, from the hub: {reason}") from error


@contextmanager
def _torch_unnamed() -> Iterator[None]:
    """Take torch's mark as absent out of `sys.modules`: datasets imports torch wherever it is named there."""
    absent = sys.modules.get("torch", sys) is None
    if absent:
        del sys.modules["torch"]
    try:
        yield
    finally:
        if absent:
            sys.modules["torch"] = None  # type: ignore[assignment]


def _arrow_rows(dataset: Any, name: str, skip: int = 0) -> Iterator[Row]:
    try:
        for number, value in enumerate(arrow_values(dataset.skip(skip) if skip else dataset), skip + 1):
            yield Row(f"{name}, row {number}", value)
    except (OSError, ValueError) as error:
        raise _damaged_folder(name, error) from error


def arrow_values(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set of `datasets` without nulls; pictures and sounds stay undecoded."""
    import datasets

    if dataset.features is None:  # of a stream
        yield from map(without_nulls, dataset)
        return
    features = datasets.Features(_undecoded(dict(dataset.features)))
    batches = dataset.with_format("arrow").iter(_ARROW_ROWS)
    values = (value for batch in batches for value in batch.to_pylist())
    yield from map(without_nulls, map(features.decode_example, values))


def _undecoded(feature: Any) -> Any:
    """Return a feature with nothing to decode but JSON: no format uses pictures or sounds."""
    if isinstance(feature, dict):
        return {name: _undecoded(each) for name, each in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(each) for each in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    return (
        replace(feature, decode=False) if hasattr(feature, "decode") and type(feature).__name__ != "Json" else feature
    )


def _damaged_folder(name: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
    is_hub = name.startswith(HUB_PREFIX)
    remedy = "delete its copy in the cache of `datasets`" if is_hub else "save it again with save_to_disk"
    return ValueError(f"{name}: a damaged data set: {reason}; {remedy}")


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in SAVED_INFO[:2])
