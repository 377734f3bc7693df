"""XLA's measured choices of algorithms on disk, which it takes as they are: damage would choose others, or fail."""

import json
import logging
import os
from pathlib import Path

from jaxglue.data.store import file_digest
from jaxglue.json_file import read_json

FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"
"""JAX's name of their folder, in that of the compiled programs."""
_DIGESTS = ".jaxglue.tuned.json"
_log = logging.getLogger(__name__)


def check_tuning(cache: Path) -> None:
    """Remove choices that differ from the digests of an earlier start, and note those of new ones."""
    try:
        files = {path.name: path for path in (cache / FOLDER).iterdir() if path.is_file()}
        known = _read(cache / _DIGESTS)
        found = {name: file_digest(path) for name, path in files.items()}
        damaged = [name for name, digest in found.items() if known.get(name, digest) != digest]
        for name in damaged:
            files[name].unlink(missing_ok=True)
        if damaged:
            _log.warning("%s: removed damaged choices of algorithms (%d): measured again", cache, len(damaged))
        kept = {name: digest for name, digest in found.items() if name not in damaged}
        if kept != known:
            _write(cache / _DIGESTS, kept)
    except OSError:  # no folder yet, or one that is only read
        return


def _read(path: Path) -> dict[str, object]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _write(path: Path, digests: dict[str, str]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(digests))
    temporary.replace(path)
