"""Images of chats: which row's value goes to which place, the text that stands for each, and images of batches."""

import re
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Int, Int32

from jaxglue.data.messages import MEDIA_KEYS, Chat, Clip, Video, content_texts
from jaxglue.data.template import ChatTemplate, plain_pieces
from jaxglue.files.json_file import without_nulls
from jaxglue.vision.images import MAX_PIXELS, ImageSource, digest_of, image_size, image_source
from jaxglue.vision.processor import Grid, Processor
from jaxglue.vision.records import ImageRecord, ImageRecords, record_image
from jaxglue.vision.rows import Image, PlacedImage, RowImages, image_positions
from jaxglue.vision.videos import frame_pairs, timed_frames, with_spaces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxglue.data.store import TokenStore

IMAGE_TAG = "<image>"
"""Place of an image in texts of LLaMA-Factory's, ShareGPT's and ms-swift's rows."""
TAGS = {"image": IMAGE_TAG, "audio": "<audio>", "video": "<video>"}
"""Tags of images, clips of audio and videos in texts, by the types of parts."""
_NOUNS = {"image": "images", "audio": "clips", "video": "videos"}
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
    """Rules by which images of a source's rows, and clips of audio, are read and become tokens."""

    processor: Processor
    folder: Path | None
    """Folder of relative paths; None where no files are named."""
    features: tuple[int, ...]
    """Tokens of features: of images, and of clips where the model hears."""
    tokens: tuple[int, ...]
    """These, and further ones of images and clips, which are never trained on."""
    positions: bool
    """Tokens have positions by time, height and width."""

    @classmethod
    def of(cls, processor: Processor, tokenizer: "PreTrainedTokenizerBase", folder: Path | None) -> Self:
        """Return the rules of a model's processor and tokenizer, for images whose paths begin at a folder."""
        heard = () if processor.hearing is None else processor.hearing.tokens
        features: Any = tokenizer.convert_tokens_to_ids([processor.token, *heard[:1]])
        others: Any = tokenizer.convert_tokens_to_ids([*processor.around, *heard[1:]])
        tokens = (*features, *others)
        positions = processor.positions
        return cls(processor=processor, folder=folder, features=tuple(features), tokens=tokens, positions=positions)

    def are_features(self, tokens: Int[np.ndarray, "*n"]) -> Bool[np.ndarray, "*n"]:
        """Tell which tokens stand for a feature of an image or a clip."""
        return np.isin(tokens, self.features)

    def attach(self, content: Any, media: Sequence[Any]) -> Any:
        """Return a row's content with the images, clips and videos of its columns in their places (see `row_media`).

        Parts of messages that name none take them in order, then tags `<image>`, `<audio>` and `<video>`; without
        either, all come before the first user's text.

        Raises:
            ValueError: other numbers of images than places, images beside a text that is no chat, or none that are.
        """
        if not isinstance(content, Chat):
            if media:
                raise ValueError(
                    "images need a chat: write the row as 'messages', or as 'question' and 'answer' for a tokenizer "
                    "with a chat template"
                )
            return content
        waiting = {kind: [each for each in media if _kind(each) == kind] for kind in TAGS}
        chat = content if content.images or not media else _at_tags(content, waiting)
        numbered = [(n, part) for n, message in enumerate(chat.messages, 1) for part in _parts(message)]
        parts = [(n, part) for n, part in numbered if part["type"] != "text"]
        if len(parts) != len(chat.images):
            raise ValueError(
                f"the messages have {len(parts)} places of images and clips, and {len(chat.images)} of these"
            )
        places = [(*each, image) for each, image in zip(parts, chat.images, strict=True)]
        for kind, found in waiting.items():
            empty = [n for n, part, image in places if image is None and part["type"] == kind]
            if empty and not found:
                raise ValueError(
                    f"message {empty[0]}: a part of type {kind!r} has nothing under {', '.join(MEDIA_KEYS[kind])}, and "
                    f"only rows with a column '{kind}s' may leave it there"
                )
            if len(empty) != len(found):
                raise ValueError(
                    f"the row has {len(found)} {_NOUNS[kind]} in its columns, and {len(empty)} places for them"
                )
        in_order = {kind: iter(found) for kind, found in waiting.items()}
        read = [
            self._source(part, next(in_order[part["type"]]) if image is None else image) for _, part, image in places
        ]
        return self._with_frames(chat._replace(images=tuple(read)))

    def _source(self, part: Mapping[str, Any], value: Any) -> Any:
        """Return the image or clip of a part, from what a row holds; of a video, a part with its frames a second."""
        if part["type"] == "audio":
            return image_source(value.value if isinstance(value, Clip) else value, self.folder, "clip")
        if part["type"] != "video":
            return image_source(value, self.folder)
        value = value.value if isinstance(value, Video) else value
        is_part = isinstance(value, Mapping) and ("type" in value or not value.keys() & {"bytes", "path"})
        return {**part, **without_nulls(value if is_part else {"video": value})}

    def _with_frames(self, chat: Chat) -> Chat:
        """Return a chat with the times and frames of its videos, as processors of its family write them."""
        sources, images, messages = iter(chat.images), list[Any](), list[dict[str, Any]]()
        for message in chat.messages:
            parts = list[dict[str, Any]]()
            for part in _parts(message):
                if part["type"] != "video":
                    parts.append(part)
                    images += [next(sources)] if part["type"] != "text" else []
                    continue
                if self.processor.videos == "none":
                    raise ValueError("videos are read by Qwen's models and Gemma 4 alone: give some frames as images")
                read = frame_pairs if self.processor.videos == "pairs" else timed_frames
                for time, frames in read(next(sources), self.folder):
                    parts += [{"type": "text", "text": time}, {"type": "image"}]
                    images.append(frames)
            messages.append({**message, "content": parts} if parts else message)
        return chat._replace(messages=messages, images=tuple(images))

    def expand(self, pieces: Sequence[tuple[str, bool]], grids: Sequence[Grid]) -> list[tuple[str, bool]]:
        """Return the pieces of a rendered chat with the tokens of its images and clips in their places.

        Raises:
            ValueError: the template wrote another number of places.
        """
        pieces = [(with_spaces(text), trained) for text, trained in pieces]
        processor, hearing = self.processor, self.processor.hearing
        marks = {processor.mark: "images"} | ({} if hearing is None else {hearing.token: "clips"})
        pattern = re.compile("|".join(map(re.escape, marks)))
        found, wanted = [mark for text, _ in pieces for mark in pattern.findall(text)], [*map(processor.mark_of, grids)]
        for mark, noun in marks.items():
            if (places := found.count(mark)) != wanted.count(mark):
                raise ValueError(
                    f"the chat template writes {places} places of {noun} ({mark}) for {wanted.count(mark)} {noun}: "
                    "use the template of a model that sees, or name one with --chat-template"
                )
        if found != wanted:
            raise ValueError("the chat template writes images and clips in another order than the messages have them")
        texts = iter([processor.text(grid) for grid in grids])
        return [(pattern.sub(lambda _: next(texts), text), trained) for text, trained in pieces]

    def encode(
        self, template: ChatTemplate, text: str, grids: Sequence[Grid]
    ) -> tuple[list[int], Int32[np.ndarray, " I"]]:
        """Return the tokens of a rendering of protected messages with images of these patches, and features' places.

        Raises:
            ValueError: other places in the rendering, or a text that names their tokens by itself.
        """
        pieces = self.expand([(piece, False) for piece in plain_pieces(text)], grids)
        tokens = template.encode_pieces([piece for piece, _ in pieces])
        places = np.flatnonzero(self.are_features(np.array(tokens))).astype(np.int32)
        if len(places) != sum(map(self.processor.tokens, grids)):
            raise ValueError("the prompt names tokens of images by itself: take them out of the text")
        return tokens, places

    def places(self, tokens: Int[np.ndarray, " tokens"], first: int, count: int) -> Int32[np.ndarray, " I"]:
        """Return the tokens of an image's features, by the first of them."""
        return (first + np.flatnonzero(self.are_features(tokens[first:]))[:count]).astype(np.int32)

    def firsts(self, tokens: Int[np.ndarray, " tokens"], grids: Sequence[Grid]) -> list[int]:
        """Return the first token of each image, in order, of those that begin in tokens that show no others."""
        places = np.flatnonzero(self.are_features(tokens))
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
                if self.positions:
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
        grid = self.processor.bounded_grid(*image_size(data))
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


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []


def _kind(value: Any) -> str:
    """Return the type of the part of a message that stands for an image, a clip or a video."""
    return "audio" if isinstance(value, Clip) else "video" if isinstance(value, Video) else "image"


def _at_tags(chat: Chat, media: Mapping[str, Sequence[Any]]) -> Chat:
    """Return a chat of texts with places of images and such at tags, or without tags before the first user's text."""
    texts = [text for message in chat.messages for text in content_texts(message["content"])]
    counts = {kind: sum(text.count(tag) for text in texts) for kind, tag in TAGS.items() if media[kind]}
    messages, places = list(chat.messages), sum(map(len, media.values()))
    if any(counts.values()):
        for kind, tags in counts.items():
            if tags != (count := len(media[kind])):
                raise ValueError(f"the row has {count} {_NOUNS[kind]} and {tags} tags {TAGS[kind]}: give as many")
        messages = [{**message, "content": _cut(message["content"], list(counts))} for message in messages]
    else:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError("the row has images, and no message of a user that they belong to")
        text = [{"type": "text", "text": messages[first]["content"]}] if messages[first]["content"] else []
        parts = [{"type": kind} for kind, found in media.items() for _ in found]
        messages[first] = {**messages[first], "content": [*parts, *text]}
    return chat._replace(messages=messages, images=(None,) * places)


def _cut(text: str, kinds: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the parts of a text at its tags of these kinds; the text where it has none."""
    pieces = re.split(f"({'|'.join(re.escape(TAGS[kind]) for kind in kinds)})", text)
    if len(pieces) == 1:
        return text
    by_tag = {tag: kind for kind, tag in TAGS.items()}
    typed = (
        ({"type": by_tag[piece]} if at % 2 else {"type": "text", "text": piece}) for at, piece in enumerate(pieces)
    )
    return [part for part in typed if part.get("text") != ""]


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Reader of the images of stored documents for batches."""

    rules: ImageRules
    store: "TokenStore"
    kept: list[Container[tuple]] = field(default_factory=list)
    """Features that are known, by `Image.cache_key`: patches of images that all of them hold are not needed."""

    @property
    def hears(self) -> bool:
        """Tell whether there are clips of audio among the images."""
        return self.store.images is not None and bool(self.store.images.clips.any())

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
    places = np.flatnonzero(rules.are_features(tokens))
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
