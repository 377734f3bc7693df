"""XLA's measured choices of algorithms on disk, which it takes as they are: damage would choose others, or fail."""

import json
import logging
from pathlib import Path

from jaxglue.data.store import file_digest
from jaxglue.json_file import read_json, replace_text

FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"
"""JAX's name of their folder, in that of the compiled programs."""
_DIGESTS = ".jaxglue.tuned.json"
_log = logging.getLogger(__name__)


def check_tuning(cache: Path) -> None:
    """Remove choices that differ from their noted digests, and note the others."""
    try:
        if (cache / FOLDER).is_file():
            (cache / FOLDER).unlink()
            _log.warning("%s: removed a file in the place of a folder", cache / FOLDER)
        known = _read(cache / _DIGESTS)
        found = {path: file_digest(path) for path in _choices(cache)}
        damaged = [path for path, digest in found.items() if known.get(_name(path, cache), digest) != digest]
        for path in damaged:
            path.unlink(missing_ok=True)
        if damaged:
            _log.warning("%s: removed damaged choices of algorithms (%d): measured again", cache, len(damaged))
    except OSError:  # no folder yet, or one that is only read
        return
    note_tuning(cache)


def note_tuning(cache: Path) -> None:
    """Note the digests of new choices, and forget those of removed ones."""
    try:
        known = _read(cache / _DIGESTS)
        names = {_name(path, cache): path for path in _choices(cache)}
        noted = {name: known.get(name) or file_digest(path) for name, path in names.items()}
        if noted != known:
            replace_text(cache / _DIGESTS, json.dumps(noted))
    except OSError:
        return


def _choices(cache: Path) -> list[Path]:
    return [path for path in (cache / FOLDER).rglob("*") if path.is_file()]


def _name(path: Path, cache: Path) -> str:
    return path.relative_to(cache / FOLDER).as_posix()


def _read(path: Path) -> dict[str, object]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
