"""Evaluation between steps: loss on held-out data, load of experts, and answers to sample prompts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.messages import Chat
from jaxglue.engine import transfer
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.files.json_lines import read_steps, rewrite_lines
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.prompts import render_messages
from jaxglue.generation.scheduler import Request
from jaxglue.generation.sight import Prompt, Sight
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.ops.collectives import per_device
from jaxglue.ops.moe import Routing, routing_statistics
from jaxglue.sharding.gather import gather
from jaxglue.sharding.mesh import place_batch
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.terminal.console import Console
from jaxglue.text.stream import in_order, without
from jaxglue.training.callbacks import Metrics, Predictions
from jaxglue.training.progress import SHOWN
from jaxglue.training.reading import evaluate_reads
from jaxglue.training.run import Run
from jaxglue.training.step import StepParts
from jaxglue.vision.images import thumbnail

_LARGEST_EXPONENT = 700.0
"""A float64 whose exponential is finite."""
_AT_ONCE = 8
"""Prompts answered together: training leaves little memory."""


class BestState(TypedDict):
    """The lowest loss on held-out data and its step, and the evaluations since, as JSON."""

    best_eval: tuple[float, int] | None
    since_best: NotRequired[int]


class Evaluation:
    """Evaluates a model during training.

    Args:
        run: the run, perhaps with held-out batches.
        parts: run the model.
        compute_metrics: of the caller's; None for none.
    """

    def __init__(self, run: Run, parts: StepParts, compute_metrics: Metrics | None = None):
        self._compute_metrics, self._parts = compute_metrics, parts
        self._batches, self._executor, self._mesh = run.eval_batches, parts.executor, parts.mesh
        self._rollouts = run.rollouts if run.rollouts and run.rollouts.plan.held_out else None
        self._sources = run.data.eval_sources
        self._objective = run.objective
        self._probe = None
        if run.model.moe is not None:
            self._probe = ExpertLoadProbe(
                parts.graphdefs, run.model, dtype=run.dtype, attention=run.workload.attention, layout=parts.layout
            )
        self.best: tuple[float, int] | None = None
        """The lowest loss on held-out data, and its step."""
        self.since_best = 0
        """Evaluations since then."""
        self._patience = run.output.early_stopping

    @property
    def is_needed(self) -> bool:
        """Return whether the run has held-out data or prompts, or routers."""
        return self._batches is not None or self._rollouts is not None or self._probe is not None

    @property
    def is_stale(self) -> bool:
        """Return whether `--early-stopping` ends the run."""
        return self._patience is not None and self.since_best >= self._patience

    @property
    def why_stale(self) -> str:
        """Return the reason of an early end, for the user."""
        loss, step = self.best or (math.nan, 0)
        count = f"{self.since_best} evaluations" if self.since_best > 1 else "1 evaluation"
        return f"stopped early: no eval loss below {loss:.4f}, of step {step:,}, in {count}"

    def read(self, step: int, trainable: Params, frozen: Params, last_batch: Batch | None) -> dict[str, float]:
        """Return `eval_loss`, the mean per held-out target token, or `eval_reward`, further metrics, and expert load.

        Args:
            step: optimizer steps done.
            trainable, frozen: parameter trees of `split_model`.
            last_batch: batch for the routers where nothing is held out.
        """
        values = {} if self._batches is None else self._held_out(self._batches, trainable, frozen)
        if "eval_loss" in values:
            self._count(values["eval_loss"], step)
        if self._rollouts is not None:
            values |= self._rollouts.evaluate()
        if self._probe is not None:
            batch = last_batch if self._batches is None else next(iter(self._batches))
            values |= self._probe.read(trainable, frozen, place_batch(batch, self._mesh))
        return values

    def _held_out(self, batches: EvalBatches, trainable: Params, frozen: Params) -> dict[str, float]:
        if self._objective.reads:
            return evaluate_reads(self._parts, trainable, frozen, batches)
        placed = (place_batch(batch, self._mesh) for batch in batches)
        if not self._objective.supervised:
            losses = [self._executor.loss(trainable, frozen, batch) for batch in placed]
            means: Any = np.sum(jax.device_get(losses), 0) / batches.targets
            metrics = {f"eval_{name}": float(value) for name, value in self._objective.metrics(means).items()}
            return {"eval_loss": float(self._objective.loss(means))} | metrics
        if self._compute_metrics is not None:
            return self._with_metrics(self._compute_metrics, batches, trainable, frozen)
        count = len(self._sources)
        found = [self._executor.evaluate(trainable, frozen, batch, count) for batch in placed]
        sums = np.sum(jax.device_get(found), 0, dtype=np.float64)
        loss = float(sums[0].sum() / batches.targets)
        return {"eval_loss": loss} | held_out_metrics(loss, sums, self._sources)

    def _with_metrics(
        self, compute: Metrics, batches: EvalBatches, trainable: Params, frozen: Params
    ) -> dict[str, float]:
        """Return the values of `_held_out` from single tokens, and the caller's of these."""
        count, sums, parts = len(self._sources), np.zeros((3, len(self._sources))), []
        for batch in batches:
            scores = self._executor.token_scores(trainable, frozen, place_batch(batch, self._mesh))
            losses, best = (np.asarray(each) for each in scores)
            weights, hits = np.asarray(batch.loss_weights), best == batch.targets
            owners = np.zeros_like(best) if batch.sources is None else np.asarray(batch.sources)
            for values, total in zip((weights * losses, weights * hits, weights), sums, strict=True):
                total += np.bincount(owners.ravel(), values.ravel().astype(np.float64), minlength=count)
            parts.append(_predictions(batch, losses, best))
        found = compute(_joined(parts))
        loss = float(sums[0].sum() / batches.targets)
        values = {"eval_loss": loss} | held_out_metrics(loss, sums, self._sources)
        return values | named_metrics(found, values)

    def _count(self, loss: float, step: int) -> None:
        self.since_best += 1
        if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
            self.best, self.since_best = (loss, step), 0

    def get_state(self) -> BestState:
        """Return a JSON-able state."""
        return {"best_eval": self.best, "since_best": self.since_best}

    def set_state(self, state: BestState) -> None:
        """Continue from `get_state`."""
        best = state["best_eval"]
        self.best, self.since_best = best and (best[0], best[1]), state.get("since_best", 0)


def _predictions(batch: Batch, losses: np.ndarray, best: np.ndarray) -> Predictions:
    """Return the targets of a batch that are trained on, row after row; documents count from 0."""
    counted = np.asarray(batch.loss_weights) > 0
    ids = np.asarray(batch.segments.segment_ids, np.int64)
    firsts = np.cumsum([0, *ids.max(axis=1)[:-1]])[:, None]
    return Predictions(
        targets=np.asarray(batch.targets)[counted],
        predicted=best[counted],
        log_probs=-losses[counted],
        documents=(ids - 1 + firsts)[counted],
        columns={name: np.asarray(values)[counted] for name, values in batch.columns.items()},
    )


def named_metrics(found: Any, values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that `compute_metrics` returned by their names in metrics.

    Raises:
        ValueError: anything but numbers by name, or a name of `values`.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"compute_metrics returned {found!r:.100}: expected a dictionary of numbers by name")
    metrics: dict[str, float] = {}
    for key, value in found.items():
        name = f"eval_{key.removeprefix('eval_')}" if isinstance(key, str) else ""
        number = value.item() if getattr(value, "shape", None) == () else value  # of numpy or JAX
        if not name or not isinstance(number, int | float):
            raise ValueError(f"compute_metrics returned {key!r:.100}: {value!r:.100}: expected a number by name")
        if name in values or name in metrics:
            raise ValueError(
                f"compute_metrics: the name {key!r:.100} is taken: {name} is recorded already, use another"
            )
        metrics[name] = float(number)
    return metrics


def _joined(parts: Sequence[Predictions]) -> Predictions:
    """Return the predictions of all batches, whose documents are numbered on."""
    names = ("targets", "predicted", "log_probs")
    counts = [int(part.documents.max(initial=-1)) + 1 for part in parts]
    firsts = np.cumsum([0, *counts[:-1]])
    return Predictions(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
        documents=np.concatenate([part.documents + first for part, first in zip(parts, firsts, strict=True)]),
        columns={name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
    )


def held_out_metrics(loss: float, sums: Float[np.ndarray, "3 sources"], names: Sequence[str]) -> dict[str, float]:
    """Return perplexity, accuracy and, of several sources, each one's loss.

    Args:
        loss: mean over all target tokens, nats.
        sums: Σ weight · loss, Σ weight · hit and Σ weight of each source.
        names: of the sources.
    """
    losses, hits, weights = sums
    values = {"eval_perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf}
    values["eval_token_accuracy"] = float(hits.sum() / weights.sum())
    if len(names) > 1:
        means = zip(names, losses, weights, strict=True)
        values |= {f"eval_loss/{name}": float(total / weight) for name, total, weight in means if weight}
    return values


def evaluation_lines(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the console's lines of an evaluation: all sources together, then each; none of expert load alone."""
    if "eval_reward" in values:
        yield f"eval reward {values['eval_reward']:.4g}, length {values['eval_completions/mean_length']:.4g}"
    if "eval_loss" not in values:
        return
    shown = [f"eval loss {values['eval_loss']:.4f}"]
    if "eval_token_accuracy" in values:
        perplexity, accuracy = values["eval_perplexity"], values["eval_token_accuracy"]
        shown.append(f"perplexity {perplexity:.4g}, token accuracy {accuracy:.1%}")
    shown += [f"{name} {values[f'eval_{key}']:.3g}" for key, name in SHOWN.items() if f"eval_{key}" in values]
    yield ", ".join(shown)
    for name, loss in values.items():
        if name.startswith("eval_loss/"):
            yield f"  {name.removeprefix('eval_loss/')}: {loss:.4f}"


@dataclass(frozen=True, kw_only=True)
class _ObservingContext(PackedContext):
    """Context of packed rows that records routing statistics."""

    statistics: dict[str, Array] = field(default_factory=dict)

    def observe_routing(self, routing: Routing) -> None:
        """Record the statistics of the tokens that are not padding."""
        self.statistics.update(routing_statistics(routing, self.token_mask))


class ExpertLoadProbe:
    """Forward pass over a batch, layer by layer, that measures how evenly the routers load the experts.

    Args:
        graphdefs: the model's modules, from `split_model`.
        config: the model's architecture.
        dtype: of activations and matmuls.
        attention: the attention backend.
        layout: placement of the parameters on the mesh.
    """

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        *,
        dtype=jnp.bfloat16,
        attention="auto",
        layout: Layout = SINGLE_DEVICE,
    ):
        self._embed_head = EmbedHead(graphdefs, config, dtype=dtype, attention=attention, layout=layout)
        types = {graph: jax.jit(partial(_run, graph, layout)) for graph in graphdefs.layers}
        self._layers = [types[graph] for graph in graphdefs.layers]

    def read(self, trainable: Params, frozen: Params, batch: Batch) -> dict[str, float]:
        """Measure a batch over all layers with experts.

        Returns:
            expert_load_max: the largest share of assignments of one expert, times E: 1 when even, E at worst.
            expert_load_entropy: entropy of the shares over log E, averaged over layers: 1 when even, 0 at worst.
        """
        x, contexts = self._embed_head.embed(trainable, frozen, batch, None)
        observed = []
        for i, layer in enumerate(self._layers):
            x, statistics = layer(trainable["layers"][i], transfer.to_device(frozen["layers"][i]), x, contexts[i])
            observed += [statistics] if statistics else []
        observed = jax.device_get(observed)
        return {
            "expert_load_max": max(float(layer["load_max"]) for layer in observed),
            "expert_load_entropy": sum(float(layer["load_entropy"]) for layer in observed) / len(observed),
        }


def _run(graph, layout: Layout, trainable: Params, frozen: Params, x, packed: PackedContext):
    stored = layout.param_specs((trainable, frozen))

    def program(weights, x, packed):
        trainable, frozen = gather(layout, weights, stored)
        return _apply(graph, trainable, frozen, x, packed)

    specs = (stored, layout.batch_spec, layout.context_specs(packed))
    return per_device(program, layout.mesh, specs, (layout.batch_spec, PartitionSpec()))((trainable, frozen), x, packed)


def _apply(graph, trainable: Params, frozen: Params, x, packed: PackedContext):
    context = _ObservingContext(**vars(packed))
    return merge_module(graph, trainable, frozen)(x, context), context.statistics


class Samples:
    """Answers the sample prompts of a run, on the console and in `samples.jsonl`."""

    def __init__(self, run: Run, graphdefs: ModelGraphDefs, folder: Path | None, console: Console):
        """Make the engine that answers.

        Args:
            run, graphdefs: the run and its model.
            folder: of `samples.jsonl`; None on processes that write nothing.
            console: where to print.
        """
        self._tokenizer, self._console, self._path = run.tokenizer, console, folder and folder / "samples.jsonl"
        self._prompts, self._images, self._rules = run.samples.prompts, run.samples.images, run.data.images
        self._stops = run.stops
        self._engine = Engine(graphdefs, run.model, dtype=run.dtype, attention=run.workload.attention)
        self._sampling = SamplingConfig(max_tokens=run.samples.tokens, temperature=0.0)

    def answer(
        self, when: str, step: int, trainable: Params, frozen: Params, fp8_layers: Sequence[bool] | None = None
    ) -> None:
        """Answer every prompt greedily, by FP8 products in the layers that train with them."""
        if not self._prompts:
            return
        if fp8_layers is not None:
            self._engine.multiply_in_fp8(fp8_layers)
        lines, asked = [], self._asked(trainable, frozen)
        requests = [Request(prompt.tokens, self._sampling, images=prompt.images) for _, prompt in asked]
        found = self._engine.generate(trainable, frozen, requests, self._stops, slots=_AT_ONCE)
        answers = ((completion.number, without(completion.tokens, self._stops)) for completion in found)
        for (prompt, _), answer, shown in zip(asked, in_order(self._tokenizer, answers), self._thumbnails, strict=True):
            self._console.print(f"{when} training: {prompt} → {answer}")
            lines.append({"step": step, "prompt": prompt, "answer": answer} | ({"image": shown} if shown else {}))
        if self._path:
            _append(self._path, step, lines)

    @cached_property
    def _thumbnails(self) -> list[str]:
        """Return the image of each prompt for the run's page; empty for none."""
        shown = [thumbnail(image.read()) for image in self._images] or [""]
        return [each for each in shown for _ in self._prompts]

    def _asked(self, trainable: Params, frozen: Params) -> list[tuple[str, Prompt]]:
        """Return each prompt with its tokens, of images by the present tower: each image is shown with each prompt."""
        if not self._images:
            return [(text, Prompt(tokens)) for text, tokens in self._prompts.items()]
        assert self._rules is not None
        sight = Sight(self._rules, self._engine, trainable, frozen, {})
        asked = []
        for image in self._images:
            for text in self._prompts:
                chat = Chat(
                    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}], None, []
                )
                template, rendered = render_messages(self._tokenizer, chat)
                prompt = sight.encode(template, rendered, [image])
                asked.append((f"{Path(image.path).name or 'image'}: {text}", prompt))
        return asked


def _append(path: Path, step: int, lines: list[dict]) -> None:
    """Write the lines of a step after those of earlier ones; a resumed run may write them again."""
    before = read_steps(path)
    lines = [*(line for line in before.intact if line["step"] < step), *lines]
    rewrite_lines(path, lines, before.damaged, ensure_ascii=False)
