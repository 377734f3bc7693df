"""Images among the tokens of the `tinker` SDK's model inputs."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxglue.data.images import ImageRules
from jaxglue.generation.sight import MOST_PIXELS
from jaxglue.vision.images import ImageSource
from jaxglue.vision.rows import Image, PlacedImage


class ImageChunk(NamedTuple):
    """An image of a model input, as it was sent."""

    data: bytes
    expected: int | None = None
    """Tokens that the client counts with."""


Chunks = Sequence[Int[np.ndarray, " n"] | ImageChunk]
"""A model input: tokens and images in their order."""


def read_chunk(chunk: Any) -> Int[np.ndarray, " n"] | ImageChunk:
    """Return a chunk of a request in JSON.

    Raises:
        ValueError: another than tokens or the bytes of an image.
    """
    given = chunk if isinstance(chunk, Mapping) else {}
    tokens, data, expected = given.get("tokens"), given.get("data"), given.get("expected_tokens")
    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
        return np.array(tokens, np.int64)
    if given.get("type") != "image" or not isinstance(data, str) or type(expected) not in (int, type(None)):
        raise ValueError(
            "prompt: expected chunks with lists of token ids, or images with their bytes; addresses and sound are not "
            "read"
        )
    try:
        return ImageChunk(base64.b64decode(data, validate=True), expected)
    except binascii.Error as error:
        raise ValueError(f"prompt: data of an image is no base64: {error}") from None


def with_places(chunks: Chunks, rules: ImageRules | None) -> tuple[Int[np.ndarray, " T"], tuple[PlacedImage, ...]]:
    """Return a model input's tokens, with those that stand for its images, and where these are.

    Args:
        chunks: of the input.
        rules: of the model's images; None for a model that sees none.

    Raises:
        ValueError: an image that cannot be read, that takes another number of tokens than expected, or that nothing
            sees.
    """
    parts, images, length = [np.zeros(0, np.int64)], list[PlacedImage](), 0
    for chunk in chunks:
        if isinstance(chunk, ImageChunk):
            if rules is None:
                raise ValueError("an image, and the model sees none here: serve a model with a tower, with images=True")
            image, chunk = _read(chunk, rules, len(images) + 1)
            images.append(PlacedImage(length, image))
        parts.append(chunk)
        length += len(chunk)
    return np.concatenate(parts), tuple(images)


def _read(chunk: ImageChunk, rules: ImageRules, number: int) -> tuple[Image, Int[np.ndarray, " n"]]:
    """Return an image, and the tokens that stand for its features; those around it are text of the input."""
    processor = rules.processor
    image = rules.see(ImageSource(data=chunk.data), number, MOST_PIXELS)
    count = processor.tokens(image.grid)
    if processor.token * count not in processor.text(image.grid):
        raise ValueError("images of this model have tokens between those of their features, which are not served here")
    if chunk.expected not in (None, count):
        raise ValueError(f"image {number} takes {count} tokens, and expected_tokens is {chunk.expected}")
    return image, np.full(count, rules.tokens[0])
