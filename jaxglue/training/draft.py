"""Training of a draft head for a model, in the model's steps or after them; the model's own weights see none of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import jit_step, products_of
from jaxglue.engine.executor import Executor
from jaxglue.engine.layer import add_trees
from jaxglue.engine.transfer import commit
from jaxglue.hf.draft import find_draft, load_draft, published_tensors
from jaxglue.hf.eagle import open_eagle
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import packed_context
from jaxglue.models.draft import DraftHead, build_draft, parameter_name
from jaxglue.models.linear import Linear
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.moe_layers import ExpertLinear
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.ops.cross_entropy import cap_logits, linear_divergences
from jaxglue.ops.projection import project
from jaxglue.planner.workload import Workload
from jaxglue.training.config import TrainConfig
from jaxglue.training.optimizer import make_optimizer
from jaxglue.training.run import DraftPlan, Setup

_CHUNK = 256
"""Tokens whose distributions are compared at a time."""
_RATES = {"lora": 2e-4, "full": 5e-5}
"""Learning rates of heads whose method is not the model's; of all weights that of vLLM's speculators."""
Parts = dict[str, tuple[Params, Params]]
"""Trainable and frozen parameters of the model's embedding, final norm and output projection."""


def plan_draft(config: TrainConfig, workload: Workload) -> DraftPlan | None:
    """Return the training of the folder's draft head, after reading its header; None for none.

    Raises:
        ValueError: there is none, or settings that it does not go with.
    """
    _check_drafts(config, workload)
    if config.model.train_draft == "off":
        return None
    objective, flag = config.objective.objective, f"--train-draft {config.model.train_draft}"
    if not workload.objective.supervised:
        raise ValueError(f"{flag} is for --objective sft, not {objective}: train the head on texts afterwards")
    if workload.mesh.devices > 1:
        raise ValueError(f"{flag} runs on one GPU, and --mesh {workload.mesh} names {workload.mesh.devices}")
    if config.data.streaming and config.model.train_draft == "after":
        raise ValueError(f"{flag} reads the data again, and streams pass once: use --train-draft with")
    find_draft(config.model.folder, workload.config)
    method = config.model.draft_method or config.model.method
    lora = LoraConfig(rank=config.lora.rank, alpha=config.lora.alpha, rslora=config.lora.rslora)
    rate = config.model.draft_learning_rate
    if rate is None and method == config.model.method:
        rate = config.optimizer.learning_rate
    elif rate is None:
        rate = _RATES[method] * config.optimizer.kind.rate_factor
    return DraftPlan(
        when=config.model.train_draft,
        lora=lora if method == "lora" else None,
        optimizer=replace(config.optimizer, learning_rate=rate),
    )


def _check_drafts(config: TrainConfig, workload: Workload) -> None:
    """Raise ValueError for answers that are to be drafted on several devices, or by a head that is not there."""
    if not workload.objective.needs_rollouts:
        return
    drafts, own = config.rollouts.drafts, config.rollouts.draft_model
    if own is not None:
        open_eagle(own, config.model.folder, workload.config)
    if drafts in ("off", "auto"):
        return
    if workload.mesh.devices > 1:
        raise ValueError(f"--drafts {drafts} runs on one GPU, and --mesh {workload.mesh} names {workload.mesh.devices}")
    if own is None:
        find_draft(config.model.folder, workload.config)


class Acceptance(NamedTuple):
    """Shares of first drafts that are accepted."""

    sampled: float
    """At temperature 1."""
    greedy: float


class DraftSteps:
    """A draft head and its training: gradients of the model's micro-batches, and an update for each step.

    Args:
        run: whose folder has the head.
        graphdefs: of the model.
    """

    def __init__(self, run: Setup, graphdefs: ModelGraphDefs):
        assert run.draft is not None
        self._run, self._model, self._lora = run, graphdefs, run.draft.lora
        self._names = {"embed_tokens": graphdefs.embed_tokens, "norm": graphdefs.norm}
        self._names[graphdefs.output_name] = graphdefs.output
        head = load_draft(run.base.folder, run.model, dtype=run.dtype if self._lora else jnp.float32)
        if self._lora:
            add_adapters(head, self._lora, seed=run.base.seed)
        self._graphdef, *states = nnx.split(head, nnx.LoRAParam if self._lora else nnx.Param, ...)
        trainable, frozen = map(nnx.to_pure_dict, states)
        self._frozen = commit(frozen)
        self._dtypes = weight_dtypes(run.model, run.dtype)
        self._optimizer = make_optimizer(run.draft.optimizer, run.schedule.total_steps)
        self._published = jax.tree.map(np.asarray, trainable)
        self._state, self._sums = dict[str, Any](), None
        with products_of(run.dtype):
            self._gradients = jit_step(self._loss_and_gradients, donate_argnames="sums")
            self._compare = jit_step(self._agreement)
        self._scaled = jit_step(_mean, donate_argnames="gradients")

    def first(self) -> Params:
        """Return the head as the folder has it, and the optimizer's state before the first step."""
        first = {"layers": [commit(jax.tree.map(jnp.asarray, self._published))]}
        return {"trainable": first, "optimizer": self._optimizer.init(first)}

    def begin(self, state: Params) -> None:
        """Take the head before a step."""
        self._state, self._sums = state, None

    def observe(self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch) -> None:
        """Add the gradients on a micro-batch, from the output of the model's last layer."""
        parts = self._parts(trainable, frozen)
        head = self._state["trainable"]["layers"][0]
        self._sums = self._gradients(head, self._frozen, parts, x, batch, self._sums)

    def finish(self, step: int) -> tuple[Params, dict[str, Array]]:
        """Return the head after a step, `step` of which were before, and the mean loss of a draft."""
        assert self._sums is not None
        (loss, count), gradients = self._sums
        self._sums = None
        gradients = self._scaled(gradients, count)
        trainable, optimizer, _ = self._optimizer.update(
            self._state["trainable"], self._state["optimizer"], {"layers": [gradients]}, step
        )
        self._state = {"trainable": trainable, "optimizer": optimizer}
        return self._state, {"draft_loss": loss / jnp.maximum(count, 1.0)}

    def train(
        self, executor: Executor, trainable: Params, frozen: Params, steps: Iterable[Sequence[Batch]]
    ) -> Iterator[tuple[Params, Array]]:
        """Train the folder's head alone, on a model that no longer changes; yield it and each step's mean loss.

        Args:
            executor, trainable, frozen: of the model.
            steps: micro-batches of each step, on the devices.
        """
        self.begin(self.first())
        for step, micro_batches in enumerate(steps):
            for batch in micro_batches:
                self.observe(trainable, frozen, executor.last_output(trainable, frozen, batch), batch)
            state, values = self.finish(step)
            yield state, values["draft_loss"]

    def acceptance(
        self, executor: Executor, trainable: Params, frozen: Params, batches: Iterable[Batch], state: Params
    ) -> "Acceptance":
        """Return the shares of drafts that a server would accept on texts, of tokens that count for the loss.

        Args:
            executor, trainable, frozen: of the model.
            batches: on the devices.
            state: the head's.
        """
        head = state["trainable"]["layers"][0]
        sums = np.zeros(3)
        for batch in batches:
            x = executor.last_output(trainable, frozen, batch)
            parts = self._parts(trainable, frozen)
            sums += np.asarray(self._compare(head, self._frozen, parts, x, batch), np.float64)
        count = max(sums[2], 1.0)
        return Acceptance(float(sums[0] / count), float(sums[1] / count))

    def tensors(self, state: Params) -> dict[str, np.ndarray]:
        """Return the head's tensors, adapters merged, under the names of the base's files."""
        head = self._merge(state["trainable"]["layers"][0], self._frozen)
        merged = {name: np.asarray(value, np.float32) for name, value in merged_parameters(head).items()}
        return published_tensors(self._run.base.folder, self._run.model, merged)

    def _parts(self, trainable: Params, frozen: Params) -> Parts:
        return {name: (trainable[name], frozen[name]) for name in self._names}

    def _merge(self, trainable: Params, frozen: Params) -> DraftHead:
        return merge_module(self._graphdef, trainable, frozen)

    def _loss_and_gradients(self, head, frozen, parts: Parts, x, batch: Batch, sums):
        differentiate = jax.value_and_grad(self._loss, has_aux=True)
        (loss, count), gradients = differentiate(head, frozen, parts, x, batch)
        found = (loss, count), gradients
        return found if sums is None else (tuple(map(jnp.add, sums[0], found[0])), add_trees(sums[1], gradients))

    def _loss(self, head, frozen, parts: Parts, x, batch: Batch) -> tuple[Array, Array]:
        """Return Σ weight · divergence of the head's distributions from the model's for the same tokens, and Σ weight.

        A draft is accepted where it is the model's choice: the model's distribution says more of that than the data's
        token does.
        """
        drafts, drafted, output, hidden = self._draft(head, frozen, parts, x, batch)
        weights, matrix = drafted.loss_weights.reshape(-1), extended_matrix(output)
        own, model = (with_low_rank(output, states) for states in (drafts, _following(hidden)))
        counted, cap = (weights > 0).astype(jnp.float32), self._softcap
        each = linear_divergences(own, matrix, model, matrix, counted, beta=0.0, softcap=cap, teacher_softcap=cap)
        return (each * weights).sum(), weights.sum()

    def _draft(self, head, frozen, parts: Parts, x, batch: Batch):
        """Return the head's states [B·T, D], the batch of what they predict, the output module, and the model's."""
        embed, norm, output = (
            merge_module(self._names[name], *parts[name]) for name in ("embed_tokens", "norm", self._model.output_name)
        )
        if self._lora is None:
            head = jax.tree.map(lambda value, dtype: value.astype(dtype), head, self._dtypes)
        drafted, hidden = drafted_batch(batch), norm(x)
        module = self._merge(head, frozen)
        context = packed_context(self._run.model, drafted.segments)

        # The layer's values are computed again in the backward pass: the planner knows of none that are kept.
        @jax.checkpoint
        def run(embedded, hidden):
            return module(embedded, hidden, context)

        drafts = run(embed(drafted.tokens, self._run.dtype), hidden)
        return drafts.reshape(-1, drafts.shape[-1]), drafted, output, hidden

    def _agreement(self, head, frozen, parts: Parts, x, batch: Batch) -> Float[Array, " 3"]:
        """Return Σ over drafts that count of Σ min(p, q), and of equal largest logits, and their number."""
        drafts, drafted, output, hidden = self._draft(head, frozen, parts, x, batch)
        rows = drafts, _following(hidden)
        counted, matrix = drafted.loss_weights.reshape(-1) > 0, extended_matrix(output)
        size = len(counted)
        padded = [jnp.pad(y, ((0, -size % _CHUNK), *((0, 0),) * (y.ndim - 1))) for y in (*rows, counted)]

        def compare(chunk) -> Array:
            q, p = (
                cap_logits(project(with_low_rank(output, y), matrix, jnp.float32), self._softcap) for y in chunk[:2]
            )
            shared = jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)).sum(-1)
            values = shared, p.argmax(-1) == q.argmax(-1), jnp.ones_like(shared)
            return jnp.stack([jnp.where(chunk[2], value, 0.0).sum() for value in values])

        chunks = tuple(y.reshape(-1, _CHUNK, *y.shape[1:]) for y in padded)
        return jax.lax.map(compare, chunks).sum(0)

    @property
    def _softcap(self) -> float | None:
        return self._run.model.scales.logit_softcap


def _following(hidden: Float[Array, "B T D"]) -> Float[Array, "B*T D"]:
    """Return the model's state of the next token for each."""
    return jnp.roll(hidden, -1, axis=1).reshape(-1, hidden.shape[2])


def drafted_batch(batch: Batch) -> Batch:
    """Return, for each token, the next one, and the token after that as its target; weights end with each document."""
    segments = batch.segments.segment_ids
    last = jnp.arange(segments.shape[1]) == segments.shape[1] - 1
    follows = (segments > 0) & (jnp.roll(segments, -1, axis=1) == segments) & ~last
    tokens, targets, weights = (
        jnp.where(follows, jnp.roll(values, -1, axis=1), 0)
        for values in (batch.tokens, batch.targets, batch.loss_weights)
    )
    return replace(batch, tokens=tokens, targets=targets, loss_weights=weights)


def add_adapters(head: DraftHead, lora: LoraConfig, *, seed: int) -> None:
    """Add an adapter to every linear layer of a head, experts among them, in place."""
    rngs, scale = nnx.Rngs(seed), lora.scale_of("draft")
    for path, module in nnx.iter_modules(head):
        if isinstance(module, Linear | ExpertLinear):
            module.add_lora(rank=lora.rank, scale=scale, dropout=0.0, name=str(path[-1]), rngs=rngs)


def merged_parameters(head: DraftHead) -> dict[str, Array]:
    """Return a head's parameters by name, each weight with the product of its adapter."""
    values = {parameter_name(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(head))}
    for path, module in nnx.iter_modules(head):
        if isinstance(module, Linear | ExpertLinear) and module.lora_A is not None and module.lora_B is not None:
            name = parameter_name((*path, "weight"))
            product = jnp.matmul(module.lora_B[...], module.lora_A[...], precision="highest")
            values[name] = values[name].astype(jnp.float32) + module.lora_scale * product
    return {name: value for name, value in values.items() if ".lora_" not in name}


def weight_dtypes(config: DecoderConfig, dtype: Any) -> Params:
    """Return the dtypes of a head's weights in a model of this dtype, in which some are float32."""
    head = nnx.eval_shape(lambda: build_draft(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(jax.tree.map(lambda value: value.dtype, nnx.state(head, nnx.Param)))


def _mean(gradients: Params, count: Array) -> Params:
    return jax.tree.map(lambda gradient: gradient / jnp.maximum(count, 1.0), gradients)
