"""Preparation of data sets and streams, with their report, from a `DataConfig`."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.answers import select_answers
from jaxglue.data.config import (
    HUB_PREFIX,
    NO_COLUMNS,
    AnswerTask,
    Columns,
    DataConfig,
    LabelTask,
    Source,
    short_names,
)
from jaxglue.data.dataset import Selection, TokenDataset, hold_out, join_selections, select_documents
from jaxglue.data.formats import CHATS
from jaxglue.data.images import ImageReader, ImageRules
from jaxglue.data.labeled import select_labeled
from jaxglue.data.memory import holds_memory
from jaxglue.data.mixing import check_epoch, passes_per_epoch, plan_dataset_epoch
from jaxglue.data.notes import file_notes, label_notes, row_notes, stream_notes, template_notes, unused_notes
from jaxglue.data.packing import PackPlan
from jaxglue.data.progress import DataProgress, NoProgress
from jaxglue.data.reads import ReadDataset, ReadTask, select_reads
from jaxglue.data.report import DataReport, SourceReport, split_report
from jaxglue.data.store import TOKEN_BYTES, TokenStore
from jaxglue.data.stream import TokenStream, Window
from jaxglue.data.template import adopt
from jaxglue.data.tokenize import Tokenized, tokenize
from jaxglue.data.tokenizer import padding_token
from jaxglue.files.json_file import read_json
from jaxglue.vision.processor import Processor, read_processor, with_texts


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
    images: ImageRules | None = None
    """Rules for the images of the first source's rows; None of a model that sees none."""

    @property
    def readers(self) -> list[ImageReader]:
        """Return the readers of images of the training and the held-out documents; none of data without images."""
        readers = (getattr(data, "reader", None) for data in (self.train, self.eval))
        return [reader for reader in readers if reader is not None]

    @property
    def fingerprint(self) -> str:
        """Return the training data's fingerprint."""
        return self.stream.fingerprint if self.stream else self.train.fingerprint


def prepare_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    progress: DataProgress | None = None,
    task: AnswerTask | LabelTask | ReadTask | None = None,
    columns: Columns = NO_COLUMNS,
    processor: Processor | None = None,
) -> PreparedData:
    """Read, template, tokenize, mask, truncate and split the data, on the host only.

    Args:
        config: data sources and processing.
        tokenizer: of the model; adopts the template and eos token of `config`, so that exports agree with training.
        vocab_size: exclusive upper bound of token ids, the rows of the model's embedding.
        progress: shows hashing, tokenizing and packing; by default nothing does.
        task: treatment of preference data, labels or rows whose parts are read; None for texts and chats.
        columns: of numbers, that an objective reads beside the documents.
        processor: of images, with its tokens' texts; None for a model that sees none.

    Raises:
        ValueError: unusable data, naming file and line where possible.
    """
    adopt(tokenizer, config)
    if isinstance(task, ReadTask):
        task.adopt(tokenizer)
    progress = progress or NoProgress()
    if task is not None and (config.overlong == "split" or any(map(_has_treatment, config.sources))):
        raise ValueError("overlong: to split, or by source, is for --objective sft: choose --overlong truncate or drop")
    if isinstance(task, LabelTask):
        task = task._replace(padding=padding_token(tokenizer), end=tokenizer.eos_token_id)
    elif isinstance(task, AnswerTask) and task.scored:
        task = task._replace(padding=padding_token(tokenizer))
    pairs = isinstance(task, AnswerTask)
    if config.streaming:
        return _prepare_stream(config, tokenizer, vocab_size, progress, processor)
    groups = [
        [_select(source, config, tokenizer, vocab_size, progress, task, columns, processor) for source in sources]
        for sources in filter(None, (config.sources, config.eval_sources))
    ]
    parts = [join_selections([selection for _, selection in group]) for group in groups]
    splits = hold_out(parts[0], config) if config.eval_fraction else tuple(parts)
    train = _mix(splits[0].dataset, config)
    if isinstance(train, ReadDataset) and train.task.permutes_options:
        train = train.with_permuted_options()
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
            *file_notes([[one for one, _ in group] for group in groups]),
            *template_notes(tokenized, tokenizer),
            *row_notes(
                train.store, config, tokenizer, ends=task is None or (isinstance(task, AnswerTask) and not task.scored)
            ),
            *label_notes(train),
        ),
    )
    held_out = datasets[1] if len(datasets) > 1 else None
    names = short_names([source.name for source in config.eval_sources or config.sources])
    images = None if processor is None else image_rules(processor, config.sources[0], tokenizer)
    return PreparedData(train=train, eval=held_out, report=report, eval_sources=names, images=images)


def _has_treatment(source: Source) -> bool:
    return source.overlong is not None


def _prepare_stream(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    progress: DataProgress,
    processor: Processor | None,
) -> PreparedData:
    """Tokenize a stream's first window, and prepare the held-out data."""
    rules = None if processor is None else [image_rules(processor, source, tokenizer) for source in config.sources]
    check = partial(_check_vocabulary, vocab_size=vocab_size)
    stream = TokenStream(config, tokenizer, check=check, images=rules)
    with progress.stage("tokenizing the stream's first window"), closing(stream.windows()) as windows:
        window = next(windows)
    train, eval_sources = window.selection, config.eval_sources
    pairs = [_select(source, config, tokenizer, vocab_size, progress, processor=processor) for source in eval_sources]
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
            *stream_notes(config, window),
            *unused_notes(columns),
            *row_notes(train.dataset.store, config, tokenizer),
        ),
    )
    names = short_names([source.name for source in eval_sources])
    return PreparedData(
        train=train.dataset,
        eval=held_out,
        report=report,
        eval_sources=names,
        stream=stream,
        window=window,
        images=None if rules is None else rules[0],
    )


def _pack(dataset: TokenDataset, config: DataConfig, progress: DataProgress) -> PackPlan:
    """Pack the first epoch, for the report."""
    with progress.stage("packing", TOKEN_BYTES * float(dataset.lengths.sum())) as advance:
        return plan_dataset_epoch(dataset, seq_len=config.row_tokens, seed=config.seed, epoch=0, advance=advance)


def _select(
    source: Source,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    progress: DataProgress,
    task: AnswerTask | LabelTask | ReadTask | None = None,
    columns: Columns = NO_COLUMNS,
    processor: Processor | None = None,
) -> tuple[Tokenized, Selection]:
    images = None if processor is None else image_rules(processor, source, tokenizer)
    if isinstance(task, ReadTask):
        tokenized = tokenize(source, config, tokenizer, progress, task=task, images=images)
        _check_vocabulary(tokenized.store, vocab_size)
        labels = task.labels(tokenizer, source.system)
        return tokenized, select_reads(tokenized.store, config, source, task, labels, images)
    pairs = isinstance(task, AnswerTask)
    tokenized = tokenize(source, config, tokenizer, progress, preferences=pairs, columns=columns, images=images)
    _check_vocabulary(tokenized.store, vocab_size)
    if isinstance(task, LabelTask):
        task = task._replace(is_chat=tokenized.format in CHATS)
        return tokenized, select_labeled(tokenized.store, config, source, task, columns, images)
    if task is not None:
        if tokenized.format == "labeled" and not task.labeled:
            raise ValueError(f"{source}: rows with a label are for --objective kto; others compare two answers")
        return tokenized, select_answers(tokenized.store, config, source, task, columns, images)
    return tokenized, select_documents(tokenized.store, config, source, columns, images)


def read_vision(folder: Path, tokenizer: PreTrainedTokenizerBase, **limits: int | None) -> Processor | None:
    """Return the processor of a model's images, with its tokens' texts; None for a model that sees none.

    Args:
        folder: of the model.
        tokenizer: of the model.
        limits: of images, as `read_processor` takes them.

    Raises:
        ValueError: settings that cannot be read, or a limit that is too low.
    """
    path = folder / "config.json"
    raw = read_json(path) if path.is_file() else {}
    processor = read_processor(folder, raw, **limits)
    return None if processor is None else with_texts(processor, raw, tokenizer.convert_ids_to_tokens)


def image_rules(processor: Processor, source: Source, tokenizer: PreTrainedTokenizerBase) -> ImageRules:
    """Return the rules for the images of a source's rows."""
    return ImageRules.of(processor, tokenizer, image_folder(source))


def image_folder(source: Source) -> Path | None:
    """Return the folder of relative paths in a source's rows, absolute; None where they name no files."""
    folder = Path(source.name).absolute()
    if source.name.startswith(HUB_PREFIX):
        return None
    return Path.cwd() if holds_memory(folder) else folder if folder.is_dir() else folder.parent


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


def _check_vocabulary(store: TokenStore, vocab_size: int | None) -> None:
    largest = store.info["max_token"]
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the data hold token id {largest}, but the model's vocabulary has {vocab_size} entries: "
            "use the model's own tokenizer, or enlarge its embedding"
        )
