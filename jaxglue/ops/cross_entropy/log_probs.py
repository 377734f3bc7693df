"""Log-probabilities of target tokens chunk by chunk, with a gradient for each token."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops.cross_entropy.chunks import ChunkSpec, extend, split_chunks, times_transposed
from jaxglue.ops.cross_entropy.reference import token_losses


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_log_probs(
    spec: ChunkSpec,
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    counted: Float[Array, " M"],
    columns: Float[Array, "V R"] | None = None,
) -> Float[Array, " M"]:
    """See `linear_log_probs`."""
    return _scan(spec, x, weight, targets, counted, columns, x_needs_grad=False)[0]


def _scan(spec: ChunkSpec, x, weight, targets, counted, columns, *, x_needs_grad: bool) -> tuple[Array, Array | None]:
    """Return (log-probabilities, each token's gradient of its own log-probability to x, None if not needed)."""
    w = extend(weight, columns, x.dtype)

    def step(_, inputs):
        x_chunk, target, count = inputs
        if not x_needs_grad:
            return None, (-count * token_losses(spec.capped_logits(x_chunk, w), target)[0], None)
        losses, dx = spec.loss_and_input_gradient(x_chunk, w, target, count)
        return None, (-losses, -dx)

    _, (log_probs, dx) = lax.scan(step, None, split_chunks(spec.chunk, x, targets, counted))
    return log_probs.ravel()[: len(x)], None if dx is None else dx.reshape(-1, x.shape[1])[: len(x)]


def _weight_gradient(spec: ChunkSpec, x, w, targets, factors, part: slice) -> Float[Array, "V part"]:
    """Return Σ factors · d log-probability / d some columns of w, from logits computed again."""

    def step(total, inputs):
        x_chunk, target, factor = inputs
        _, dlogits = spec.cross_entropy(times_transposed(x_chunk, w), target, -factor, x.dtype)
        return total + lax.dot_general(
            dlogits, x_chunk[:, part], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ), None

    zeros = jnp.zeros(w[:, part].shape, jnp.float32)
    return lax.scan(step, zeros, split_chunks(spec.chunk, x, targets, factors))[0][: spec.vocab_size]


def chunked_log_sum_squares(spec: ChunkSpec, x, weight, counted) -> Float[Array, " M"]:
    """See `log_sum_squares`."""

    def of_logits(logits):
        return jax.nn.logsumexp(2 * logits, -1) - 2 * jax.nn.logsumexp(logits, -1)

    return _of_chunks(spec, of_logits, x, weight, counted)


def chunked_entropies(spec: ChunkSpec, x, weight, counted) -> Float[Array, " M"]:
    """See `linear_entropies`."""

    def of_logits(logits):
        total = jax.nn.logsumexp(logits, -1)
        return total - jnp.sum(jnp.exp(logits - total[:, None]) * logits, -1)

    return _of_chunks(spec, of_logits, x, weight, counted)


def _of_chunks(spec: ChunkSpec, of_logits, x, weight, counted) -> Float[Array, " M"]:
    """Return counted · a value of each token's logits, without a gradient."""
    w = extend(weight, None, x.dtype)

    def step(_, inputs):
        x_chunk, count = inputs
        return None, count * of_logits(spec.capped_logits(x_chunk, w))

    return lax.scan(step, None, split_chunks(spec.chunk, lax.stop_gradient(x), counted))[1].ravel()[: len(x)]


def _forward(spec, x, weight, targets, counted, columns):
    further = None if columns is None else columns.value
    arguments = x.value, weight.value, targets.value, counted.value, further
    log_probs, dx = _scan(spec, *arguments, x_needs_grad=x.perturbed)
    needs = weight.perturbed, columns is not None and columns.perturbed
    return log_probs, (dx, *(arguments if needed else None for needed in needs))


def _backward(spec, residuals, factors):
    dx, *trained = residuals
    if isinstance(factors, SymbolicZero):
        return None, None, None, None, None
    dx = None if dx is None else (dx * factors[:, None]).astype(dx.dtype)

    def gradient(arguments, *, of_columns: bool) -> Array | None:
        if arguments is None:
            return None
        x, weight, targets, counted, columns = arguments
        D, w = weight.shape[1], extend(weight, columns, x.dtype)
        part, primal = (slice(D, None), columns) if of_columns else (slice(D), weight)
        return _weight_gradient(spec, x, w, targets, factors * counted, part).astype(primal.dtype)

    dweight, dcolumns = (gradient(arguments, of_columns=i == 1) for i, arguments in enumerate(trained))
    return dx, dweight, None, None, dcolumns


chunked_log_probs.defvjp(_forward, _backward, symbolic_zeros=True)
