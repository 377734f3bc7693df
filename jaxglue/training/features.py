"""Features of images by a frozen tower: computed once, and kept in the host's memory and on disk."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jaxglue.data.images import ImageReader
from jaxglue.engine.array_checks import check_arrays
from jaxglue.engine.executor import Executor
from jaxglue.engine.transfer import commit, to_device, to_host
from jaxglue.models.parameters import Params
from jaxglue.planner.host_memory import available_memory
from jaxglue.sharding.mesh import place_rows
from jaxglue.training.feature_files import FeatureFiles
from jaxglue.vision.clips import MAX_TOKENS
from jaxglue.vision.processor import Grid
from jaxglue.vision.rows import Image, Images, RowImages, aligned, alignment, pack_patches

_ROW = 8192
"""Most patches of a row of several images."""
_IMAGES = 4
"""Largest images that a row holds, at least, where it is shorter."""
_SHARE = 0.5
"""Of the host's free memory, for features."""
_PASSING = 2**34
"""Bytes of features of images that no later step sees again, at most."""
_AHEAD = 2**27
"""Bytes of features of images that come next, which wait on the devices, at most."""
_log = logging.getLogger(__name__)


class ImageFeatures:
    """Puts features in the place of patches, of images that were seen before those that are kept.

    Args:
        executor: of the model, whose tower does not train.
        trainable, frozen: its parameters at the start; the tower's stay.
        mesh: devices that share the rows.
        readers: of images, which need not decode those whose features are kept.
        limit: bytes of features to keep in memory; None for half of what the host has free.
        more: further images may come, of any size.
        cache: folder for features that memory has no room for; None to keep none on disk.
        on_disk: keep all in `cache` too, and read those of earlier runs.
    """

    def __init__(
        self,
        executor: Executor,
        trainable: Params,
        frozen: Params,
        mesh: Mesh | None,
        readers: Sequence[ImageReader],
        limit: float | None = None,
        *,
        more: bool = False,
        cache: Path | None = None,
        on_disk: bool = False,
    ):
        self._executor, self._mesh, self._readers = executor, mesh, readers
        self._trainable, self._frozen = trainable["embed_tokens"], frozen["embed_tokens"]
        self._limit = _SHARE * available_memory() if limit is None else limit
        self._processor = readers[0].rules.processor
        self._rows = {clips: _row(readers, more, clips) for clips in (False, True)}
        self._kept: dict[tuple, np.ndarray] = {}
        self._passing, self._lock = dict[tuple, np.ndarray](), Lock()
        self._begun = list[_Made]()
        vision = executor.config.vision
        assert vision is not None
        self._width, self._dtype = vision.feature_width(executor.config.hidden_size), np.dtype(executor.layout.dtype)
        self.planned = _features(readers) * self._width * self._dtype.itemsize
        """Bytes of the features of all images that the readers know."""
        self.files: FeatureFiles | None = None
        """Features on disk; None where memory has room for all."""
        if cache is not None and (on_disk or self.planned > self._limit):
            self.files = FeatureFiles(cache, self._computed_by(), self._width, self._dtype)
            sizes = (self.planned / 1e9, min(self._limit, self.planned) / 1e9)
            _log.info("features of images, %.1f GB, of which memory holds %.1f, are in %s", *sizes, self.files.folder)
        for reader in readers:
            reader.kept.append(self)
        self.bytes = 0
        """Bytes of the features in memory."""
        self.computed = 0
        """Images whose features were computed."""
        self._is_full = False

    def move_tower(self, frozen: Params) -> Params:
        """Move the tower to host memory, from where it comes when it runs; return the model's parameters without it."""
        self._frozen = self._frozen | {"vision": to_host(self._frozen["vision"])}
        unread = jax.tree.map(lambda leaf: jnp.zeros(0, leaf.dtype), self._frozen["vision"])
        return _with_tower(frozen, commit(unread))

    def with_tower(self, frozen: Params) -> Params:
        """Return the model's parameters with the tower on the devices."""
        return _with_tower(frozen, to_device(self._frozen["vision"]))

    def _computed_by(self) -> list[Any]:
        """Return what the features depend on, beside the images."""
        weights = check_arrays({"vision": self._trainable.get("vision", {})} | {"frozen": self._frozen["vision"]})
        digests = [(name, check.digest) for name, check in weights.items()]
        rows = [part for row in self._rows.values() if row.size for part in row]
        computation = [self._processor.key, *rows, str(jax.config.jax_default_matmul_precision)]
        return [digests, repr(self._executor.config.vision), *computation]

    def __contains__(self, key: object) -> bool:
        return key in self._kept or key in self._passing or (self.files is not None and key in self.files)

    def __call__(self, rows: RowImages) -> Images:
        """Return the images of rows with their features."""
        return self._laid(rows, self.of([image for row in rows.rows for image in row]))

    def begin(self, rows: RowImages) -> None:
        """Let the device compute features of rows that come next, as many as may wait there, and do not wait."""
        with self._lock:
            missing = {image.cache_key: image for row in rows.rows for image in row if image.cache_key not in self}
            sizes = [self._processor.tokens(image.grid) * self._width for image in missing.values()]
            room = _AHEAD // self._dtype.itemsize - sum(made.features.size for made in self._begun)
            first = [*missing.values()][: int(np.searchsorted(np.cumsum(sizes), room, "right"))]
            self._begun += self._made([image.decoded(self._processor) for image in first])

    def ahead(self, rows: RowImages) -> Images | RowImages:
        """Return the images of rows with their features where memory holds all of them; else as they are."""
        known = {image.cache_key: self._kept.get(image.cache_key) for row in rows.rows for image in row}
        features = {key: each for key, each in known.items() if each is not None}
        return self._laid(rows, features) if len(features) == len(known) else rows

    def _laid(self, rows: RowImages, features: Mapping[tuple, np.ndarray]) -> Images:
        return rows.with_features(lambda image: features[image.cache_key], self._width, self._dtype)

    def of(self, images: Iterable[Image]) -> dict[tuple, Float[np.ndarray, "I D"]]:
        """Return the features of images by their `Image.cache_key`."""
        with self._lock:  # episodes ask for some while others are trained on
            return self._of({image.cache_key: image for image in images})

    def _of(self, by_key: dict[tuple, Image]) -> dict[tuple, np.ndarray]:
        begun, self._begun = dict(self._computed(self._begun)), []
        known = ((key, begun.get(key, self._kept.get(key, self._passing.get(key)))) for key in by_key)
        found = {key: features for key, features in known if features is not None}
        if self.files is not None:
            read = self.files.read(by_key.keys() - found.keys())
            for key, features in read.items():
                self._remember(key, features)
            found |= read
        missing = [image.decoded(self._processor) for key, image in by_key.items() if key not in found]
        found |= self._computed(self._made(missing))
        return {key: found[key] for key in by_key}

    def _made(self, images: list[Image]) -> Iterator["_Made"]:
        """Yield images of which the device computes the features."""
        if not images:
            return
        frozen = self._frozen | {"vision": to_device(self._frozen["vision"])}
        shards = 1 if self._mesh is None else self._executor.layout.batch_shards
        for same in _of_widths(images):  # in one row with a video's frames, an image's features round otherwise
            layout = self._rows[same[0].grid.is_clip]
            for group in _groups(same, shards, *layout):
                placed = place_rows(pack_patches(group, self._processor, *layout), self._mesh)
                yield _Made(group, layout.align, self._executor.image_features(self._trainable, frozen, placed))

    def _computed(self, made: Iterable["_Made"]) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield the features of images by their keys, and keep as many as there is room for."""
        before = None
        for each in made:
            if before is not None:  # the device computes the next rows while these are copied
                yield from self._kept_of(before)
            before = each
        if before is not None:
            yield from self._kept_of(before)

    def _kept_of(self, made: "_Made") -> Iterator[tuple[tuple, np.ndarray]]:
        for line, row in zip(np.asarray(jax.device_get(made.features)), made.rows, strict=True):
            start = 0
            for image in row:
                first = start // self._processor.merged(image.grid)
                features = np.ascontiguousarray(line[first : first + self._processor.tokens(image.grid)])
                start += aligned(image.grid.patches, made.align)
                self._keep(image, features)
                yield image.cache_key, features

    def _keep(self, image: Image, features: np.ndarray) -> None:
        self.computed += 1
        if not image.stays:
            self._passing[image.cache_key] = features
            while len(self._passing) > 1 and sum(each.nbytes for each in self._passing.values()) > _PASSING:
                del self._passing[next(iter(self._passing))]
            return
        in_memory = self._remember(image.cache_key, features)
        on_disk = self.files is not None and self.files.write(image.cache_key, features)
        if not (in_memory or on_disk or self._is_full):
            _log.warning(
                "features of %d images fill %.1f GB of the host's memory%s: those of others are computed again in "
                "each epoch",
                *(len(self._kept), self.bytes / 1e9, "" if self.files is None else ", and half of the free disk"),
            )
            self._is_full = True

    def _remember(self, key: tuple, features: np.ndarray) -> bool:
        """Keep features in memory; return False where it has no room."""
        if self.bytes + features.nbytes > self._limit:
            return False
        self._kept[key] = features
        self.bytes += features.nbytes
        return True


def _with_tower(frozen: Params, tower: Params) -> Params:
    return {**frozen, "embed_tokens": {**frozen["embed_tokens"], "vision": tower}}


def _of_widths(images: Sequence[Image]) -> list[list[Image]]:
    """Return images, pairs of a video's frames, and clips of audio, by themselves."""
    by_width = dict[tuple[bool, int], list[Image]]()
    for image in images:
        assert image.patches is not None
        by_width.setdefault((image.grid.is_clip, image.patches.shape[1]), []).append(image)
    return list(by_width.values())


def _features(readers: Sequence[ImageReader]) -> int:
    """Return the features of all images that readers know, each image once."""
    records = [reader.store.images for reader in readers if reader.store.images is not None]
    if not records:
        return 0
    images = np.unique(np.concatenate([np.c_[part.digests, part.grids] for part in records]), axis=0)
    grids, counts = np.unique(images[:, -2:], axis=0, return_counts=True)
    tokens = readers[0].rules.processor.tokens
    return sum(tokens(Grid(*grid)) * count for grid, count in zip(grids.tolist(), counts.tolist(), strict=True))


class _Made(NamedTuple):
    """Rows of images whose features the device computes."""

    rows: list[list[Image]]
    align: int
    features: Float[jax.Array, "B I D"]


class _Row(NamedTuple):
    """Layout of every row: one for a run, in which an image's features are the same to the bit."""

    size: int
    """Patches."""
    align: int
    """Images begin at multiples of it."""


def _row(readers: Sequence[ImageReader], more: bool, clips: bool) -> _Row:
    """Return the layout of rows of images, or of clips of audio."""
    processor = readers[0].rules.processor
    stored = [reader.store.images.grids for reader in readers if reader.store.images is not None]
    grids = [Grid(*grid) for grid in np.unique(np.concatenate(stored), axis=0).tolist()] if stored else []
    most = max((grid.patches for grid in grids if grid.is_clip == clips), default=0)
    if more:
        heard = 0 if processor.hearing is None else MAX_TOKENS
        most = heard if clips else processor.max_tokens * processor.merge**2
    align = alignment(processor, clips)
    largest = aligned(most, align)
    return _Row(max(largest, min(_ROW, _IMAGES * largest)), align)


def _groups(images: Sequence[Image], shards: int, size: int, align: int) -> Iterator[list[list[Image]]]:
    """Yield groups of one row of images for each shard; the last rows may be empty."""
    rows, room = list[list[Image]](), 0
    for image in sorted(images, key=lambda image: -image.grid.patches):
        needed = aligned(image.grid.patches, align)
        if needed > room:
            rows.append([])
            room = size
        rows[-1].append(image)
        room -= needed
    for first in range(0, len(rows), shards):
        group = rows[first : first + shards]
        yield group + [[] for _ in range(shards - len(group))]
