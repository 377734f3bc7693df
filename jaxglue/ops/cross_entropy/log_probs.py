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
        if not (x_needs_grad or spec.exact):
            return None, (-count * token_losses(spec.capped_logits(x_chunk, w), target)[0], None)
        losses, dx = spec.loss_and_input_gradient(x_chunk, w, target, count)
        return None, (-losses, -dx)

    _, (log_probs, dx) = lax.scan(step, None, split_chunks(spec.chunk, x, targets, counted))
    return log_probs.ravel()[: len(x)], None if dx is None else dx.reshape(-1, x.shape[1])[: len(x)]


def _weight_gradient(spec: ChunkSpec, x, w, of_logits, inputs, part: slice) -> Float[Array, "V part"]:
    """Return the gradient to some columns of w, from logits computed again.

    Args:
        spec: of the chunks.
        x: hidden states.
        w: the extended matrix.
        of_logits: (logits, *inputs) → the gradient to these, in x's dtype.
        inputs: of all tokens.
        part: the columns.
    """

    def step(total, inputs):
        x_chunk, *others = inputs
        dlogits = of_logits(times_transposed(x_chunk, w), *others)
        return total + lax.dot_general(
            dlogits, x_chunk[:, part], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ), None

    zeros = jnp.zeros(w[:, part].shape, jnp.float32)
    return lax.scan(step, zeros, split_chunks(spec.chunk, x, *inputs))[0][: spec.vocab_size]


def chunked_log_sum_squares(spec: ChunkSpec, x, weight, counted) -> Float[Array, " M"]:
    """See `log_sum_squares`."""

    def of_logits(logits):
        return jax.nn.logsumexp(2 * logits, -1) - 2 * jax.nn.logsumexp(logits, -1)

    return _of_chunks(spec, of_logits, x, weight, counted)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_entropies(spec: ChunkSpec, x, weight, counted) -> Float[Array, " M"]:
    """See `linear_entropies`."""
    return _of_chunks(spec, _entropies, x, weight, counted)


def _entropies(logits: Float[Array, "M V"]) -> Float[Array, " M"]:
    total = jax.nn.logsumexp(logits, -1)
    return total - jnp.sum(jnp.exp(logits - total[:, None]) * logits, -1)


def _entropies_and_gradient(spec: ChunkSpec, logits, factors, dtype) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
    """Return the entropies, and the gradient of Σ factors · entropy to the logits, in `dtype`."""
    entropies, pull = jax.vjp(lambda logits: _entropies(spec.cap(logits)), logits)
    return entropies, pull(factors)[0].astype(dtype)


def _entropies_forward(spec, x, weight, counted):
    arguments = x.value, weight.value, counted.value
    trained = arguments if weight.perturbed else None
    if not x.perturbed:
        return chunked_entropies(spec, *arguments), (None, trained)
    w = extend(weight.value, None, x.value.dtype)

    def step(_, inputs):
        x_chunk, count = inputs
        entropies, dlogits = _entropies_and_gradient(spec, times_transposed(x_chunk, w), count, x_chunk.dtype)
        return None, (count * entropies, dlogits @ w)

    _, (entropies, dx) = lax.scan(step, None, split_chunks(spec.chunk, x.value, counted.value))
    M, D = x.value.shape
    return entropies.ravel()[:M], (dx.reshape(-1, D)[:M], trained)


def _entropies_backward(spec, residuals, factors):
    dx, trained = residuals
    if isinstance(factors, SymbolicZero):
        return None, None, None
    dweight = None
    if trained is not None:
        x, weight, counted = trained

        def of_logits(logits, factor):
            return _entropies_and_gradient(spec, logits, factor, x.dtype)[1]

        inputs = of_logits, (factors * counted,), slice(None)
        dweight = _weight_gradient(spec, x, extend(weight, None, x.dtype), *inputs).astype(weight.dtype)
    return None if dx is None else (dx * factors[:, None]).astype(dx.dtype), dweight, None


chunked_entropies.defvjp(_entropies_forward, _entropies_backward, symbolic_zeros=True)


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

        def of_logits(logits, target, factor):
            return spec.cross_entropy(logits, target, -factor, x.dtype)[1]

        return _weight_gradient(spec, x, w, of_logits, (targets, factors * counted), part).astype(primal.dtype)

    dweight, dcolumns = (gradient(arguments, of_columns=i == 1) for i, arguments in enumerate(trained))
    return dx, dweight, None, None, dcolumns


chunked_log_probs.defvjp(_forward, _backward, symbolic_zeros=True)
