"""Training of a draft head of EAGLE-3's kind for a model that does not change: `jaxglue draft`."""

from collections.abc import Callable, Iterable, Sequence
from itertools import batched, chain, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import jit_step, products_of
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.drafts import words_of
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.draft import frequent_tokens
from jaxglue.hf.eagle import new_shape, write_eagle
from jaxglue.models import config_from_hf
from jaxglue.models.draft import parameter_name
from jaxglue.models.eagle import EagleHead, EagleShape
from jaxglue.models.parameters import Params, merge_module
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.ops.cross_entropy import cap_logits, linear_divergences
from jaxglue.ops.projection import project
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.draft import drafted_batch
from jaxglue.training.draft_config import DraftConfig
from jaxglue.training.draft_run import DraftRun, is_written, remove_run
from jaxglue.training.draft_steps import draft_states
from jaxglue.training.draft_texts import draft_texts, given_texts, pack_texts, packed_rows
from jaxglue.training.optimizer import OptimizerConfig, make_optimizer
from jaxglue.training.result import abstract_state

_DECAY = 0.8
"""Weight of each further draft's loss, in that of the one before, as of EAGLE-3's authors."""
_CHUNK = 256
"""Tokens whose distributions are compared at a time."""
_LOG = 10
"""Steps between lines."""


class DraftResult(NamedTuple):
    """Shares of accepted first, second, … drafts behind held-out texts, of those whose predecessors are the text's."""

    sampled: list[float]
    """At temperature 1."""
    greedy: list[float]
    losses: list[float]
    """Mean divergence of each step's first drafts."""

    @property
    def tokens(self) -> float:
        """Return the tokens of a step of greedy decoding that verifies all drafts."""
        return 1 + float(np.cumprod(self.greedy).sum())


def train_head(config: DraftConfig, say: Callable[[str], None]) -> DraftResult | None:
    """Train a head on a model's answers, and write its folder; None for a run that goes on whose head was written.

    Args:
        config: of the command.
        say: receives lines about the progress.

    Raises:
        ValueError: a model that no head is for here, bad folders or data, or another run than the one that goes on.
        OSError: a checkpoint could not be written.
    """
    if is_written(config):
        remove_run(config.output)
        return None
    folder = config.folder
    raw = read_config(folder)
    model = config_from_hf(raw)
    shape = new_shape(raw, model)  # before weights load
    if config.seq_len > model.max_position_embeddings:
        raise ValueError(
            f"--seq-len {config.seq_len:,} is above the model's limit of {model.max_position_embeddings:,}: lower it"
        )
    assistant = Assistant(config)
    rows = list(given_texts(config, assistant))
    with DraftRun(config, [text for _, text in rows]) as run:
        texts, held_out = draft_texts(config, assistant, rows, run.answers)
        counted = np.concatenate([text.tokens[text.counted] for text in texts])
        words = frequent_tokens(np.bincount(counted, minlength=model.vocab_size)) or list(range(model.vocab_size))
        say(f"{len(texts):,} texts with {len(counted):,} tokens of answers; drafts among {len(words):,} tokens")
        seeds = ([config.sampling.seed, epoch] for epoch in range(config.epochs))
        plans = [pack_texts(texts, config.seq_len, np.random.default_rng(seed)) for seed in seeds]
        count = sum(-(-plan.rows // config.batch_size) for plan in plans)
        training = EagleTraining(assistant, shape, words, config, count)
        losses = training.resume(run.checkpoints)
        if losses:
            say(f"resumed from step {len(losses)}")
        steps = chain.from_iterable(batched(packed_rows(texts, plan), config.batch_size) for plan in plans)
        for step in islice(steps, len(losses), None):
            losses.append(training.step(step)[0])
            if len(losses) % config.save_every == 0 or len(losses) == count:
                run.checkpoints.save(len(losses), training.saved, {"losses": losses})
            if len(losses) % _LOG == 0 or len(losses) == count:
                say(f"step {len(losses)} of {count}: draft_loss {losses[-1]:.4f}")
        held_rows = packed_rows(held_out, pack_texts(held_out, config.seq_len))
        result = training.acceptance(held_rows)._replace(losses=losses)
    named = str(folder if config.model is None else config.model)
    write_eagle(config.output, folder, shape, *training.weights(), words, drafts=config.drafts, name=named)
    remove_run(config.output)
    return result


class EagleTraining:
    """A head, its projection to tokens and their optimizer; the model has the assistant's weights."""

    def __init__(self, assistant: Assistant, shape: EagleShape, words: list[int], config: DraftConfig, steps: int):
        self._shape, self._drafts, self._dtype = shape, config.drafts, assistant.dtype
        self._model, self._softcap = assistant.graphdefs, assistant.config.scales.logit_softcap
        self._trees = assistant.adapter, assistant.frozen
        self._executor = Executor(self._model, assistant.config, policy=PRESETS["full"], dtype=self._dtype)
        known = np.zeros(assistant.config.vocab_size, np.float32)
        known[words] = 1
        self._known = jnp.asarray(known)
        self._words = words_of(self._model, self._trees, words)
        head = EagleHead(shape, dtype=jnp.float32, rngs=nnx.Rngs(config.sampling.seed))
        self._graphdef, state = nnx.split(head)
        matrix = jnp.array(self._words["matrix"][:, : shape.layer.hidden_size], jnp.float32)  # a copy
        self._parameters: Params = {"layers": [{"head": nnx.to_pure_dict(state), "matrix": matrix}]}
        optimizer = OptimizerConfig(optimizer="adamw", learning_rate=config.learning_rate)
        self._optimizer, self._done = make_optimizer(optimizer, steps), 0
        self._state = self._optimizer.init(self._parameters)
        with products_of(self._dtype):
            self._gradients = jit_step(self._loss_and_gradients, donate_argnames="sums")
            self._compare = jit_step(self._agreement)

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Update the head by rows; return the mean divergence of first drafts, and the loss of all."""
        sums: Any = None
        for batch in batches:
            read, x = self._states(batch)
            sums = self._gradients(self._parameters["layers"][0], self._parts, self._words, read, x, batch, sums)
        (total, first, count), gradients = sums
        mean = jax.tree.map(lambda gradient: gradient / jnp.maximum(count, 1.0), gradients)
        self._parameters, self._state, _ = self._optimizer.update(
            self._parameters, self._state, {"layers": [mean]}, self._done
        )
        self._done += 1
        count = max(float(count), 1.0)
        return float(first) / count, float(total) / count

    @property
    def saved(self) -> dict[str, Params]:
        """Return what a checkpoint holds."""
        return {"parameters": self._parameters, "optimizer": self._state}

    def resume(self, checkpoints: Checkpoints) -> list[float]:
        """Continue from the last checkpoint; return the losses of the steps before it, none without one."""
        restored = checkpoints.restore_latest(abstract_state(self.saved))
        if restored is None:
            return []
        self._parameters, self._state = restored.state["parameters"], restored.state["optimizer"]
        self._done = restored.step
        return restored.host["losses"]

    def acceptance(self, batches: Iterable[Batch]) -> DraftResult:
        """Return the shares of drafts that a server would accept in rows of texts."""
        sums = np.zeros((self._drafts, 3))
        for batch in batches:
            read, x = self._states(batch)
            found = self._compare(self._parameters["layers"][0], self._parts, self._words, read, x, batch)
            sums += np.asarray(found, np.float64)
        shares = sums[:, :2] / np.maximum(sums[:, 2:], 1)
        return DraftResult(shares[:, 0].tolist(), shares[:, 1].tolist(), [])

    def weights(self) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "W D"]]:
        """Return the head's parameters by name, and its projection, in the model's dtype."""
        own = self._parameters["layers"][0]
        state = nnx.state(merge_module(self._graphdef, own["head"]))
        named = {parameter_name(path): value[...] for path, value in nnx.to_flat_state(state)}
        rounded = {name: np.asarray(value.astype(self._dtype)) for name, value in named.items()}
        return rounded, np.asarray(own["matrix"].astype(self._dtype))

    @property
    def _parts(self) -> dict[str, tuple[Params, ...]]:
        names = "embed_tokens", "norm", self._model.output_name
        return {name: tuple(tree[name] for tree in self._trees) for name in names}

    def _states(self, batch: Batch) -> tuple[tuple[Array, ...], Array]:
        """Return the hidden states of the model that the head reads of a row, and the last layer's output."""
        read, x = list[Array](), None
        for index, x in enumerate(self._executor.hidden_states(*self._trees, batch)):
            read += [x] if index in self._shape.taps else []
        assert x is not None
        return tuple(read), x

    def _loss_and_gradients(self, own: Params, parts, words, read, x, batch: Batch, sums):
        (_, aux), gradients = jax.value_and_grad(self._loss, has_aux=True)(own, parts, words, read, x, batch)
        return (aux, gradients) if sums is None else jax.tree.map(jnp.add, sums, (aux, gradients))

    def _loss(self, own: Params, parts, words, read, x, batch: Batch) -> tuple[Array, tuple[Array, Array, Array]]:
        """Return Σ weight · divergence of drafts from the model's distributions among their tokens.

        Drafts count of tokens that are among theirs, and of the k-th by `_DECAY` to the k-th power.

        Returns:
            the sum, and beside it: itself, the first drafts' part and the sum of their weights.
        """
        output, hidden, drafts, matrix = self._run(own, parts, read, x, batch)
        losses, counts = list[Array](), list[Array]()
        for step, (states, drafted) in enumerate(drafts):
            weights = (drafted.loss_weights * self._known[drafted.targets]).reshape(-1)
            model = with_low_rank(output, _after(hidden, step + 1))
            counted = (weights > 0).astype(jnp.float32)
            each = linear_divergences(
                states, matrix, model, words["matrix"], counted, beta=0.0, teacher_softcap=self._softcap
            )
            losses.append((each * weights).sum() * _DECAY**step)
            counts.append(weights.sum())
        total = sum(losses[1:], start=losses[0])
        return total, (total, losses[0], counts[0])

    def _run(self, own: Params, parts, read, x, batch: Batch):
        """Return the output projection, the model's states, each draft's with what it predicts, and the matrix."""
        embed = merge_module(self._model.embed_tokens, *parts["embed_tokens"])
        norm = merge_module(self._model.norm, *parts["norm"])
        output = merge_module(self._model.output, *parts[self._model.output_name])
        rounded = jax.tree.map(lambda value: value.astype(self._dtype), own)
        head: EagleHead = merge_module(self._graphdef, rounded["head"])
        batches = [drafted_batch(batch)]
        while len(batches) < self._drafts:
            batches.append(drafted_batch(batches[-1]))
        embedded = [embed(drafted.tokens, self._dtype) for drafted in batches]
        states = draft_states(head, head.combine(read), embedded, self._shape.layer, batch.segments)
        flat = (each.reshape(-1, each.shape[-1]) for each in states)
        return output, norm(x), list(zip(flat, batches, strict=True)), rounded["matrix"]

    def _agreement(self, own: Params, parts, words, read, x, batch: Batch) -> Float[Array, "drafts 3"]:
        """Return for each draft Σ p(draft), the number of those that are likeliest, and the number of drafts."""
        output, hidden, drafts, matrix = self._run(own, parts, read, x, batch)
        vocabulary = extended_matrix(output)

        def compare(chunk) -> Float[Array, " 3"]:
            states, model, counted = chunk
            choice = words["tokens"][project(states, matrix, jnp.float32).argmax(-1)]
            logits = cap_logits(project(with_low_rank(output, model), vocabulary, jnp.float32), self._softcap)
            accepted = jnp.take_along_axis(jax.nn.softmax(logits), choice[:, None], axis=-1)[:, 0]
            values = accepted, choice == logits.argmax(-1), jnp.ones_like(accepted)
            return jnp.stack([jnp.where(counted, value, 0.0).sum() for value in values])

        sums = list[Array]()
        for step, (states, drafted) in enumerate(drafts):
            rows = states, _after(hidden, step + 1), drafted.loss_weights.reshape(-1) > 0
            size = min(len(states), _CHUNK)
            chunks = tuple(jnp.pad(y, ((0, -len(y) % size), *((0, 0),) * (y.ndim - 1))) for y in rows)
            sums.append(jax.lax.map(compare, tuple(y.reshape(-1, size, *y.shape[1:]) for y in chunks)).sum(0))
        return jnp.stack(sums)


def _after(hidden: Float[Array, "B T D"], count: int) -> Float[Array, "B*T D"]:
    """Return the model's state of the token so many after each."""
    return jnp.roll(hidden, -count, axis=1).reshape(-1, hidden.shape[2])
