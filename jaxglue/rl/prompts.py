"""Prompts to answer in training, tokenized once, with the columns of their rows for rewards."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32
from transformers import PreTrainedTokenizerBase

from jaxglue.data.config import DataConfig, Source
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.files import Row
from jaxglue.data.formats import MEDIA_COLUMNS, refuse_media, row_media, with_system
from jaxglue.data.images import ImageReader, ImageRules
from jaxglue.data.limits import template_time_limit
from jaxglue.data.messages import Chat, listed, read_chat
from jaxglue.data.pieces import PieceTokenizer
from jaxglue.data.readers import read_rows
from jaxglue.data.store import StoreInfo, TokenStore
from jaxglue.data.template import ChatTemplate, adopt
from jaxglue.data.template_check import TemplateCheck
from jaxglue.data.tokenizer import encode_beginning, require_unicode
from jaxglue.ops.segments import aligned
from jaxglue.vision.processor import Grid, Processor
from jaxglue.vision.records import ImageRecord, ImageRecords
from jaxglue.vision.rows import Image, PromptImages, read_prompt

Content = str | list[dict[str, Any]]
"""A text to continue, or a conversation to answer."""
_KEYS = ("prompt", "messages", "conversations", "question")
ToolsOfRow = Callable[[Mapping[str, Any]], list[Any]]
"""Returns the schemas of the tools that the environment of a row has, by its columns."""


class Prompt(NamedTuple):
    """A row of the data."""

    origin: str
    """File and line."""
    content: Content
    tokens: list[int]
    columns: Mapping[str, Any]
    """The row's other columns, but for its images."""
    given: list[int] | None = None
    """Tokens of the row's own answer, where it has one."""
    teacher: list[int] | None = None
    """Tokens of the teacher's prompt, where it is another."""
    tools: list[Any] | None = None
    """Tools of the row and of its environment, which its template is given."""
    asked: bool = True
    """The row has a prompt; else its environment makes it."""
    records: tuple[ImageRecord, ...] = ()
    """Its images, in the order of their tokens."""


class PromptImage(NamedTuple):
    """An image of a prompt."""

    image: Image
    places: Int32[np.ndarray, " I"]
    """Token of each of its features."""


def read_images(
    tokens: Sequence[int], images: Sequence[PromptImage], features: Mapping[tuple, np.ndarray], processor: Processor
) -> tuple[Sequence[int], PromptImages | None]:
    """Return a prompt as the model reads it, with the features of its images by their `Image.cache_key`."""
    if not images:
        return tokens, None
    places = np.concatenate([places for _, places in images])
    return read_prompt(tokens, [image for image, _ in images], places, lambda i: features[i.cache_key], processor)


@dataclass(frozen=True, kw_only=True)
class PromptDataset(TokenDataset):
    """Prompts as documents without targets."""

    prompts: tuple[Prompt, ...]
    answer: int
    """The most tokens of an answer."""

    @property
    def document_lengths(self) -> Int[np.ndarray, "prompts"]:
        """Return the lengths of prompts with the longest answers, for which memory is planned."""
        return self.lengths + self.answer

    def images_of(self, prompt: Prompt) -> list[PromptImage]:
        """Return the images of a prompt, which are read here."""
        if self.reader is None or not prompt.records:
            return []
        images = self.reader.decoded([Image.of(record) for record in prompt.records])
        places = np.flatnonzero(self.reader.rules.are_features(np.array(prompt.tokens))).astype(np.int32)
        ends = np.cumsum([self.reader.rules.processor.tokens(image.grid) for image in images])
        return [PromptImage(*pair) for pair in zip(images, np.split(places, ends[:-1]), strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Hash tokens and columns, images, and the rows' answers where they are trained on."""
        digest = self._tokens_digest
        digest.update(json.dumps([prompt.columns for prompt in self.prompts], sort_keys=True, default=str).encode())
        if self.store.images is not None:
            digest.update(np.ascontiguousarray(self.store.images.digests).data)
        if any(prompt.given for prompt in self.prompts):
            digest.update(json.dumps([prompt.given for prompt in self.prompts]).encode())
        return digest.hexdigest()


def _rounded(tile: int) -> str:
    return "" if tile == 1 else f", where each takes a multiple of {tile} for --exact-sampling"


def read_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer: int,
    limit: int,
    tile: int = 1,
    teacher_system: str | None = None,
    held_out: bool = False,
    answered: bool = True,
    tools: ToolsOfRow | None = None,
    images: Callable[[Source], ImageRules] | None = None,
    shows: bool = False,
) -> PromptDataset:
    """Read rows with a `prompt`, `messages` or a `question`; a text in `prompt` is continued as it is.

    Args:
        config: data sources, system message and template.
        tokenizer: of the model; adopts the template of `config`.
        answer: the most tokens of an answer.
        limit: the most of a prompt and its answer.
        tile: tokens at whose multiples a prompt and its answer begin in a row.
        teacher_system: system message of a teacher's prompts; `{name}` stands for a column.
        held_out: read the held-out rows of `config`, not those to train on.
        answered: keep the rows' own answers.
        tools: returns the schemas of the tools that the environment of a row with these columns has; rows may have no
            prompt then.
        images: returns the rules for images of a source's rows; None for a model that sees none.
        shows: environments show images, whatever rows have.

    Raises:
        ValueError: no row, one without a prompt, images that cannot be read or seen, or a prompt that leaves no room
            for the answer, by file and line.
    """
    adopt(tokenizer, config)
    prompts, rules = list[Prompt](), None
    sources, named = (config.eval_sources, config.eval_data) if held_out else (config.sources, config.data)
    encoder = _Encoder(tokenizer, config.system, teacher_system, tools)
    for source, row in ((each, row) for each in sources for row in read_rows(each)):
        encoder.rules = rules = None if images is None else images(source)
        prompt = encoder.encode(row)
        longest = max(len(prompt.tokens), len(prompt.teacher or ()))
        room = max(longest + answer, aligned(longest - 1, tile) + aligned(answer, tile))
        if room <= limit:
            given = prompt.given[:answer] if answered and prompt.given else None
            prompts.append(prompt._replace(given=given))
        elif config.overlong_of(source) != "drop":
            raise ValueError(
                f"{row.origin}: a prompt of {longest:,} tokens leaves no room for an answer of {answer:,} "
                f"in {limit:,}{_rounded(tile)}: raise --seq-len, lower --max-completion-length, or leave it out with "
                "--overlong drop"
            )
    if not prompts:
        flag = "eval_data" if held_out else "data"
        raise ValueError(f"{flag}: {', '.join(named)} has no prompt that fits: check the files and --seq-len")
    lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int64)
    tokens = np.concatenate([np.array(prompt.tokens, np.int32) for prompt in prompts])
    info: StoreInfo = {
        "digest": hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest(),
        "max_token": int(tokens.max()),
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    records = ImageRecords.of([prompt.records for prompt in prompts])
    store = TokenStore(
        tokens=tokens,
        mask=np.zeros(len(tokens), np.uint8),
        offsets=offsets,
        info=info,
        images=records if len(records) else None,
    )
    return PromptDataset(
        store=store,
        documents=np.arange(len(prompts)),
        lengths=lengths,
        targets=np.zeros_like(lengths),
        prompts=tuple(prompts),
        answer=answer,
        reader=ImageReader(rules=rules, store=store) if rules is not None and (shows or len(records)) else None,
    )


class _Encoder:
    """Tokenizes prompts as in generation."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str,
        teacher_system: str | None,
        tools: "ToolsOfRow | None" = None,
    ):
        self.rules: ImageRules | None = None
        """Rules for the images of a row; None refuses them."""
        self._tools = tools
        self._tokenizer, self._system, self._teacher_system = tokenizer, system, teacher_system
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self._check = TemplateCheck(self._template) if self._template else None
        self._pieces = PieceTokenizer(tokenizer.backend_tokenizer)

    def encode(self, row: Row) -> Prompt:
        try:
            content, chat, columns = self._read(row.value)
            records = () if chat is None or self.rules is None else tuple(self.rules.record(chat))
            grids = [record.grid for record in records]
            tokens = self._tokens(content, chat, grids)
            given = self._given(row.value, chat, tokens, grids)
            teacher = self._teacher(chat, columns, grids)
            asked = any(row.value.get(key) for key in _KEYS)
            return Prompt(row.origin, content, tokens, columns, given, teacher, chat and chat.tools, asked, records)
        except ValueError as error:
            raise ValueError(f"{row.origin}: {error}") from error

    def _read(self, row: dict[str, Any]) -> tuple[Content, Chat | None, dict[str, Any]]:
        key = next((key for key in _KEYS if row.get(key)), None)
        if key is None and self._tools is None:
            raise ValueError(f"a prompt needs one of {', '.join(_KEYS)}; the row's keys are {listed(row)}")
        media = [] if self.rules is None else row_media(row)
        if self.rules is None:
            refuse_media(row)
        unread = (key, "tools", "system", *(MEDIA_COLUMNS if media else ()))
        columns = {name: value for name, value in row.items() if name not in unread}
        if key == "prompt" and isinstance(row[key], str):
            if other := next((name for name in ("system", "tools") if row.get(name)), None):
                raise ValueError(f"{other!r} is for a chat, and the prompt is a text: write the row as 'messages'")
            if media:
                raise ValueError("images need a chat, and the prompt is a text: write the row as 'messages'")
            require_unicode(row[key])
            return row[key], None, columns
        asked = {"role": "user", "content": row[key] if key else ""}
        messages = [asked] if key in (None, "question") else row[key]
        chat = read_chat(messages, row.get("tools"), key or "prompt", sees=self.rules is not None)
        if self._tools is not None:
            chat = chat._replace(tools=[*(chat.tools or ()), *self._tools(columns)] or None)
        if _is_answered(chat.messages):
            chat = Chat(chat.messages[:-1], chat.tools, chat.trained[:-1], chat.images)
        if self.rules is not None:
            chat = self.rules.attach(chat, media)
        completed = with_system(chat, row)
        assert isinstance(completed, Chat)
        chat = completed.with_system(self._system) if self._system else completed
        return chat.messages, chat, columns

    def _encode(self, text: str, grids: Sequence[Grid]) -> list[int]:
        """Return the tokens of a rendering with images of these patches."""
        assert self._template is not None
        if not grids:
            return self._template.encode(text)
        assert self.rules is not None
        return self.rules.encode(self._template, text, grids)[0]

    def _tokens(self, content: Content, chat: Chat | None, grids: Sequence[Grid] = ()) -> list[int]:
        if chat is None:
            assert isinstance(content, str)
            return encode_beginning(self._tokenizer, content)
        if self._template is None or self._check is None:
            raise ValueError("the tokenizer has no chat template: name one with --chat-template, or give texts")
        with template_time_limit():
            messages, tools = self._template.protect(chat.messages, chat.tools)
            text = self._template.render_prompt(messages, tools)
            self._check(messages, tools, text)
        require_unicode(text)
        return self._encode(text, grids)

    def _given(
        self, row: dict[str, Any], chat: Chat | None, prompt: list[int], grids: Sequence[Grid]
    ) -> list[int] | None:
        """Return the tokens of supervised data's answer; None where there is none after the prompt's tokens."""
        completion = row.get("completion")
        if chat is None:
            if not isinstance(completion, str):
                return None
            eos = self._tokenizer.eos_token_id
            assert isinstance(row["prompt"], str)
            _, tokens = self._pieces.encode([row["prompt"], completion])
            return tokens if eos is None else [*tokens, eos]
        last = read_chat(completion, None, "completion").messages[-1] if isinstance(completion, list) else None
        for key in ("messages", "conversations"):
            if last is None and isinstance(row.get(key), list):
                messages = read_chat(row[key], None, key, sees=self.rules is not None).messages
                last = messages[-1] if _is_answered(messages) else None
        if last is None or self._template is None:
            return None
        with template_time_limit():
            messages, tools = self._template.protect([*chat.messages, last], chat.tools)
            try:
                text, spans = self._template.render_with_spans(messages, tools)
            except ValueError:  # the answer cannot be told from what precedes it
                return None
        whole = self._encode(text[: spans[-1][1]], grids)  # white space after the end of a turn is never generated
        return whole[len(prompt) :] if whole[: len(prompt)] == prompt else None

    def _teacher(self, chat: Chat | None, columns: Mapping[str, Any], grids: Sequence[Grid]) -> list[int] | None:
        if self._teacher_system is None:
            return None
        if chat is None:
            raise ValueError("--teacher-system needs prompts of messages, and this one is a text")
        try:
            system = self._teacher_system.format_map({key: str(value) for key, value in columns.items()})
        except KeyError as error:
            raise ValueError(
                f"--teacher-system: no column {error} in the row, which has {', '.join(columns)}"
            ) from None
        except (ValueError, IndexError, AttributeError) as error:
            raise ValueError(
                f"--teacher-system: {error}: {{name}} stands for a column, and {{{{ and }}}} for braces"
            ) from None
        messages = chat.messages[1:] if chat.messages[0]["role"] == "system" else chat.messages
        messages = [{"role": "system", "content": system}, *messages]
        return self._tokens("", Chat(messages, chat.tools, [None] * len(messages)), grids)


def _is_answered(messages: list[dict[str, Any]]) -> bool:
    """Tell whether messages end with the answer of supervised data."""
    return len(messages) > 1 and messages[-1]["role"] == "assistant"


def positions(count: int, seed: int, start: int) -> Iterator[int]:
    """Yield the prompts from position `start` on of an endless order, shuffled in each epoch."""
    epoch, place = divmod(start, count)
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(count)[place:].tolist()
        epoch, place = epoch + 1, 0


class PromptReport:
    """Describes prompts, in place of a `DataReport`."""

    def __init__(self, dataset: PromptDataset, held_out: PromptDataset | None):
        self._lengths, self._held_out = dataset.lengths, 0 if held_out is None else len(held_out)

    def __str__(self) -> str:
        shortest, longest = self._lengths.min(), self._lengths.max()
        held_out = f", {self._held_out:,} held out" if self._held_out else ""
        return f"{len(self._lengths):,} prompts of {shortest:,} to {longest:,} tokens{held_out}"
