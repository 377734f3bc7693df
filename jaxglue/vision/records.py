"""Images of stored documents: their patches' grids, digests, and bytes or files."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8

from jaxglue.vision.clips import FRAMES
from jaxglue.vision.images import MAX_PIXELS, ImageSource, Kind, digest_of, frames_of, image_size, read_image
from jaxglue.vision.processor import Grid, Processor


class ImageRecord(NamedTuple):
    """An image as a document stores it."""

    grid: Grid
    digest: bytes
    source: ImageSource
    stamp: tuple[int, int]
    """Bytes and time of change of its file; zeros for an image in the row."""

    def read(self) -> bytes:
        """Return its bytes; raise ValueError where its file is not the one that was recorded."""
        data = self.source.read()
        if digest_of(data) != self.digest:
            raise ValueError(
                f"{self.source.kind} {self.source.path} was changed while it was in use: bring it back, or start again"
            )
        return data


def record_image(source: ImageSource, processor: Processor, number: int, max_pixels: int = MAX_PIXELS) -> ImageRecord:
    """Read and decode an image or a clip once, so that a damaged one is found before training.

    Raises:
        ValueError: as `ImageSource.read`, `read_image` and `read_clip`, naming the image in its row; or a clip and a
            model that hears none.
    """
    kind = source.kind
    try:
        stamp = _stamp(source) if source.path else (0, 0)
        data = source.read()
        grid = _grid(source, data, processor, max_pixels)
    except ValueError as error:
        where = "" if source.path and source.path in str(error) else f" {source.path}" if source.path else ""
        raise ValueError(f"{kind} {number}{where}: {error}".replace(f"{kind} {number}: {kind}", kind)) from error
    return ImageRecord(grid, digest_of(data), source, stamp)


def _grid(source: ImageSource, data: bytes, processor: Processor, max_pixels: int) -> Grid:
    """Return the patches of an image or the frames of a clip, which is decoded."""
    if source.kind == "clip":
        if processor.hearing is None:
            raise ValueError("this model hears no audio, which Gemma 4 E2B and E4B do: leave out such rows")
        return processor.hearing.grid(data)
    grid = processor.bounded_grid(*image_size(data, max_pixels), is_frame=source.kind == "frame")
    for frame in frames_of(data):
        read_image(frame, max_pixels)
    return grid


def _stamp(source: ImageSource) -> tuple[int, int]:
    try:
        status = os.stat(source.file)
    except OSError as error:
        raise ValueError(f"{source.kind} {source.path}: {error.strerror or error}") from error
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, kw_only=True)
class ImageRecords:
    """N images of documents, in the order of their tokens."""

    owners: Int64[np.ndarray, " N"]
    """Document of each image."""
    grids: Int32[np.ndarray, "N 2"]
    digests: UInt8[np.ndarray, "N 16"]
    stamps: Int64[np.ndarray, "N 2"]
    """Bytes and time of change of its file; zeros for an image whose bytes are in `blob`."""
    offsets: Int64[np.ndarray, " N+1"]
    """Ends of bytes and paths in `blob`."""
    blob: UInt8[np.ndarray, " bytes"]
    """Bytes of images, or paths of their files in UTF-8."""

    def __len__(self) -> int:
        return len(self.owners)

    @classmethod
    def of(cls, documents: Sequence[Sequence[ImageRecord]]) -> "ImageRecords":
        """Return the images of documents."""
        images = [image for document in documents for image in document]
        texts = [image.source.path.encode() if image.source.path else image.source.data for image in images]
        return cls(
            owners=np.repeat(np.arange(len(documents)), [len(document) for document in documents]).astype(np.int64),
            grids=np.array([image.grid for image in images], np.int32).reshape(-1, 2),
            digests=np.frombuffer(b"".join(image.digest for image in images), np.uint8).reshape(-1, 16),
            stamps=np.array([image.stamp for image in images], np.int64).reshape(-1, 2),
            offsets=np.cumsum([0, *map(len, texts)], dtype=np.int64),
            blob=np.frombuffer(b"".join(texts), np.uint8),
        )

    @classmethod
    def joined(cls, parts: Sequence["ImageRecords"], documents: Iterable[int]) -> "ImageRecords":
        """Return the images of parts with so many documents each, one after the other."""
        firsts, starts = np.cumsum([0, *documents]), np.cumsum([0, *(part.offsets[-1] for part in parts)])
        values: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in ("grids", "digests", "stamps")
        }
        blobs = [part.blob for part in parts]
        return cls(
            **values,
            owners=np.concatenate([part.owners + first for part, first in zip(parts, firsts, strict=False)]),
            offsets=np.concatenate(
                [*(part.offsets[:-1] + s for part, s in zip(parts, starts, strict=False)), starts[-1:]]
            ),
            blob=blobs[0] if len(blobs) == 1 else np.concatenate(blobs),
        )

    def source(self, image: int) -> ImageSource:
        """Return the bytes or the file of an image."""
        stored = self.blob[self.offsets[image] : self.offsets[image + 1]].tobytes()
        kind: Kind = "clip" if self.grid(image).is_clip else "image"
        in_file = self.stamps[image].any()
        return ImageSource(path=stored.decode(), kind=kind) if in_file else ImageSource(data=stored, kind=kind)

    def grid(self, image: int) -> Grid:
        """Return the patches of an image."""
        return Grid(*self.grids[image].tolist())

    @property
    def clips(self) -> Bool[np.ndarray, " N"]:
        """Tell which are clips of audio."""
        return self.grids[:, 1] == 0

    @property
    def patches(self) -> Int64[np.ndarray, " N"]:
        """Return the patches of each image, and the tokens of each clip."""
        rows, columns = self.grids.astype(np.int64).T
        return np.where(self.clips, -(-rows // FRAMES), rows * columns)

    def record(self, image: int) -> ImageRecord:
        """Return an image."""
        bytes_, time = self.stamps[image].tolist()
        return ImageRecord(self.grid(image), self.digests[image].tobytes(), self.source(image), (bytes_, time))

    def changed(self) -> str | None:
        """Return an image whose file was changed or removed since it was recorded; None without one."""
        for image in np.flatnonzero(self.stamps.any(axis=1)):
            source = self.source(int(image))
            try:
                same = _stamp(source) == tuple(self.stamps[image])
            except ValueError:
                same = False
            if not same:
                return source.path
        return None

    def of_document(self, document: int) -> range:
        """Return the images of a document."""
        first, end = np.searchsorted(self.owners, [document, document + 1])
        return range(int(first), int(end))

    def of_documents(self, documents: Sequence[int]) -> "ImageRecords":
        """Return the images of some documents, which are numbered anew."""
        owned = [self.of_document(document) for document in documents]
        numbers = [image for images in owned for image in images]
        stored = [self.blob[self.offsets[image] : self.offsets[image + 1]] for image in numbers]
        return ImageRecords(
            owners=np.repeat(np.arange(len(owned)), [len(images) for images in owned]).astype(np.int64),
            grids=self.grids[numbers],
            digests=self.digests[numbers],
            stamps=self.stamps[numbers],
            offsets=np.cumsum([0, *map(len, stored)], dtype=np.int64),
            blob=np.concatenate(stored) if stored else self.blob[:0],
        )


RECORD_FILES = {field.name: f"images.{field.name}" for field in fields(ImageRecords)}
"""Files of the arrays, by their names."""
RECORD_SHAPES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "owners": (np.int64, (-1,)),
    "grids": (np.int32, (-1, 2)),
    "digests": (np.uint8, (-1, 16)),
    "stamps": (np.int64, (-1, 2)),
    "offsets": (np.int64, (-1,)),
    "blob": (np.uint8, (-1,)),
}
"""Types and shapes of the arrays in them."""


def open_records(folder: Path) -> ImageRecords:
    """Open the images of a folder; their bytes stay in the file until they are read."""
    arrays: dict[str, Any] = {}
    for name, (dtype, shape) in RECORD_SHAPES.items():
        path = folder / RECORD_FILES[name]
        maps = name == "blob" and path.stat().st_size
        arrays[name] = np.memmap(path, dtype, "r") if maps else np.fromfile(path, dtype).reshape(shape)
    return ImageRecords(**arrays)
