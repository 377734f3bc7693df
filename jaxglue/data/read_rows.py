"""Tokenization of rows whose parts are read: questions about a state, documents to a query, texts to compare."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.files import Row
from jaxglue.data.images import ImageRules
from jaxglue.data.limits import memory_limit, template_time_limit
from jaxglue.data.messages import from_json, listed, read_chat
from jaxglue.data.pieces import PieceTokenizer
from jaxglue.data.store import TOKEN_BYTES, Encoded
from jaxglue.data.template import ChatTemplate, plain_pieces
from jaxglue.data.tokenizer import encode_beginning, require_unicode
from jaxglue.vision.records import ImageRecord, ImageRecords

_ABSENT = float("nan")
COLUMNS = dict.fromkeys(
    ("prefix", "parts", "cut", "kind", "size", "intro", "options", "gold", "label_size", "text_size"), _ABSENT
)
"""Columns of a store of such rows: the first three have a value for each row, the next four for each part, and the last
three for each option of a part. None is ever absent."""
_STATE, _QUESTION = "STATE7f3a", "QUESTION7f3a"


@dataclass(frozen=True, kw_only=True)
class PartText:
    """A part of a row that is read by itself."""

    pieces: list[str | bytes]
    """Its text in pieces, int32 tokens as bytes."""
    kind: int = 0
    gold: list[float] = field(default_factory=lambda: [1.0])
    """A number for each of its options."""
    lines: int = 0
    """Pairs of pieces, from the second on, that are label and text of an option each."""
    images: Sequence[ImageRecord] = ()
    """Among the pieces."""


class UnitText(NamedTuple):
    """Content of a row: a beginning that its parts share, which may be empty, and these."""

    prefix: list[str | bytes]
    parts: list[PartText]
    images: Sequence[ImageRecord] = ()
    """In the beginning."""


class Shown(NamedTuple):
    """A text, and the images before it."""

    text: str
    images: Sequence[ImageRecord] = ()


class Frame(NamedTuple):
    """The text of a prompt around a state and a question about it."""

    head: str
    between: str
    tail: str
    has_template: bool

    @classmethod
    def of(
        cls,
        template: ChatTemplate | None,
        system: str | None,
        content: str = "{state}\n\n{question}",
        images: int = 0,
    ) -> "Frame":
        """Return the frame of a chat template, without thinking, or of plain texts without one.

        Args:
            template: of the model.
            system: message before the user's.
            content: of the user's message.
            images: before it, in the head as the template marks them.

        Raises:
            ValueError: images without a template, or a template that changes what a user says.
        """
        content = content.format(state=_STATE, question=_QUESTION)
        if template is None and images:
            raise ValueError("images need a chat template: name that of a model that sees with --chat-template")
        if template is None:
            text = f"{system}\n\n{content}\nAnswer:" if system else f"{content}\nAnswer:"
        else:
            messages = [{"role": "system", "content": system}] if system else []
            said: Any = [*[{"type": "image"}] * images, {"type": "text", "text": content}] if images else content
            messages.append({"role": "user", "content": said})
            text = template.render_prompt(messages, variables={"enable_thinking": False})
        head, found, rest = text.partition(_STATE)
        between, also_found, tail = rest.partition(_QUESTION)
        if not (found and also_found) or _STATE in tail or _QUESTION in tail:
            raise ValueError("the chat template changes the user's message, so a state and its questions have no place")
        return cls(head, between, tail, has_template=template is not None)


class UnitEncoder:
    """Tokenizer of rows of parts; a subclass reads them.

    Each row becomes a document of the store: the tokens of its beginning, and those of its parts, with a mask of 1 at
    the last of each.
    """

    format = ""
    """Name of the rows' format."""
    keys: frozenset[str] = frozenset()
    """Columns that are read."""
    optional: frozenset[str] = frozenset()
    """Columns that are read where the model sees images."""
    sees = False
    """Rows may have images."""
    longest: int | None = None
    """The most tokens of a part, whose text is cut, but not its last `tail` tokens; None for no limit."""
    tail = 0
    images: ImageRules | None = None
    """Rules of a model that sees, where rows have images."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, system: str | None = None):
        self.columns = COLUMNS
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self.system = system or None
        self.pieces = PieceTokenizer(tokenizer.backend_tokenizer)

    def unit(self, row: Mapping[str, Any]) -> UnitText:
        """Return the texts of a row.

        Raises:
            ValueError: an unusable row.
        """
        raise NotImplementedError

    @property
    def before(self) -> str:
        """Return the text that precedes each part, in whose company it is tokenized."""
        return ""

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Tokenize rows, in order.

        Raises:
            ValueError: an unusable row, with its origin.
        """
        with memory_limit():
            units = [self._named_unit(row) for row in rows]
        return self.encode_units(units, [row.origin for row in rows])

    def encode_units(self, units: Sequence[UnitText], origins: Sequence[str] = ()) -> Encoded:
        """Tokenize units, in order; `origins` name those of errors."""
        texts = [text for unit in units for text in self._texts(unit)]
        encoded = iter(self.pieces([[piece for piece in text if isinstance(piece, str)] for text in texts]))
        tokens, masks, lengths = list[np.ndarray](), list[np.ndarray](), list[int]()
        columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        for index, unit in enumerate(units):
            try:
                prefix, parts = self._tokenized(unit, encoded)
            except ValueError as error:
                raise ValueError(f"{origins[index]}: {error}" if origins else str(error)) from error
            _add(columns, unit, len(prefix), parts)
            whole = [prefix, *(part for part, _ in parts)]
            mask = np.zeros(sum(map(len, whole)), np.uint8)
            mask[np.cumsum([len(part) for part in whole])[1:] - 1] = 1
            tokens += whole
            masks.append(mask)
            lengths.append(len(mask))
        return Encoded(
            np.concatenate(tokens),
            np.concatenate(masks),
            np.array(lengths, np.int32),
            {name: np.array(values, np.float32) for name, values in columns.items()},
            images=None if self.images is None else ImageRecords.of([_all_images(unit) for unit in units]),
        )

    def _tokenized(
        self, unit: UnitText, encoded: Iterator[list[bytes]]
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, "_Sizes"]]]:
        """Return the tokens of a unit's beginning, and of its parts with the sizes of their pieces."""
        prefix = _tokens(_woven(unit.prefix, iter(next(encoded))))
        self._check_images(unit.images, prefix)
        parts = [self._part(part, next(encoded)) for part in unit.parts]
        if empty := next((number for number, (part, _) in enumerate(parts, 1) if not len(part)), None):
            raise ValueError(f"text {empty} has no token")
        return prefix, parts

    def _named_unit(self, row: Row) -> UnitText:
        try:
            with template_time_limit():
                unit = self.unit(row.value)
            for text in chain(unit.prefix, *(part.pieces for part in unit.parts)):
                if isinstance(text, str):
                    require_unicode(text)
            return unit
        except ValueError as error:
            raise ValueError(f"{row.origin}: {error}") from error

    def protected(self, text: str) -> str:
        """Return a text whose special tokens are split, to be read as text."""
        if self.template is None:
            return text
        messages, _ = self.template.protect([{"role": "user", "content": text}])
        return messages[0]["content"]

    def _texts(self, unit: UnitText) -> Iterator[list[str | bytes]]:
        before = [self.before] if self.before else []
        for start, pieces in (([], unit.prefix), *((before, part.pieces) for part in unit.parts)):
            yield [*start, *chain.from_iterable(map(_plain, pieces))]

    def shown(self, value: Any) -> Shown:
        """Return what a value of a row shows: a text, or an object with `text`, `image`, `images`; or is shown already.

        Raises:
            ValueError: other values, images that cannot be read, or that the model does not see.
        """
        if isinstance(value, Shown):
            return value
        if isinstance(value, str):
            return Shown(value)
        if not isinstance(value, Mapping) or not {"text", "image", "images"} & value.keys():
            raise ValueError(f"expected a text, or an object with text and image, got {listed(value)}")
        media = value.get("images") or ([] if value.get("image") is None else [value["image"]])
        if media and self.images is None:
            raise ValueError("this model sees no images: take them out")
        return Shown(value.get("text") or "", self.images.read(media) if self.images else [])

    def image_tokens(self, images: Sequence[ImageRecord]) -> bytes:
        """Return the tokens of images, between the marks around each."""
        if not images:
            return b""
        assert self.images is not None
        text = "".join(self.images.processor.marked_text(image.grid) for image in images)
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32).tobytes()

    def _check_images(self, images: Sequence[ImageRecord], tokens: np.ndarray) -> None:
        """Refuse a text that names tokens of images by itself."""
        if self.images is None:
            return
        expected = sum(self.images.processor.tokens(image.grid) for image in images)
        if int((tokens == self.images.tokens[0]).sum()) != expected:
            raise ValueError("a text names tokens of images by itself: take them out")

    def _part(self, part: PartText, encoded: list[bytes]) -> tuple[np.ndarray, "_Sizes"]:
        """Return a part's tokens, and the sizes of its pieces."""
        pieces = _woven(part.pieces, iter(encoded[1:] if self.before else encoded))
        counts, tokens = [len(piece) // TOKEN_BYTES for piece in pieces], _tokens(pieces)
        cut = self.longest is not None and len(tokens) > self.longest
        self._check_images(part.images, tokens)
        if cut:
            assert self.longest is not None
            if part.images:
                raise ValueError(
                    f"a text with its images has {len(tokens):,} tokens, and at most {self.longest:,} are read: raise "
                    "the limit of texts, or lower --image-max-tokens"
                )
            tokens = np.concatenate([tokens[: self.longest - self.tail], tokens[len(tokens) - self.tail :]])
        return tokens, _Sizes(counts[0], counts[1 : 1 + 2 * part.lines], cut)


def has_image(value: Any) -> bool:
    """Return whether a value of a row is an object with an image, or several."""
    return isinstance(value, Mapping) and (value.get("image") is not None or bool(value.get("images")))


def named_texts(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ms-swift's row of `messages`, `positive_messages` and `negative_messages` as one of named texts.

    Others are returned as they are. A text is the only message of its list, the first's behind an `instruction`
    perhaps, its system message.

    Raises:
        ValueError: no lists of such messages.
    """
    if row.get(_MESSAGES[1]) is None:
        return row
    if shown := next((name for name in _SHOWN if row.get(name)), None):
        raise ValueError(f"{shown!r} are not read beside messages: write a text with images as an object of both")
    instruction, query = _said(row.get(_MESSAGES[0]), _MESSAGES[0])
    found: dict[str, Any] = {"query": query} | ({} if instruction is None else {"instruction": instruction})
    for name, key in (("positive", _MESSAGES[1]), ("negative", _MESSAGES[2])):
        lists = from_json([] if row.get(key) is None else row[key], key)
        if not isinstance(lists, list):
            raise ValueError(f"{key!r} must be a list of lists of messages, got {type(lists).__name__}")
        if lists:
            found[name] = [_said(messages, key)[1] for messages in lists]
    return found


_MESSAGES = ("messages", "positive_messages", "negative_messages")
_SHOWN = ("images", "positive_images", "negative_images")
MESSAGES_READ = frozenset(_MESSAGES)
"""Columns of `named_texts`."""


def _said(messages: Any, name: str) -> tuple[str | None, str]:
    """Return the system message, if there is one, and the text of the other message."""
    read = read_chat(messages, None, name).messages
    system = str(read.pop(0)["content"]) if len(read) > 1 and read[0]["role"] == "system" else None
    if len(read) != 1 or not isinstance(text := read[0].get("content"), str):
        raise ValueError(f"{name!r} must have one message with a text, and may have a system message before it")
    return system, text


def require_text(name: str, value: Any) -> Any:
    """Return a text, or an object with an image; raise ValueError for another value."""
    if has_image(value):
        return value
    if not isinstance(value, str) or not value.strip():
        what = "an empty text" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"{name!r} must be a text, got {what}: mend the row, or take it out")
    return value


def _all_images(unit: UnitText) -> list[ImageRecord]:
    return [*unit.images, *(image for part in unit.parts for image in part.images)]


class _Sizes(NamedTuple):
    intro: int
    lines: list[int]
    cut: bool


def _plain(piece: str | bytes) -> list[Any]:
    return [piece] if isinstance(piece, bytes) else plain_pieces(piece)


def _woven(pieces: Sequence[str | bytes], encoded: Iterator[bytes]) -> list[bytes]:
    """Return the tokens of each piece, of which texts' are `encoded`, as often as special tokens split them."""
    return [b"".join(part if isinstance(part, bytes) else next(encoded) for part in _plain(piece)) for piece in pieces]


def _tokens(pieces: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(pieces), np.int32)


def _add(columns: dict[str, list[float]], unit: UnitText, prefix: int, parts: list[tuple[np.ndarray, _Sizes]]) -> None:
    """Append a unit's values to the columns."""
    columns["prefix"].append(prefix)
    columns["parts"].append(len(parts))
    columns["cut"].append(any(sizes.cut for _, sizes in parts))
    for text, (tokens, sizes) in zip(unit.parts, parts, strict=True):
        columns["kind"].append(text.kind)
        columns["size"].append(len(tokens))
        columns["intro"].append(sizes.intro)
        columns["options"].append(len(text.gold))
        columns["gold"] += text.gold
        none = [0] * len(text.gold)
        columns["label_size"] += sizes.lines[::2] or none
        columns["text_size"] += sizes.lines[1::2] or none


class _Run(NamedTuple):
    """Parts of a unit that follow each other, and their tokens."""

    unit: int
    parts: range
    tokens: range


def share_beginnings(
    encoded: Encoded, longest: int, image: int | None = None
) -> tuple[Encoded, Int[np.ndarray, "parts"]]:
    """Return units of at most so many tokens, and the index that each part had before.

    Units of the same beginning become one, and longer ones several, unless a part is longer by itself. Units with
    images behind their beginning, by their token, stay as they are.
    """
    columns, images = encoded.columns, encoded.images
    prefixes = columns["prefix"].astype(np.int64).tolist()
    starts = np.cumsum([0, *encoded.lengths.tolist()]).tolist()
    groups: dict[bytes, list[_Run]] = {}
    used: dict[bytes, int] = {}
    for run in _runs(encoded, longest, image):
        unit, prefix = run.unit, prefixes[run.unit]
        key = encoded.tokens[starts[unit] : starts[unit] + prefix].tobytes()
        key += b"" if images is None else images.digests[images.of_document(unit)].tobytes()
        apart = _has_image(encoded, run, image)
        if not prefix or apart or used.get(key, prefix) + len(run.tokens) > longest:
            key += run.parts.start.to_bytes(8)  # by itself
        groups.setdefault(key, []).append(run)
        used[key] = used.get(key, prefix) + len(run.tokens)
    members = list(groups.values())
    order = np.concatenate([run.parts for runs in members for run in runs])
    leaders = [runs[0].unit for runs in members]
    if leaders == list(range(len(prefixes))):
        return encoded, order
    beginnings = [range(starts[unit], starts[unit] + prefixes[unit]) for unit in leaders]
    spans = [[begin, *(run.tokens for run in runs)] for begin, runs in zip(beginnings, members, strict=True)]
    at = np.concatenate([np.arange(span.start, span.stop) for span in chain(*spans)])
    options = columns["options"].astype(np.int64)
    before = np.cumsum(options) - options
    of_options = np.concatenate([np.arange(before[part], before[part] + options[part]) for part in order])
    found = {"prefix": columns["prefix"][leaders], "parts": np.array([_count(runs, "parts") for runs in members])}
    found["cut"] = np.array([max(columns["cut"][run.unit] for run in runs) for runs in members])
    found |= {name: columns[name][order] for name in ("kind", "size", "intro", "options")}
    found |= {name: columns[name][of_options] for name in ("gold", "label_size", "text_size")}
    lengths = [len(begin) + _count(runs, "tokens") for begin, runs in zip(beginnings, members, strict=True)]
    named = {name: values.astype(np.float32) for name, values in found.items()}
    shown = images and images.of_documents(leaders)
    return Encoded(encoded.tokens[at], encoded.mask[at], np.array(lengths, np.int32), named, images=shown), order


def _runs(encoded: Encoded, longest: int, image: int | None) -> Iterator[_Run]:
    """Yield the parts of each unit, as many at a time as fit behind its beginning into so many tokens."""
    counts, sizes = (encoded.columns[name].astype(np.int64).tolist() for name in ("parts", "size"))
    prefixes, end, part = encoded.columns["prefix"].astype(np.int64).tolist(), 0, 0
    for unit, (prefix, count, length) in enumerate(zip(prefixes, counts, encoded.lengths.tolist(), strict=True)):
        whole = _Run(unit, range(part, part + count), range(end + prefix, end + length))
        part, end = part + count, end + length
        if length <= longest or _has_image(encoded, whole, image):
            yield whole
            continue
        first, token, total = whole.parts.start, whole.tokens.start, 0
        for each in whole.parts:
            if total and prefix + total + sizes[each] > longest:
                yield _Run(unit, range(first, each), range(token, token + total))
                first, token, total = each, token + total, 0
            total += sizes[each]
        yield _Run(unit, range(first, part), range(token, token + total))


def _has_image(encoded: Encoded, run: _Run, image: int | None) -> bool:
    return image is not None and bool((encoded.tokens[run.tokens.start : run.tokens.stop] == image).any())


def _count(runs: Sequence[_Run], of: str) -> int:
    return sum(len(getattr(run, of)) for run in runs)


def beginning(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return the tokens that a tokenizer puts before a text."""
    return np.array(encode_beginning(tokenizer, ""), np.int32).tobytes()


def ending(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return the tokens that a tokenizer puts behind a text."""
    count = len(encode_beginning(tokenizer, "b"))
    return np.array(tokenizer.encode("b")[count:], np.int32).tobytes()
