"""Features of images by a frozen tower: computed once in a run, and kept in the host's memory."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jaxglue.data.images import ImageReader
from jaxglue.engine.executor import Executor
from jaxglue.models.parameters import Params
from jaxglue.planner.host_memory import available_memory
from jaxglue.sharding.mesh import place_rows
from jaxglue.vision.rows import Image, Images, RowImages, aligned, alignment, pack_patches

_ROW = 8192
"""Most patches of a row of several images."""
_IMAGES = 4
"""Largest images that a row holds, at least, where it is shorter."""
_SHARE = 0.5
"""Of the host's free memory, for features."""
_log = logging.getLogger(__name__)


class ImageFeatures:
    """Puts features in the place of patches, of images that were seen before those that are kept.

    Args:
        executor: of the model, whose tower does not train.
        trainable, frozen: its parameters at the start; the tower's stay.
        mesh: devices that share the rows.
        readers: of images, which need not decode those whose features are kept.
        limit: bytes of features to keep; None for half of the host's free memory.
        more: further images may come, of any size.
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
    ):
        self._executor, self._mesh = executor, mesh
        self._trainable, self._frozen = trainable["embed_tokens"], frozen["embed_tokens"]
        self._limit = _SHARE * available_memory() if limit is None else limit
        self._processor = readers[0].rules.processor
        self._size, self._align = _row_size(readers, more), alignment(self._processor)
        self._kept: dict[tuple, np.ndarray] = {}
        for reader in readers:
            reader.kept.append(self._kept)
        self.bytes = 0
        """Bytes of the features that are kept."""
        self.computed = 0
        """Images whose features were computed."""

    def __call__(self, rows: RowImages) -> Images:
        """Return the images of rows with their features."""
        config, features = self._executor.config, self.of([image for row in rows.rows for image in row])
        assert config.vision is not None
        return rows.with_features(
            lambda image: features[image.cache_key],
            config.vision.feature_width(config.hidden_size),
            self._executor.layout.dtype,
        )

    def of(self, images: Iterable[Image]) -> dict[tuple, Float[np.ndarray, "I D"]]:
        """Return the features of images by their `Image.cache_key`."""
        by_key = {image.cache_key: image for image in images}
        made = dict(self._compute([image for key, image in by_key.items() if key not in self._kept]))
        return {key: made[key] if key in made else self._kept[key] for key in by_key}

    def _compute(self, images: list[Image]) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield the features of images by their keys, and keep as many as there is room for."""
        shards = 1 if self._mesh is None else self._executor.layout.batch_shards
        merge, align = self._processor.merge**2, self._align
        for group in _groups(images, shards, self._size, align):
            placed = place_rows(pack_patches(group, self._processor, self._size, align), self._mesh)
            values = np.asarray(jax.device_get(self._executor.image_features(self._trainable, self._frozen, placed)))
            for line, row in zip(values, group, strict=True):
                start = 0
                for image in row:
                    first = start // merge
                    features = np.ascontiguousarray(line[first : first + self._processor.tokens(image.grid)])
                    start += aligned(image.grid.patches, align)
                    self._keep(image, features)
                    yield image.cache_key, features

    def _keep(self, image: Image, features: np.ndarray) -> None:
        self.computed += 1
        if self.bytes + features.nbytes > self._limit:
            if self.bytes <= self._limit:
                _log.warning(
                    "features of %d images fill %.1f GB of the host's memory: those of others are computed again in "
                    "each epoch",
                    *(len(self._kept), self.bytes / 1e9),
                )
                self._limit = -1.0
            return
        self._kept[image.cache_key] = features
        self.bytes += features.nbytes


def _row_size(readers: Sequence[ImageReader], more: bool) -> int:
    """Return the patches of every row: one size for a run, in which an image's features are the same to the bit."""
    processor = readers[0].rules.processor
    grids = [reader.store.images.grids for reader in readers if reader.store.images is not None]
    most = processor.max_tokens * processor.merge**2 if more else max(int(part.prod(1).max()) for part in grids)
    largest = aligned(most, alignment(processor))
    return max(largest, min(_ROW, _IMAGES * largest))


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
