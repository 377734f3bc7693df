"""Memory-mapped store of tokenized documents."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, UInt8

from jaxglue.data.encode import Encoded


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Concatenated documents: document `d` is `tokens[offsets[d] : offsets[d + 1]]`."""

    tokens: Int32[np.ndarray, "N"]
    mask: UInt8[np.ndarray, "N"]
    """1 for tokens to predict."""
    offsets: Int64[np.ndarray, "documents+1"]
    info: dict[str, Any]
    """`digest` of the content, `max_token`, and the writer's fields."""

    @property
    def lengths(self) -> Int64[np.ndarray, "documents"]:
        """Return the tokens in each document."""
        return np.diff(self.offsets)

    def targets_within(self, ends: Int64[np.ndarray, "documents"]) -> Int64[np.ndarray, "documents"]:
        """Count target tokens per document truncated at `ends`; first tokens are never targets."""
        counts = np.zeros(len(ends), np.int64)
        some = np.flatnonzero(ends - self.offsets[:-1] > 1)
        bounds = np.stack([self.offsets[some] + 1, ends[some]], 1).ravel()
        if len(bounds) and bounds[-1] == len(self.mask):
            bounds = bounds[:-1]
        if len(bounds):
            counts[some] = np.add.reduceat(self.mask, bounds, dtype=np.int64)[::2]
        return counts


def open_store(folder: Path) -> TokenStore:
    """Memory-map a store of `write_store`."""
    info = json.loads((folder / "info.json").read_text())
    tokens = np.memmap(folder / "tokens.int32", np.int32, mode="r")
    mask = np.memmap(folder / "mask.uint8", np.uint8, mode="r")
    return TokenStore(tokens=tokens, mask=mask, offsets=np.load(folder / "offsets.npy"), info=info)


def write_store(folder: Path, chunks: Iterable[Encoded], **info: Any) -> None:
    """Write the documents under a temporary name, then rename.

    Raises:
        ValueError: no token at all.
        OSError: a failed write; nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        content = _write_documents(temporary, chunks)
        (temporary / "info.json").write_text(json.dumps({**content, **info}))
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_documents(folder: Path, chunks: Iterable[Encoded]) -> dict[str, Any]:
    lengths, digest, largest = [np.zeros(1, np.int64)], hashlib.blake2b(digest_size=16), -1
    with (folder / "tokens.int32").open("wb") as tokens, (folder / "mask.uint8").open("wb") as mask:
        for chunk in chunks:
            for array, file in ((chunk.tokens, tokens), (chunk.mask, mask)):
                file.write(array.data)
                digest.update(array.data)
            digest.update(chunk.lengths.data)
            lengths.append(chunk.lengths)
            largest = max(largest, int(chunk.tokens.max(initial=-1)))
    if largest < 0:
        raise ValueError("the data set is empty: no row has any text")
    np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
    return {"digest": digest.hexdigest(), "max_token": largest}


def _publish(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        if not (folder / "info.json").is_file():  # else another process published the same content
            raise
