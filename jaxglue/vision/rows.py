"""Images of packed rows, as the devices see them: patches or features, and the tokens that they stand in for."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from jaxglue.ops.row_split import split_tokens
from jaxglue.ops.segments import BatchKind, PackedSegments, RowSplit, pack_segments, segment_bucket
from jaxglue.vision.processor import Grid, Processor
from jaxglue.vision.records import ImageRecord

_TILE = 128
"""Patches of the largest tile of queries of attention's kernels."""
_SHARES = 4
"""Sizes of rows of patches and features are halves of the largest, so often at most: each is compiled."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Patches:
    """Rows of P patches of images, each image a segment in which every patch sees every other; or of clips of audio."""

    values: UInt8[Array, "B P C"] | Float32[Array, "B P C"]
    """Colors; of clips the frames of each token."""
    places: Int32[Array, "B P 4"]
    """Row and column of a patch, and rows and columns of its image; see `Processor.places` of clips."""
    segments: PackedSegments

    @property
    def are_clips(self) -> bool:
        """Tell whether these are clips of audio."""
        return self.values.dtype == np.float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of packed rows of T tokens, with I features in a row."""

    index: Int32[Array, "B T"]
    """Place of each token's feature in its row; −1 for tokens that have none."""
    owners: Int32[Array, "B I"]
    """Token of each feature; T for unused ones."""
    positions: Int32[Array, "B T 3"] | None = None
    """Positions in their documents by time, height and width, where a model has such; None for others."""
    own_keys: Int32[Array, "B T"] | None = None
    """The last key that each token sees in layers where an image's tokens see later ones of it; None without such."""
    first_queries: Int32[Array, "B T"] | None = None
    """The first token there that sees each key."""
    patches: Patches | None = None
    """Of models whose tower runs in a step."""
    clips: Patches | None = None
    """Clips of audio for such a tower; None where rows have none. Their features follow those of a row's images."""
    features: Float[Array, "B I D"] | None = None
    """Of models whose tower ran before."""

    def split(self, split: RowSplit) -> "Images":
        """Return the images, in numpy, of rows split over N devices, each of which has the features of whole rows."""
        own = partial(split_tokens, order=np.asarray(split.order))
        fields = {name: own(getattr(self, name)) for name in ("index", "positions", "own_keys")}
        return replace(self, **fields, owners=_split_owners(np.asarray(self.owners), split))


def _split_owners(owners: Int32[np.ndarray, "B I"], split: RowSplit) -> Any:
    """Return the token [B, N·I] of each feature, device after device; T / N for those of other devices."""
    places = np.asarray(split.places)
    T, devices = places.shape[1], split.before.shape[1]
    place = np.where(owners < T, np.take_along_axis(places, np.minimum(owners, T - 1), axis=1), -1)
    share = T // devices
    parts = [np.where(place // share == device, place % share, share) for device in range(devices)]
    return np.concatenate(parts, axis=1).astype(np.int32)


def token_positions(segments: PackedSegments, images: Images | None) -> Int32[Array, "B T *axes"]:
    """Return the positions by which rotary embeddings turn: of models with images' positions, [B, T, 3]."""
    return segments.positions if images is None or images.positions is None else images.positions


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image of a row on the host, or a clip of audio."""

    key: bytes
    """Stands for its bytes."""
    grid: Grid
    patches: UInt8[np.ndarray, "P C"] | Float32[np.ndarray, "P C"] | None = field(default=None, compare=False)
    """A pair of a video's frames has both side by side; None where its features are known."""
    read: Callable[[], bytes] | None = field(default=None, compare=False)
    """Returns its bytes; None where it has its patches."""
    stays: bool = True
    """It is seen in later steps again; False for one that an environment made."""

    @classmethod
    def of(cls, record: ImageRecord) -> Self:
        """Return the image of a record, without patches."""
        return cls(key=record.digest, grid=record.grid, read=record.read)

    def decoded(self, processor: Processor) -> "Image":
        """Return it with its patches; raise ValueError where its bytes cannot be read any more."""
        if self.patches is not None:
            return self
        assert self.read is not None
        return replace(self, patches=processor.patches(self.read(), self.grid))

    @cached_property
    def cache_key(self) -> tuple:
        """Return what tells its features apart, of one processor and tower."""
        return self.key, *self.grid


class PlacedImage(NamedTuple):
    """An image among tokens."""

    first: int
    """First of the tokens that stand for its features."""
    image: Image


@dataclass(frozen=True)
class RowImages:
    """Images of packed rows on the host, in the order of their tokens; no tree of arrays."""

    rows: Sequence[Sequence[Image]]
    index: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T 3"] | None
    processor: Processor
    used: Sequence[int]
    """Tokens of each row before its padding."""
    largest: int
    """Features of the row with most of them, over all processes, which decides on the size of all."""
    room: int = 0
    """Features for which rows have room at least where they are known: one size, as these, unlike patches, cost no
    time."""

    def size(self, least: int = 0) -> int:
        """Return the features for which each row has room."""
        return bucket(max(self.largest, least), self.index.shape[1])

    def with_patches(self) -> Images:
        """Return the images as patches, for a tower that runs in the step."""
        size, merged = self.size(), self.processor.merge**2
        if not any(image.grid.is_clip for row in self.rows for image in row):
            return self._images(size, patches=pack_patches(self.rows, self.processor, size * merged))
        images, clips = ([[i for i in row if i.grid.is_clip == heard] for row in self.rows] for heard in (False, True))
        index = np.full_like(self.index, -1)
        for line, own, row in zip(index, self.index, self.rows, strict=True):
            ends, places = {False: 0, True: size}, list[np.ndarray]()
            for image, count in zip(row, self._counts(row), strict=True):
                places.append(np.arange(count) + ends[image.grid.is_clip])
                ends[image.grid.is_clip] += count
            line[own >= 0] = np.concatenate(places)[own[own >= 0]] if places else -1
        seen, heard = pack_patches(images, self.processor, size * merged), pack_patches(clips, self.processor, size)
        index_: Any = index
        return replace(self._images(size, patches=seen, clips=heard), index=index_, owners=owners_of(index, 2 * size))

    def with_features(self, features_of: Any, width: int, dtype: Any) -> Images:
        """Return the images with their features.

        Args:
            features_of: returns an image's features [I, D] on the host.
            width: D.
            dtype: of the features.
        """
        size = self.size(self.room)
        values = np.zeros((len(self.rows), size, width), dtype)
        for line, row in zip(values, self.rows, strict=True):
            start = 0
            for image in row:
                features = features_of(image)
                line[start : start + len(features)] = features
                start += len(features)
        return self._images(size, features=values)

    def _images(self, size: int, **parts: Any) -> Images:
        index: Any = self.index
        positions: Any = self.positions
        if self.processor.spans:
            parts |= image_spans(self.index, [self._counts(row) for row in self.rows], self.used)
        return Images(index=index, owners=owners_of(self.index, size), positions=positions, **parts)

    def _counts(self, row: Sequence[Image]) -> list[int]:
        return [self.processor.tokens(image.grid) for image in row]


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of a prompt to answer, with their features."""

    features: Float[np.ndarray, "I D"]
    places: Int32[np.ndarray, " I"]
    """Token of each feature."""
    keys: Int32[np.ndarray, " I"]
    """Numbers that stand for each feature's image and place in it, where tokens are compared."""
    images: tuple[tuple[int, Grid], ...]
    """First token and patches of each image."""
    counts: tuple[int, ...]
    """Features of each image."""
    merge: int
    has_positions: bool
    """Tokens have positions by time, height and width."""
    spans: bool
    """An image's tokens see later ones of it."""

    @classmethod
    def of(
        cls,
        images: Sequence[Image],
        places: Int32[np.ndarray, " I"],
        features_of: Callable[[Image], Float[np.ndarray, "i D"]],
        processor: Processor,
    ) -> Self:
        """Return the images of a prompt, whose features have these places, by the features of each."""
        counts = [processor.tokens(image.grid) for image in images]
        firsts = np.cumsum([0, *counts[:-1]])
        return cls(
            features=np.concatenate([features_of(image) for image in images]),
            places=places,
            keys=feature_keys(images, processor),
            images=tuple((int(places[first]), image.grid) for first, image in zip(firsts, images, strict=True)),
            counts=tuple(counts),
            merge=processor.merge,
            has_positions=processor.positions,
            spans=processor.spans,
        )

    def positions(self, total: int) -> Int32[np.ndarray, "T 3"]:
        """Return the positions of the first tokens of prompt and answer."""
        if self.has_positions:
            return image_positions(total, self.images, self.merge)
        return np.repeat(np.arange(total, dtype=np.int32)[:, None], 3, axis=1)

    @property
    def delta(self) -> int:
        """Return the position of tokens behind all images, less their index."""
        total = int(self.places[-1]) + 2
        return int(self.positions(total)[-1, 0]) - total + 1

    def keyed(self, tokens: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
        """Return tokens of which those of images tell these apart: of all images they are equal."""
        keyed = np.array(tokens, np.int32)
        inside = self.places < len(keyed)
        keyed[self.places[inside]] = self.keys[inside]
        return keyed


def read_prompt(
    tokens: Sequence[int] | Int[np.ndarray, " T"],
    images: Sequence[Image],
    places: Int32[np.ndarray, " I"],
    features_of: Callable[[Image], Float[np.ndarray, "i D"]],
    processor: Processor,
) -> tuple[list[int], PromptImages]:
    """Return a prompt as the model reads it, and its images as of `PromptImages.of`."""
    read = np.array(tokens)
    if processor.stand_in is not None:
        read[places] = processor.stand_in
    return read.tolist(), PromptImages.of(images, places, features_of, processor)


def feature_keys(images: Sequence[Image], processor: Processor) -> Int32[np.ndarray, " I"]:
    """Return a number below 0 for each feature, which no token has, by the image's bytes, its grid and the place."""
    parts = []
    for image in images:
        digest = hashlib.sha256(image.key + bytes(str(tuple(image.grid)), "ascii")).digest()
        seed = np.random.default_rng(np.frombuffer(digest, np.uint32))
        parts.append(-1 - seed.integers(0, 2**31 - 1, processor.tokens(image.grid)))
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def pack_prompts(prompts: Sequence[tuple[int, int, PromptImages | None]], total: int) -> Images | None:
    """Return the images of prompts in one row; None where none has any.

    Args:
        prompts: (first token in the row, tokens, images) of each.
        total: T of the row.
    """
    seen = [images for _, _, images in prompts if images is not None]
    if not seen:
        return None
    index = np.full((1, total), -1, np.int32)
    values, count = [], 0
    for first, length, images in prompts:
        if images is not None:
            inside = images.places[images.places < length]
            index[0, first + inside] = count + np.arange(len(inside))
            values.append(images.features[: len(inside)])
            count += len(inside)
    size, width = bucket(count, total), seen[0].features.shape[1]
    features: Any = np.zeros((1, size, width), seen[0].features.dtype)
    features[0, :count] = np.concatenate(values)
    positions: Any = None
    if any(images.has_positions for images in seen):
        positions = np.zeros((1, total, 3), np.int32)
        for first, length, images in prompts:
            along = np.arange(length)[:, None] if images is None else images.positions(length)
            positions[0, first : first + length] = along
    index_: Any = index
    spans = {}
    if any(images.spans for images in seen):
        counts = [count for images in seen for count in images.counts]
        spans = image_spans(index, [counts], [max(first + length for first, length, _ in prompts)])
    return Images(index=index_, owners=owners_of(index, size), positions=positions, features=features, **spans)


def owners_of(index: Int32[np.ndarray, "B T"], size: int) -> Any:
    """Return the token [B, I] of each of `size` features in a row, int32; T for unused ones."""
    B, T = index.shape
    owners = np.full((B, size), T, np.int32)
    rows, tokens = np.nonzero(index >= 0)
    owners[rows, index[rows, tokens]] = tokens
    return owners


def image_spans(
    index: Int32[np.ndarray, "B T"], counts: Sequence[Sequence[int]], used: Sequence[int]
) -> dict[str, Any]:
    """Return the fields of `Images` that let each image's tokens see each other.

    Args:
        index: of `Images`.
        counts: tokens of each row's images, in order.
        used: tokens of each row before its padding.
    """
    first_queries = np.tile(np.arange(index.shape[1], dtype=np.int32), (len(index), 1))
    # A tile of queries passes all keys up to its last one's; padding's would be far behind.
    own_keys = np.minimum(first_queries, np.maximum(np.array(used, np.int32)[:, None] - 1, 0))
    for row, sizes in enumerate(counts):
        tokens, end = np.flatnonzero(index[row] >= 0), 0
        for size in sizes:
            span, end = tokens[end : end + size], end + size
            own_keys[row, span], first_queries[row, span] = span[-1], span[0]
    return {"own_keys": own_keys, "first_queries": first_queries}


def spanned(segments: PackedSegments, images: Images | None) -> PackedSegments:
    """Return the segments of layers in which an image's tokens see later ones of it."""
    if images is None or images.own_keys is None:
        return segments
    return replace(segments, own_keys=images.own_keys, first_queries=images.first_queries)


def bucket(needed: int, largest: int) -> int:
    """Return the size of rows that hold so many features: a part of the largest, of which few are compiled."""
    sizes = [max(1, largest >> share) for share in range(_SHARES, -1, -1)]
    return next((size for size in sizes if size >= needed), needed)


def aligned(count: int, align: int) -> int:
    """Return the least multiple of a number that is not below the count."""
    return -(-count // align) * align


def alignment(processor: Processor, clips: bool = False) -> int:
    """Return the patches of which each image of a row begins at a multiple, where it is to be computed alike anywhere.

    Tiles of queries then hold one image, and those of its keys begin with it. Of clips of audio: tokens.
    """
    return _TILE if clips else math.lcm(_TILE, processor.merge**2)


def pack_patches(rows: Sequence[Sequence[Image]], processor: Processor, size: int, align: int = 1) -> Patches:
    """Return rows of patches, of which an image's are a segment; rows end in padding.

    Args:
        rows: images of each row, or clips.
        processor: of the images.
        size: P.
        align: images begin at multiples of it, with segments of nothing between them.
    """
    patches = [image.patches for row in rows for image in row if image.patches is not None]
    are_clips = any(image.grid.is_clip for row in rows for image in row)
    width = max((part.shape[1] for part in patches), default=0)
    width = width if are_clips else max(width, 3 * processor.patch**2)
    values = np.zeros((len(rows), size, width), np.float32 if are_clips else np.uint8)
    places = np.zeros((len(rows), size, 4), np.int32)
    places[:, :, 2:] = 1
    for b, row in enumerate(rows):
        start = 0
        for image in row:
            at = slice(start, start + image.grid.patches)
            assert image.patches is not None
            repeats = width // image.patches.shape[1]  # a video's frames differ, an image's are the same
            values[b, at], places[b, at] = np.tile(image.patches, (1, repeats)), processor.places(image.grid)
            start += aligned(image.grid.patches, align)
    lengths = [
        [part for image in row for part in (image.grid.patches, -image.grid.patches % align) if part] for row in rows
    ]
    slots = segment_bucket(max(8, *map(len, lengths)))
    segments = replace(pack_segments(lengths, seq_len=size, kind=BatchKind(False, slots)), bidirectional=True)
    values_: Any = values
    places_: Any = places
    return Patches(values=values_, places=places_, segments=segments)


def image_positions(total: int, images: Sequence[tuple[int, Grid]], merge: int) -> Int32[np.ndarray, "T 3"]:
    """Return the positions of a document's tokens by time, height and width.

    Text counts on along all three; an image's tokens have its first position, plus their rows and columns, and the next
    token's is beyond the longer side.

    Args:
        total: tokens of the document.
        images: first token and patches of each image, in order.
        merge: patches of a merged one's side.
    """
    parts, token, position = list[np.ndarray](), 0, 0
    for first, grid in images:
        parts.append(np.repeat(np.arange(position, position + first - token)[:, None], 3, axis=1))
        position += first - token
        h, w = grid.rows // merge, grid.columns // merge
        rows, columns = np.indices((h, w)).reshape(2, -1)
        parts.append(np.stack([np.full(h * w, position), position + rows, position + columns], 1))
        token, position = first + h * w, position + max(h, w)
    parts.append(np.repeat(np.arange(position, position + total - token)[:, None], 3, axis=1))
    return np.concatenate(parts)[:total].astype(np.int32)
