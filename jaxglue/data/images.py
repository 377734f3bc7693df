"""Images of chats: which row's value goes to which place, the text that stands for each, and images of batches."""

import re
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from jaxtyping import Int, Int32

from jaxglue.data.messages import Chat, content_texts
from jaxglue.data.template import ChatTemplate, plain_pieces
from jaxglue.vision.images import MAX_PIXELS, ImageSource, digest_of, image_size, image_source
from jaxglue.vision.processor import Grid, Processor
from jaxglue.vision.records import ImageRecord, ImageRecords, record_image
from jaxglue.vision.rows import Image, PlacedImage, RowImages, image_positions
from jaxglue.vision.videos import frame_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxglue.data.store import TokenStore

IMAGE_TAG = "<image>"
"""Place of an image in texts of LLaMA-Factory's, ShareGPT's and ms-swift's rows."""
_DECODERS = 4
"""Images decoded at a time."""


class DocumentPart(NamedTuple):
    """Tokens of a document that follow each other in a row."""

    begin: int
    end: int
    images: Sequence[PlacedImage]
    """Images of the whole document."""


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """Rules by which images of a source's rows are read and become tokens."""

    processor: Processor
    folder: Path | None
    """Folder of relative paths; None where no files are named."""
    tokens: tuple[int, ...]
    """The token of features, then further ones of images."""
    positions: bool
    """Tokens have positions by time, height and width."""

    @classmethod
    def of(cls, processor: Processor, tokenizer: "PreTrainedTokenizerBase", folder: Path | None) -> Self:
        """Return the rules of a model's processor and tokenizer, for images whose paths begin at a folder."""
        tokens: Any = tokenizer.convert_tokens_to_ids([processor.token, *processor.around])
        return cls(processor=processor, folder=folder, tokens=tuple(tokens), positions=processor.positions)

    def attach(self, content: Any, media: Sequence[Any]) -> Any:
        """Return a row's content with the images of its columns in their places.

        Parts of messages that name none take them in order, then tags `<image>`; without either, all come before the
        first user's text.

        Raises:
            ValueError: other numbers of images than places, images beside a text that is no chat, or none that are.
        """
        if not isinstance(content, Chat):
            if media:
                raise ValueError("images need a chat: write the row as 'messages', or use a tokenizer of a chat model")
            return content
        chat = content if content.images or not media else _at_tags(content, len(media))
        waiting = sum(image is None for image in chat.images)
        if waiting != len(media):
            raise ValueError(f"the row has {len(media)} images in its columns, and {waiting} places for them")
        next_images = iter(media)
        sources = [next(next_images) if image is None else image for image in chat.images]
        chat = self._with_frames(chat._replace(images=tuple(sources)))
        images = (each if isinstance(each, ImageSource) else image_source(each, self.folder) for each in chat.images)
        return chat._replace(images=tuple(images))

    def _with_frames(self, chat: Chat) -> Chat:
        """Return a chat with the times and frames of its videos, as Qwen's processors write them."""
        sources, images, messages = iter(chat.images), list[Any](), list[dict[str, Any]]()
        for message in chat.messages:
            parts = list[dict[str, Any]]()
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] != "video":
                    parts.append(part)
                    images += [next(sources)] if part["type"] == "image" else []
                    continue
                if not self.positions:
                    raise ValueError("videos are read by Qwen's models alone: give some frames as images")
                for time, frames in frame_pairs(next(sources), self.folder):
                    parts += [{"type": "text", "text": time}, {"type": "image"}]
                    images.append(frames)
            messages.append({**message, "content": parts} if parts else message)
        return chat._replace(messages=messages, images=tuple(images))

    def expand(self, pieces: Sequence[tuple[str, bool]], grids: Sequence[Grid]) -> list[tuple[str, bool]]:
        """Return the pieces of a rendered chat with the tokens of its images in their places.

        Raises:
            ValueError: the template wrote another number of places.
        """
        mark = self.processor.mark
        places = sum(text.count(mark) for text, _ in pieces)
        if places != len(grids):
            raise ValueError(
                f"the chat template writes {places} places of images ({mark}) for {len(grids)} images: "
                "use the template of a model that sees, or name one with --chat-template"
            )
        texts = iter([self.processor.text(grid) for grid in grids])
        return [(re.sub(re.escape(mark), lambda _: next(texts), text), trained) for text, trained in pieces]

    def encode(
        self, template: ChatTemplate, text: str, grids: Sequence[Grid]
    ) -> tuple[list[int], Int32[np.ndarray, " I"]]:
        """Return the tokens of a rendering of protected messages with images of these patches, and features' places.

        Raises:
            ValueError: other places in the rendering, or a text that names their tokens by itself.
        """
        pieces = self.expand([(piece, False) for piece in plain_pieces(text)], grids)
        tokens = template.encode_pieces([piece for piece, _ in pieces])
        places = np.flatnonzero(np.array(tokens) == self.tokens[0]).astype(np.int32)
        if len(places) != sum(map(self.processor.tokens, grids)):
            raise ValueError("the prompt names tokens of images by itself: take them out of the text")
        return tokens, places

    def places(self, tokens: Int[np.ndarray, " tokens"], first: int, count: int) -> Int32[np.ndarray, " I"]:
        """Return the tokens of an image's features, by the first of them."""
        return (first + np.flatnonzero(tokens[first:] == self.tokens[0])[:count]).astype(np.int32)

    def firsts(self, tokens: Int[np.ndarray, " tokens"], grids: Sequence[Grid]) -> list[int]:
        """Return the first token of each image, in order, of those that begin in tokens that show no others."""
        places = np.flatnonzero(tokens == self.tokens[0])
        before = np.cumsum([0, *map(self.processor.tokens, grids)])[:-1]
        return places[before[before < len(places)]].tolist()

    def rows(
        self, tokens: Int[np.ndarray, "B T"], parts: Sequence[Sequence[DocumentPart]], largest: int | None = None
    ) -> RowImages:
        """Return the images of packed rows.

        The tokens of features become the processor's `stand_in`, in place, where it has one.

        Args:
            tokens: of the rows.
            parts: of documents in each row, in order.
            largest: features of the row with most of them, over all processes; None for that of these rows.
        """
        rows, used, processor = list[list[Image]](), list[int](), self.processor
        index, positions = np.full(tokens.shape, -1, np.int32), np.zeros((*tokens.shape, 3), np.int32)
        most = 0
        for b, row in enumerate(parts):
            rows.append([])
            token = features = 0
            for begin, end, images in row:
                grids = [(first, image.grid) for first, image in images]
                positions[b, token : token + end - begin] = image_positions(end, grids, processor.merge)[begin:]
                for first, image in images:
                    if begin <= first < end:
                        at, count = token + first - begin, processor.tokens(image.grid)
                        places = self.places(tokens[b, : token + end - begin], at, count)
                        index[b, places] = np.arange(features, features + len(places))
                        rows[-1].append(image)
                        features += count
                token += end - begin
            used.append(token)
            most = max(most, features)
        if processor.stand_in is not None:
            tokens[index >= 0] = processor.stand_in
        largest = most if largest is None else largest
        return RowImages(rows, index, positions if self.positions else None, processor, used, largest)

    def shown(self, data: bytes) -> Image:
        """Return an image that an environment showed, without patches; raise ValueError for one that is none."""
        grid = self.processor.grid(*image_size(data))
        return Image(key=digest_of(data), grid=grid, read=lambda: data, stays=False)

    def record(self, chat: Chat) -> list[ImageRecord]:
        """Read a chat's images."""
        return [record_image(source, self.processor, number) for number, source in enumerate(chat.images, 1)]

    def read(self, media: Sequence[Any], max_pixels: int = MAX_PIXELS) -> list[ImageRecord]:
        """Read images of a row's columns, or of a request; raise ValueError for one that is none or out of bounds."""
        sources = [image_source(value, self.folder) for value in media]
        return [record_image(each, self.processor, number, max_pixels) for number, each in enumerate(sources, 1)]

    def see(self, source: ImageSource, number: int, max_pixels: int) -> Image:
        """Return the `number`-th image of a prompt with its patches; raise ValueError as `read`."""
        record = record_image(source, self.processor, number, max_pixels)
        patches = self.processor.patches(source.read(), record.grid)
        return Image(key=record.digest, grid=record.grid, patches=patches)


def _at_tags(chat: Chat, images: int) -> Chat:
    """Return a chat of texts with places of images at its tags, or without tags before the first user's text."""
    tags = sum(text.count(IMAGE_TAG) for message in chat.messages for text in content_texts(message["content"]))
    messages = list(chat.messages)
    if tags:
        if tags != images:
            raise ValueError(f"the row has {images} images and {tags} tags {IMAGE_TAG}: give as many")
        messages = [{**message, "content": _cut(message["content"])} for message in messages]
    else:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError("the row has images, and no message of a user that they belong to")
        text = [{"type": "text", "text": messages[first]["content"]}] if messages[first]["content"] else []
        messages[first] = {**messages[first], "content": [*[{"type": "image"}] * images, *text]}
    return chat._replace(messages=messages, images=(None,) * images)


def _cut(text: str) -> str | list[dict[str, Any]]:
    if IMAGE_TAG not in text:
        return text
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(text.split(IMAGE_TAG)):
        parts += [{"type": "image"}] * (number > 0) + ([{"type": "text", "text": part}] if part else [])
    return parts


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Reader of the images of stored documents for batches."""

    rules: ImageRules
    store: "TokenStore"
    kept: list[Container[tuple]] = field(default_factory=list)
    """Features that are known, by `Image.cache_key`: patches of images that all of them hold are not needed."""

    def tokens(self, document: int, length: int) -> Int[np.ndarray, " length"]:
        """Return the first tokens of a document."""
        start = self.store.offsets[document]
        return self.store.tokens[np.arange(start, start + length)]

    def placed(self, document: int, tokens: Int[np.ndarray, " tokens"]) -> list[PlacedImage]:
        """Return the images of a document that begin in its first tokens, which are these; without patches."""
        records = self.store.images
        if records is None:
            return []
        numbers = records.of_document(document)
        firsts = self.rules.firsts(tokens, [records.grid(number) for number in numbers])
        return [
            PlacedImage(first, Image.of(records.record(number))) for first, number in zip(firsts, numbers, strict=False)
        ]

    def part(self, document: int, begin: int, end: int, seen: int) -> DocumentPart:
        """Return some tokens of a document whose images are among so many tokens from its start."""
        return DocumentPart(begin, end, self.placed(document, self.tokens(document, seen)))

    @cached_property
    def counts(self) -> Int[np.ndarray, " documents"]:
        """Return the features of each document, before truncation."""
        records, processor = self.store.images, self.rules.processor
        assert records is not None
        grids, places = np.unique(records.grids, axis=0, return_inverse=True)
        tokens = np.array([processor.tokens(Grid(*grid)) for grid in grids.tolist()])
        return np.bincount(records.owners, tokens[places.ravel()], len(self.store.lengths)).astype(np.int64)

    def rows(
        self, tokens: Int[np.ndarray, "B T"], parts: Sequence[Sequence[DocumentPart]], largest: int | None = None
    ) -> RowImages:
        """Return the images of packed rows, with patches where these are needed; arguments as of `ImageRules.rows`."""
        images = self.rules.rows(tokens, parts, largest)
        decoded = iter(self.decoded([image for row in images.rows for image in row]))
        return replace(images, rows=[[next(decoded) for _ in row] for row in images.rows])

    def images_of(self, document: int) -> list[Image]:
        """Return the images of a whole document, in order."""
        records = self.store.images
        assert records is not None
        return self.decoded([Image.of(records.record(number)) for number in records.of_document(document)])

    def decoded(self, images: Sequence[Image]) -> list[Image]:
        """Return images with patches where these are needed."""
        return decode(images, self.rules.processor, self.kept)


def decode(images: Sequence[Image], processor: Processor, kept: Sequence[Container[tuple]] = ()) -> list[Image]:
    """Return images with patches, but for those whose features are in all that is kept, by `Image.cache_key`."""

    def with_patches(image: Image) -> Image:
        known = kept and all(image.cache_key in features for features in kept)
        return image if known else image.decoded(processor)

    by_key = {image.cache_key: image for image in images}
    with ThreadPoolExecutor(_DECODERS) as pool:  # Pillow lets other threads run
        found = dict(zip(by_key, pool.map(with_patches, by_key.values()), strict=True))
    return [found[image.cache_key] for image in images]


def cut_before_image(
    tokens: Int[np.ndarray, " tokens"], length: int, images: ImageRecords, document: int, rules: ImageRules
) -> int:
    """Return the most tokens of a document, at most `length`, that end in no image."""
    places = np.flatnonzero(tokens == rules.tokens[0])
    before = 0
    for number in images.of_document(document):
        count = rules.processor.tokens(images.grid(number))
        if before >= len(places):
            break
        first, last = places[before], places[min(before + count, len(places)) - 1]  # the rest may be cut off already
        if first < length <= last:
            return int(first)
        before += count
    return length
