"""Notes on prepared data: files read twice, unused columns, rows past the chat template, turns without an end."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.answers import AnswerDataset
from jaxglue.data.config import DataConfig, Source
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.encode import DOUBLED_BOS
from jaxglue.data.formats import read_row, row_media, unused_note
from jaxglue.data.messages import Chat
from jaxglue.data.readers import SAVED_INFO, has_splits, is_slice, read_rows
from jaxglue.data.store import TokenStore
from jaxglue.data.stream import Window
from jaxglue.data.template import trained_stops
from jaxglue.data.tokenize import Tokenized
from jaxglue.data.tokenizer import known_tokens

_CHECKED = 256
"""Documents whose ends are looked at."""
_LAST = 4
"""Tokens at the end of a trained span among which one must end the turn; white space may follow it."""


def stream_notes(config: DataConfig, window: Window) -> Iterator[str]:
    """Yield lines about the numbers of a stream, and each source's share of its first window."""
    total = sum(place.tokens for place in window.end)
    yield f"a stream: these numbers are those of its first window of {total:,} tokens"
    for source, place in zip(config.sources, window.end, strict=True):
        if len(config.sources) > 1:
            yield f"{place.tokens / total:.1%} of the tokens are from {source}"


def file_notes(groups: list[list[Tokenized]]) -> Iterator[str]:
    """Yield one line for each file read twice, for damage found in the cache, and for columns that are not used."""
    seen: dict[str, tuple[str, int]] = {}
    for group, tokenized in enumerate(groups):
        pairs = [pair for one in tokenized for pair in one.digests if Path(pair[0]).name not in SAVED_INFO]
        for path, digest in pairs:
            earlier, its_group = seen.setdefault(digest, ("", group))
            if earlier and its_group == group:
                yield f"{path} is read twice: its bytes are those of {earlier}, so its rows count twice"
            elif earlier:
                yield f"{path} is held out and trained on: its bytes are those of {earlier}"
            else:
                seen[digest] = path, group
        yield from (one.damage for one in tokenized if one.damage)
    sources = [one.source for tokenized in groups for one in tokenized]
    yield from (
        f"{source}: files have no splits, so all rows are read, not split {source.split}"
        for source in sources
        if not has_splits(source) and source.split != "train" and not is_slice(source.split)
    )
    yield from unused_notes((one.source, one.format, one.unused) for tokenized in groups for one in tokenized)


def unused_notes(sources: Iterable[tuple[Source, str, list[str]]]) -> Iterator[str]:
    """Yield one line for each source with columns that its format does not use."""
    yield from dict.fromkeys(unused_note(*source) for source in sources if source[2])


def label_notes(train: TokenDataset) -> Iterator[str]:
    """Yield a line for labeled answers that are all good or all bad."""
    if isinstance(train, AnswerDataset) and train.task.labeled and len({*train.desirable.tolist()}) == 1:
        label = "true" if train.desirable[0] else "false"
        yield f"all answers have the label {label}: nothing is learned about the other kind; add rows with it"


def template_notes(sources: Iterable[Tokenized], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield one line for each source of prompts and answers that go past the tokenizer's chat template."""
    remedies = {
        "alpaca": "--format alpaca_chat renders them as chats",
        "prompt_completion": "write prompt and completion as lists of messages to render them as chats",
    }
    for one in sources if tokenizer.chat_template else ():
        head = next(read_rows(one.source)) if one.format in remedies else None
        if head and not row_media(head.value) and not isinstance(read_row(head.value, one.format), Chat):
            yield (
                f"{one.source}: rows of format {one.format} are plain text, without the tokenizer's chat template: "
                f"{remedies[one.format]}"
            )


def row_notes(
    store: TokenStore, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, ends: bool = True
) -> Iterator[str]:
    """Yield one line each for special tokens read as text, beginnings of text that are doubled, and turns without end.

    Args:
        store: of the training data.
        config: of the data.
        tokenizer: of the model.
        ends: answers are generated, so turns need ends.
    """
    findings = dict(store.info.get("findings", {}))
    if doubled := findings.pop(DOUBLED_BOS, 0):
        yield (
            f"{doubled:,} {'row begins' if doubled == 1 else 'rows begin'} with {tokenizer.bos_token}, which the "
            "tokenizer adds as well: leave it out of the rows"
        )
    if ordered := sorted(findings.items(), key=lambda item: (-item[1], item[0])):
        counts = (f"{token} in {rows:,} {'row' if rows == 1 else 'rows'}" for token, rows in ordered)
        yield (
            f"special tokens inside messages are read as text: {', '.join(counts)}; --allow-special-tokens keeps those "
            "that it names"
        )
    stops = trained_stops(tokenizer).union(known_tokens(tokenizer, "stop_tokens", config.stop_tokens))
    if ends and _never_stops(store, stops, config.row_tokens):
        names = ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(stops)) or "none is known"
        yield (
            f"no trained turn ends with an end-of-turn token ({names}), so the model does not learn to stop: let the "
            "chat template's turns end with one, inside its {% generation %} markers if it has them"
        )


def _never_stops(store: TokenStore, stops: frozenset[int], longest: int) -> bool:
    """Tell whether none of the first documents' trained spans ends with a stop token; False without spans."""
    found = False
    for begin, end in zip(store.offsets[:_CHECKED], store.offsets[1:], strict=False):
        if end - begin > longest:  # of a stream, which keeps documents' beginnings alone
            continue
        indices = np.arange(begin, end)
        tokens, mask = np.asarray(store.tokens[indices]), np.asarray(store.mask[indices]) > 0
        for last in np.flatnonzero(mask & ~np.append(mask[1:], False)):
            window = slice(max(0, last - _LAST + 1), last + 1)
            if not stops.isdisjoint(tokens[window][mask[window]].tolist()):
                return False
            found = True
    return found
