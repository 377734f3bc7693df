"""Loaded models that answer in one pass: parts packed behind one copy of their beginning, and what they give."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Float32, Int
from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import Reads
from jaxglue.data.config import DataConfig, Source
from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.files import Row
from jaxglue.data.images import ImageRules
from jaxglue.data.iterator import seen_batch
from jaxglue.data.packing import plan_packing
from jaxglue.data.prepare import image_folder
from jaxglue.data.questions import Question
from jaxglue.data.read_rows import COLUMNS, Shown, UnitEncoder, UnitText, share_beginnings
from jaxglue.data.reads import ReadDataset, select_reads
from jaxglue.data.rerank_rows import RerankEncoder
from jaxglue.data.store import Encoded, TokenStore
from jaxglue.data.text_rows import ANCHOR, POSITIVE, TextEncoder
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.assistant import Assistant, count_labels, load_parts
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.sight import MOST_PIXELS, make_rules
from jaxglue.hf.reading import read_record
from jaxglue.hf.sentence_transformers import read_folder
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import ModelGraphDefs, Params, split_model
from jaxglue.objectives import calibration
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.decide import gold_outputs
from jaxglue.objectives.reading import PartOutputs, ReadObjective, part_outputs
from jaxglue.ops.segments import segment_bucket
from jaxglue.vision.records import ImageRecord, ImageRecords
from jaxglue.vision.rows import RowImages

_SHORTEST_ROW, _LONGEST_ROW, _LONGEST_ON_CPU = 256, 16_384, 2048
"""Tokens of a row of texts, unless one is longer; on a CPU attention's work is their square."""
_UNIT_TOKENS, _PART_TOKENS = 128, 64
"""Tokens of units and parts, on average at least, whose rows have the same programs, whatever they hold."""


def find_record(config: AssistantConfig) -> dict[str, Any]:
    """Return how the model of a configuration answers in one pass; empty for one that writes text alone.

    Raises:
        ValueError: a damaged record.
    """
    record = read_record(config.adapter, config.folder)
    return record or read_folder(config.adapter or config.folder)


class LoadedModel(NamedTuple):
    """A model whose parts are read."""

    tokenizer: PreTrainedTokenizerBase
    config: DecoderConfig
    graphdefs: ModelGraphDefs
    trainable: Params
    frozen: Params
    dtype: Any
    rules: ImageRules | None = None
    """For images of rows and requests; None of a model that sees none."""

    @classmethod
    def load(cls, config: AssistantConfig) -> "LoadedModel":
        """Load the model of a configuration, with scores where it has labels.

        Raises:
            ValueError: bad folders, tensors or tokenizer.
        """
        tokenizer, model, dtype = load_parts(config, labels=count_labels(config))
        rules = None if model.config.vision is None else make_rules(config.folder, tokenizer, files=None)
        return cls(tokenizer, model.config, *split_model(model, nnx.LoRAParam), dtype, rules)

    @classmethod
    def of(cls, assistant: Assistant) -> "LoadedModel":
        """Return the model of an assistant, which shares its weights."""
        weights = assistant.graphdefs, assistant.adapter, assistant.frozen
        return cls(assistant.tokenizer, assistant.config, *weights, assistant.dtype, assistant.rules)


class PartReader:
    """Reads the parts of units with a model.

    Args:
        model: loaded.
        record: how it answers in one pass (`jaxglue.hf.reading`).
    """

    def __init__(self, model: LoadedModel, record: Mapping[str, Any]):
        if model.config.bidirectional:
            record = {**record, "bidirectional": True}
        self.model, self.record, self.kind = model, record, str(record["kind"])
        self.objective = _objective(record)
        self.task = self.objective.task(shared_prompt=True, copies=model.config.recurrent is not None)
        self.encoder: UnitEncoder = self.task.encoder(model.tokenizer, record.get("system", ""))
        self.encoder.images = model.rules if self.encoder.sees else None
        self._labels = self.task.labels(model.tokenizer, record.get("system", ""))
        self._executor = Executor(
            model.graphdefs, model.config, policy=PRESETS["full"], dtype=model.dtype, objective=self.objective
        )
        self.row = _LONGEST_ON_CPU if jax.default_backend() == "cpu" else _LONGEST_ROW
        """Tokens of a full row."""
        self._turn = threading.Lock()

    @property
    def limit(self) -> int:
        """Return the most tokens of a beginning with a part."""
        return self.model.config.max_position_embeddings

    @property
    def sees(self) -> bool:
        """Return whether units may have images."""
        return self.encoder.images is not None

    def encode(self, units: Sequence[UnitText]) -> Encoded:
        """Tokenize units, by any thread.

        Raises:
            ValueError: no part, an empty one, or one beyond the model's limit.
        """
        if self.encoder.images is not None:
            count = self.encoder.images.processor.tokens
            shown = ([*unit.images, *(image for part in unit.parts for image in part.images)] for unit in units)
            self._require_fit(max((sum(count(image.grid) for image in images) for images in shown), default=0))
        with self._turn:  # the tokenizer remembers words
            encoded = self.encoder.encode_units(units)
        columns = encoded.columns
        longest = np.repeat(columns["prefix"], columns["parts"].astype(int)) + columns["size"]
        self._require_fit(int(longest.max(initial=0)))
        return encoded

    def _require_fit(self, tokens: int) -> None:
        if tokens > self.limit:
            raise ValueError(f"a text has {tokens:,} tokens, and the model reads at most {self.limit:,}")

    def read_rows(self, sources: Sequence[tuple[Source, Sequence[Row]]]) -> tuple[PartOutputs, ReadDataset]:
        """Return what the model gives for the parts of rows of training's form, and their data set.

        Raises:
            ValueError: an unusable row, with its origin.
        """
        encoded = joined([self._encode_rows(*each) for each in sources])
        return self.read(encoded), self._dataset(encoded)[0]

    def read_files_of(self, source: Source) -> None:
        """Let images of rows be named from a source's folder."""
        if self.encoder.images is not None:
            self.encoder.images = replace(self.encoder.images, folder=image_folder(source))

    def _encode_rows(self, source: Source, rows: Sequence[Row]) -> Encoded:
        self.read_files_of(source)
        return self.encoder.encode(rows)

    def read(self, encoded: Encoded) -> PartOutputs:
        """Return what the model gives for all parts, in the order of units and of their parts.

        Raises:
            ValueError: values that are not finite.
        """
        return self.begin(encoded)()

    def begin(self, encoded: Encoded) -> Callable[[], PartOutputs]:
        """Begin to read on the device; the function returned waits for the end of `read`.

        Units of the same beginning, such as questions of several requests about one state, have one copy of it.
        """
        rules = self.encoder.images
        shared, order = share_beginnings(encoded, self.row, None if rules is None else rules.tokens[0])
        dataset, row = self._dataset(shared)
        plan, found = plan_packing(dataset.lengths, seq_len=row), []
        for index in range(plan.rows):
            units = plan.row(index)
            tokens = min(row, _row_bucket(int(dataset.lengths[units].sum())))
            shape: dict[str, Any] = {
                "seq_len": tokens,
                "max_segments": segment_bucket(max(len(units), tokens // _UNIT_TOKENS)),
            }
            batch = dataset.build_batch(plan, np.array([index]), plan.documents, **shape)
            batch = seen_batch(batch, RowImages.with_patches)
            outputs = self._executor.read(self.model.trainable, self.model.frozen, jax.device_put(batch))
            assert batch.reads is not None
            found.append((batch.reads, outputs))
        return partial(_collected, found, encoded, order)

    def _dataset(self, encoded: Encoded) -> tuple[ReadDataset, int]:
        """Return units in rows of few lengths: as short as holds all, or the longest."""
        lengths = encoded.lengths.astype(np.int64)
        row = _row_bucket(max(min(int(lengths.sum()), self.row), int(lengths.max())))
        store = TokenStore(
            tokens=encoded.tokens,
            mask=encoded.mask,
            offsets=np.cumsum([0, *lengths]),
            columns=encoded.columns,
            info={"digest": "", "max_token": 0},
            images=encoded.images if encoded.images else None,
        )
        config, rules = DataConfig(data=("-",), seq_len=row), self.encoder.images
        selection = select_reads(store, config, Source(name="-"), self.task, self._labels, rules)
        return replace(cast(ReadDataset, selection.dataset), slot_tokens=_PART_TOKENS), row


def joined(parts: Sequence[Encoded]) -> Encoded:
    """Return the units of several encodings, one after the other."""
    columns = {name: np.concatenate([each.columns[name] for each in parts]) for name in COLUMNS}
    tokens, mask, lengths = (
        np.concatenate([getattr(each, name) for each in parts]) for name in ("tokens", "mask", "lengths")
    )
    images = [each.images for each in parts if each.images is not None]
    shown = ImageRecords.joined(images, [len(each.lengths) for each in parts]) if images else None
    return Encoded(tokens, mask, lengths, columns, images=shown)


def _row_bucket(tokens: int) -> int:
    """Return the length of a row for so many tokens: few lengths are compiled."""
    return max(1 << (tokens - 1).bit_length(), _SHORTEST_ROW)


def _collected(
    found: Sequence[tuple[Reads, Float[jax.Array, "B A *K"]]], encoded: Encoded, order: Int[np.ndarray, "parts"]
) -> PartOutputs:
    """Return the parts of rows once they are read, in the order of the units; ValueError for values not finite."""
    joined = part_outputs((reads, np.asarray(outputs)) for reads, outputs in found)
    if not np.isfinite(joined.outputs).all():
        raise ValueError("the model's values are not finite (NaN or infinity): check its weights and the adapter")
    counts, places = encoded.columns["parts"].astype(np.int64), np.argsort(order)
    units = np.repeat(np.arange(len(counts)), counts)
    parts = np.arange(len(units)) - np.repeat(np.cumsum(counts) - counts, counts)
    values = {name: value[places] for name, value in joined.values.items()}
    return PartOutputs(units, parts, joined.outputs[places], values)


def _objective(record: Mapping[str, Any]) -> ReadObjective:
    """Return the objective by whose settings a model is read."""
    kind = record["kind"]
    names = {
        "embed": ("pooling", "bidirectional", "query_prompt", "document_prompt", "max_text_length"),
        "rerank": ("rerank_instruction", "max_document_length"),
    }.get(kind, ())
    name = {"rerank": "rerank_score", "decide": "decide_head"}[kind] if record.get("score") else kind
    settings = {key: record[key] for key in names if key in record}
    return cast(ReadObjective, ObjectiveConfig(objective=name, **settings).make())


def decisions(
    reader: PartReader,
    states: Sequence[tuple[str, Mapping[str, Question]]],
    *,
    system: str | None = None,
    media: Sequence[Any] = (),
) -> list[UnitText]:
    """Return the units of states with questions.

    Args:
        reader: of decisions.
        states: texts, each with its questions.
        system: message before them.
        media: images before each state, in any form of `image_source`, none of them a file.

    Raises:
        ValueError: questions beyond labels, images that a model does not see, or one that is none or out of bounds.
    """
    encoder, images = cast(DecisionEncoder, reader.encoder), sent_images(reader, media)
    return [encoder.asked(state, questions, system=system, images=images) for state, questions in states]


def sent_images(reader: PartReader, media: Sequence[Any]) -> list[ImageRecord]:
    """Return the images of a request, in any form of `image_source`, none of them a file.

    Raises:
        ValueError: a model that sees none, or an image that is none or out of bounds.
    """
    if not media:
        return []
    if reader.encoder.images is None:
        raise ValueError("this model sees no images: send text alone")
    return replace(reader.encoder.images, folder=None).read(media, MOST_PIXELS)


def probabilities(
    reader: PartReader, found: PartOutputs, questions: Sequence[Question], *, calibrated: bool = True
) -> list[Float[np.ndarray, "options"]]:
    """Return the probabilities of each question's options, at the temperatures fitted in training."""
    logits, _, _ = gold_outputs(found)
    fitted = reader.record.get("temperatures", {}) if calibrated else {}
    temperatures = np.array([float(fitted.get(question.type, 1.0)) for question in questions])
    p = np.exp(calibration.log_softmax(logits, temperatures))
    return [row[: len(question.options)] for row, question in zip(p, questions, strict=True)]


def texts(reader: PartReader, values: Sequence[Any], *, query: bool = False) -> list[UnitText]:
    """Return the units of texts to embed, or of values with images, behind the prompt of queries or of documents."""
    encoder = cast(TextEncoder, reader.encoder)
    return [UnitText([], [encoder.part(ANCHOR if query else POSITIVE, text)]) for text in values]


def vectors(found: PartOutputs, dimensions: int | None = None) -> Float32[np.ndarray, "texts D"]:
    """Return normalized embeddings, of their leading dimensions where a number is given."""
    rows = found.outputs[:, :dimensions].astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def judged(
    reader: PartReader, query: str | Shown, documents: Sequence[str | Shown], instruction: str | None = None
) -> UnitText:
    """Return the unit of a query with documents."""
    return cast(RerankEncoder, reader.encoder).asked(query, list(documents), None, instruction)


def relevances(found: PartOutputs) -> Float[np.ndarray, "documents"]:
    """Return the probabilities that documents are relevant."""
    return 1 / (1 + np.exp(-found.outputs.astype(np.float64)))
