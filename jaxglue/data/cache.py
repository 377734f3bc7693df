"""Content-addressed cache of tokenized data."""

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxglue.data.store import TokenStore
from jaxglue.data.store_files import DamagedStoreError, open_store, remove_store

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def content_key(*parts: Any) -> str:
    """Return a name for the result of these inputs, given in JSON's types."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def open_or_write(folder: Path, write: Callable[[], None]) -> tuple[TokenStore, str]:
    """Open the store in `folder`, written first if it is absent or damaged.

    Returns:
        the store, and the damage found, empty if there was none.

    Raises:
        ValueError: a cache that may not be read or written.
        OSError: a full disk.
    """
    try:
        if not folder.is_dir():
            write()
        try:
            return open_store(folder), ""
        except DamagedStoreError as error:
            damage = f"{error}: tokenized again"
        remove_store(folder)
        write()
        return open_store(folder), damage
    except OSError as error:
        if error.errno in _CLOSED:
            reason = f"{error.strerror}: {error.filename}"
            hint = "name a folder of your own with --cache-dir, or have its owner open it to your group"
            raise ValueError(f"cache_dir {folder.parent}: {reason}: {hint}") from error
        if error.errno not in _FULL:
            raise
        hint = "cannot hold the tokenized data: make room, or name another folder with --cache-dir"
        raise OSError(error.errno, f"{error.strerror}: {folder.parent} {hint}") from error
