"""Preparation of data sets and streams, with their report, from a `DataConfig`."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.answers import AnswerDataset, select_answers
from jaxglue.data.config import NO_COLUMNS, AnswerTask, Columns, DataConfig, LabelTask, Source, short_names
from jaxglue.data.dataset import Selection, TokenDataset, hold_out, join_selections, select_documents
from jaxglue.data.encode import DOUBLED_BOS
from jaxglue.data.formats import CHATS, read_row, unused_note
from jaxglue.data.labeled import select_labeled
from jaxglue.data.messages import Chat
from jaxglue.data.mixing import check_epoch, passes_per_epoch, plan_dataset_epoch
from jaxglue.data.packing import PackPlan
from jaxglue.data.progress import DataProgress, NoProgress
from jaxglue.data.readers import SAVED_INFO, read_rows
from jaxglue.data.report import DataReport, SourceReport, split_report
from jaxglue.data.store import TOKEN_BYTES, TokenStore
from jaxglue.data.stream import TokenStream, Window
from jaxglue.data.template import adopt, trained_stops
from jaxglue.data.tokenize import Tokenized, tokenize
from jaxglue.data.tokenizer import known_tokens, padding_token


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Training and optional held-out documents, and their report."""

    train: TokenDataset
    eval: TokenDataset | None
    report: Any
    """A `DataReport`, or another text."""
    eval_sources: tuple[str, ...] = ()
    """Names of the held-out documents' sources."""
    stream: TokenStream | None = None
    """Stream of the training data; `train` is its first window."""
    window: Window | None = None
    """First window of the stream."""

    @property
    def fingerprint(self) -> str:
        """Return the training data's fingerprint."""
        return self.stream.fingerprint if self.stream else self.train.fingerprint


def prepare_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    progress: DataProgress | None = None,
    task: AnswerTask | LabelTask | None = None,
    columns: Columns = NO_COLUMNS,
) -> PreparedData:
    """Read, template, tokenize, mask, truncate and split the data, on the host only.

    Args:
        config: data sources and processing.
        tokenizer: of the model; adopts the template and eos token of `config`, so that exports agree with training.
        vocab_size: exclusive upper bound of token ids, the rows of the model's embedding.
        progress: shows hashing, tokenizing and packing; by default nothing does.
        task: treatment of preference data or labels; None for texts and chats.
        columns: of numbers, that an objective reads beside the documents.

    Raises:
        ValueError: unusable data, naming file and line where possible.
    """
    adopt(tokenizer, config)
    progress = progress or NoProgress()
    if isinstance(task, LabelTask):
        task = task._replace(padding=padding_token(tokenizer), end=tokenizer.eos_token_id)
    elif task is not None and task.scored:
        task = task._replace(padding=padding_token(tokenizer))
    pairs = isinstance(task, AnswerTask)
    if config.streaming:
        return _prepare_stream(config, tokenizer, vocab_size, progress)
    groups = [
        [_select(source, config, tokenizer, vocab_size, progress, task, columns) for source in sources]
        for sources in filter(None, (config.sources, config.eval_sources))
    ]
    parts = [join_selections([selection for _, selection in group]) for group in groups]
    splits = hold_out(parts[0], config) if config.eval_fraction else tuple(parts)
    train = _mix(splits[0].dataset, config)
    datasets = [train, *(split.dataset for split in splits[1:])]
    tokenized = [one for group in groups for one, _ in group]
    plans = [_pack(data, config, progress) for data in datasets]
    sizes = [split_report(*pair, config.row_tokens) for pair in zip(datasets, plans, strict=True)]
    report = DataReport(
        format=", ".join(dict.fromkeys(one.format for one in tokenized)),
        cached=all(one.cached for one in tokenized),
        rows=sum(len(one.store.lengths) // (2 if pairs else 1) for one in tokenized),
        truncated=sum(part.truncated for part in parts),
        dropped=sum(part.dropped for part in parts),
        train=sizes[0],
        eval=sizes[1] if len(sizes) > 1 else None,
        sources=tuple(_source_reports([one for one, _ in groups[0]], train, plans[0])),
        notes=(
            *_notes([[one for one, _ in group] for group in groups]),
            *_template_notes(tokenized, tokenizer),
            *_row_notes(
                train.store, config, tokenizer, ends=task is None or (isinstance(task, AnswerTask) and not task.scored)
            ),
            *_label_notes(train),
        ),
    )
    held_out = datasets[1] if len(datasets) > 1 else None
    names = short_names([source.name for source in config.eval_sources or config.sources])
    return PreparedData(train=train, eval=held_out, report=report, eval_sources=names)


def _prepare_stream(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, progress: DataProgress
) -> PreparedData:
    """Tokenize a stream's first window, and prepare the held-out data."""
    stream = TokenStream(config, tokenizer, check=partial(_check_vocabulary, vocab_size=vocab_size))
    with progress.stage("tokenizing the stream's first window"), closing(stream.windows()) as windows:
        window = next(windows)
    train, eval_sources = window.selection, config.eval_sources
    pairs = [_select(source, config, tokenizer, vocab_size, progress) for source in eval_sources]
    held_out = join_selections([selection for _, selection in pairs]).dataset if pairs else None
    sizes = [
        split_report(data, _pack(data, config, progress), config.row_tokens)
        for data in filter(None, (train.dataset, held_out))
    ]
    columns = [*zip(config.sources, stream.formats, stream.unused, strict=True)]
    columns += [(one.source, one.format, one.unused) for one, _ in pairs]
    report = DataReport(
        format=", ".join(dict.fromkeys(stream.formats)),
        cached=False,
        rows=window.rows,
        truncated=train.truncated,
        dropped=train.dropped,
        train=sizes[0],
        eval=sizes[1] if held_out else None,
        sources=(),
        notes=(
            *_stream_notes(config, window),
            *_unused_notes(columns),
            *_row_notes(train.dataset.store, config, tokenizer),
        ),
    )
    names = short_names([source.name for source in eval_sources])
    return PreparedData(
        train=train.dataset, eval=held_out, report=report, eval_sources=names, stream=stream, window=window
    )


def _pack(dataset: TokenDataset, config: DataConfig, progress: DataProgress) -> PackPlan:
    """Pack the first epoch, for the report."""
    with progress.stage("packing", TOKEN_BYTES * float(dataset.lengths.sum())) as advance:
        return plan_dataset_epoch(dataset, seq_len=config.row_tokens, seed=config.seed, epoch=0, advance=advance)


def _stream_notes(config: DataConfig, window: Window) -> Iterator[str]:
    total = sum(place.tokens for place in window.end)
    yield f"a stream: these numbers are those of its first window of {total:,} tokens"
    for source, place in zip(config.sources, window.end, strict=True):
        if len(config.sources) > 1:
            yield f"{place.tokens / total:.1%} of the tokens are from {source}"


def _select(
    source: Source,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    progress: DataProgress,
    task: AnswerTask | LabelTask | None = None,
    columns: Columns = NO_COLUMNS,
) -> tuple[Tokenized, Selection]:
    pairs = isinstance(task, AnswerTask)
    tokenized = tokenize(source, config, tokenizer, progress, preferences=pairs, columns=columns)
    _check_vocabulary(tokenized.store, vocab_size)
    if isinstance(task, LabelTask):
        task = task._replace(is_chat=tokenized.format in CHATS)
        return tokenized, select_labeled(tokenized.store, config, source, task, columns)
    if task is not None:
        if tokenized.format == "labeled" and not task.labeled:
            raise ValueError(f"{source}: rows with a label are for --objective kto; others compare two answers")
        return tokenized, select_answers(tokenized.store, config, source, task, columns)
    return tokenized, select_documents(tokenized.store, config, source, columns)


def _mix(dataset: TokenDataset, config: DataConfig) -> TokenDataset:
    """Return the data set with its sources' passes in an epoch."""
    owners = np.zeros(len(dataset), np.int64) if dataset.sources is None else dataset.sources
    tokens = np.bincount(owners, weights=dataset.lengths, minlength=len(config.sources))
    passes = passes_per_epoch(config.sources, tokens.tolist(), config.mix_temperature)
    check_epoch(np.bincount(owners, minlength=len(passes)).tolist(), passes)
    return replace(dataset, sources=owners, passes=passes)


def _source_reports(tokenized: list[Tokenized], train: TokenDataset, plan: PackPlan) -> Iterator[SourceReport]:
    assert train.sources is not None
    tokens = np.bincount(train.sources[plan.documents], weights=train.lengths[plan.documents], minlength=len(tokenized))
    for index, one in enumerate(tokenized):
        yield SourceReport(
            name=one.source.name,
            format=one.format,
            documents=int((train.sources == index).sum()),
            passes=train.passes[index],
            share=float(tokens[index] / tokens.sum()),
        )


def _notes(groups: list[list[Tokenized]]) -> Iterator[str]:
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
    yield from _unused_notes((one.source, one.format, one.unused) for tokenized in groups for one in tokenized)


def _unused_notes(sources: Iterable[tuple[Source, str, list[str]]]) -> Iterator[str]:
    """Yield one line for each source with columns that its format does not use."""
    yield from dict.fromkeys(unused_note(*source) for source in sources if source[2])


def _label_notes(train: TokenDataset) -> Iterator[str]:
    """Yield a line for labeled answers that are all good or all bad."""
    if isinstance(train, AnswerDataset) and train.task.labeled and len({*train.desirable.tolist()}) == 1:
        label = "true" if train.desirable[0] else "false"
        yield f"all answers have the label {label}: nothing is learned about the other kind; add rows with it"


def _template_notes(sources: Iterable[Tokenized], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield one line for each source of prompts and answers that go past the tokenizer's chat template."""
    remedies = {
        "alpaca": "--format alpaca_chat renders them as chats",
        "prompt_completion": "write prompt and completion as lists of messages to render them as chats",
    }
    for one in sources if tokenizer.chat_template else ():
        head = next(read_rows(one.source)) if one.format in remedies else None
        if head and not isinstance(read_row(head.value, one.format), Chat):
            yield (
                f"{one.source}: rows of format {one.format} are plain text, without the tokenizer's chat template: "
                f"{remedies[one.format]}"
            )


_CHECKED = 256
"""Documents whose ends are looked at."""
_LAST = 4
"""Tokens at the end of a trained span among which one must end the turn; white space may follow it."""


def _row_notes(
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


def _check_vocabulary(store: TokenStore, vocab_size: int | None) -> None:
    largest = store.info["max_token"]
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the data hold token id {largest}, but the model's vocabulary has {vocab_size} entries: "
            "use the model's own tokenizer, or enlarge its embedding"
        )
