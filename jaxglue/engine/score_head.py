"""Compiled programs that score targets for evaluation: final norm, projection, cross-entropy, likeliest tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import jit_step
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.models.parameters import Params
from jaxglue.models.vocabulary import extended_matrix
from jaxglue.ops.collectives import divide_equally, per_device
from jaxglue.ops.cross_entropy import linear_likely, linear_scores
from jaxglue.sharding.gather import gather, stack
from jaxglue.sharding.rules import Layout


class ScoreHead:
    """Compiled functions that score the targets of the last layer's output.

    Args:
        head: of the model.
        layout: of its arrays.
    """

    def __init__(self, head: EmbedHead, layout: Layout):
        self._head, self._layout = head, layout
        self._tokens_program = jit_step(self._tokens)
        self._likely_program = jit_step(self._likely, static_argnames="count")
        self._sums_program = jit_step(self._sums, static_argnames="sources")
        replicated = layout.sharding(PartitionSpec())
        self._total = jax.jit(lambda rows: rows.sum(0), out_shardings=replicated)

    def tokens(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch
    ) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
        """Return each target's cross-entropy, and the token with the largest logit in its place."""
        return self._tokens_program(self._head.parts(trainable), self._head.parts(frozen), x, batch.targets)

    def likely(
        self, trainable: Params, frozen: Params, x: Float[Array, "1 T D"], targets: Int[Array, "1 T"], count: int
    ) -> tuple[Float[Array, " T"], Int[Array, "T count"], Float[Array, "T count"]]:
        """Return log-probabilities of a row's targets, and the most likely tokens in their places with theirs."""
        return self._likely_program(self._head.parts(trainable), self._head.parts(frozen), x, targets, count=count)

    def sums(
        self, trainable: Params, frozen: Params, x: Float[Array, "B T D"], batch: Batch, sources: int
    ) -> Float[Array, "3 sources"]:
        """Return Σ weight · loss, Σ weight · hit and Σ weight over the targets of each source.

        Args:
            trainable, frozen: parameter trees of the model.
            x: the last layer's output.
            batch: with `sources`, or None for a single one.
            sources: their number.
        """
        rows = batch.targets, batch.loss_weights, batch.sources
        parts = self._head.parts(trainable), self._head.parts(frozen)
        sums = self._sums_program(*parts, x, rows, sources=sources)
        return self._total(sums) if self._layout.mesh else sums

    def _tokens(self, trainable: Params, frozen: Params, x, targets):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))

        def program(weights, x, targets):
            return self._local(gather(layout, weights, stored), x, targets)

        specs = (stored, layout.batch_spec, layout.batch_spec)
        return per_device(program, layout.mesh, specs, layout.batch_spec)((trainable, frozen), x, targets)

    def _sums(self, trainable: Params, frozen: Params, x, rows, *, sources: int):
        layout, stored = self._layout, self._layout.param_specs((trainable, frozen))

        def program(weights, x, rows):
            targets, loss_weights, owners = rows
            losses, best = self._local(gather(layout, weights, stored), x, targets)
            hits = best == targets
            values = jnp.stack([loss_weights * losses, loss_weights * hits, loss_weights]).reshape(3, -1)
            of_source = jnp.arange(sources)[:, None] == (0 if owners is None else owners.ravel())
            sums = jnp.sum(jnp.where(of_source, values[:, None], 0.0), axis=-1)
            return stack(layout, divide_equally(sums, "tensor"))

        specs = (stored, layout.batch_spec, layout.batch_spec)
        return per_device(program, layout.mesh, specs, layout.device_spec)((trainable, frozen), x, rows)

    def _likely(self, trainable: Params, frozen: Params, x, targets, *, count: int):
        hidden, output = self._head.normed_output(trainable, frozen, x)
        matrix, softcap = extended_matrix(output), self._head.config.scales.logit_softcap
        options: dict[str, Any] = {"softcap": softcap, "exact": self._head.exact}
        return linear_likely(hidden, matrix, targets.ravel(), count, **options)

    def _local(self, weights: Any, x, targets) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
        trainable, frozen = weights
        hidden, output = self._head.normed_output(trainable, frozen, x)
        matrix = extended_matrix(output)
        softcap = self._head.config.scales.logit_softcap
        losses, best = linear_scores(hidden, matrix, targets.ravel(), softcap=softcap, exact=self._head.exact)
        return losses.reshape(targets.shape), best.reshape(targets.shape)
