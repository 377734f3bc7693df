"""Cross-entropy fused with the output projection: the logits of one chunk of tokens exist at a time."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton
from jaxglue.ops.cross_entropy.chunks import ChunkSpec, extend
from jaxglue.ops.cross_entropy.divergence import chunked_divergences
from jaxglue.ops.cross_entropy.fp8 import ReferenceScaledCrossEntropy, fp8_cross_entropy
from jaxglue.ops.cross_entropy.log_probs import chunked_entropies, chunked_log_probs, chunked_log_sum_squares
from jaxglue.ops.cross_entropy.reference import ReferenceCrossEntropy, cap_logits, reference_cross_entropy
from jaxglue.ops.cross_entropy.scores import chunked_likely, chunked_scores
from jaxglue.ops.cross_entropy.vjp import Rows, chunked_cross_entropy

if TYPE_CHECKING:
    from jaxglue.ops.cross_entropy.triton import TritonCrossEntropy

__all__ = [
    "CROSS_ENTROPY",
    "LOGITS_BYTES",
    "CrossEntropyCall",
    "cap_logits",
    "chunk_size",
    "linear_cross_entropy",
    "linear_divergences",
    "linear_entropies",
    "linear_likely",
    "linear_log_probs",
    "linear_scores",
    "log_sum_squares",
    "reference_cross_entropy",
    "trained_log_probs",
]

LOGITS_BYTES = 2**30
"""Memory for the float32 logits of a chunk."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropyCall:
    """Meaning of a pass over logits."""

    dtype: jnp.dtype
    vocab_size: int
    """Columns of the logits that are tokens."""
    softcap: float | None = None
    temperature: float = 1.0
    """Divides the logits."""


def _check_call(capability: Capability | None, call: CrossEntropyCall) -> None:
    check_triton(capability, call.dtype)
    if call.temperature != 1:
        raise NotImplementedError("logits are divided by a temperature")


def _load(capability: Capability, call: CrossEntropyCall) -> "TritonCrossEntropy":
    from jaxglue.ops.cross_entropy.triton import TritonCrossEntropy

    return TritonCrossEntropy.of(capability)


CROSS_ENTROPY = Operation(
    name="cross-entropy",
    backends={
        "triton": Backend(
            check=_check_call,
            load=_load,
            advantage="logits are read once, or never written",
            reads={CrossEntropyCall: ("dtype", "vocab_size", "softcap")},
        )
    },
)


def linear_cross_entropy(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    loss_weights: Float[Array, " M"],
    chunk: int | None = None,
    *,
    fp8: bool = False,
    rows: Rows | None = None,
    columns: Float[Array, "V R"] | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Float[Array, ""]:
    """Compute Σ loss_weights · cross-entropy(x·Wᵀ, targets), accumulated in float32.

    The forward pass forms the gradients to `x` and `weight` from each chunk's logits, so the backward pass computes no
    logits again; `weight` gets a gradient only where it trains.

    Args:
        x: hidden states of M tokens, after the final norm.
        weight: the output projection.
        targets: the token to predict at each position.
        loss_weights: weight of each prediction; 0 leaves it out. Not differentiated.
        chunk: tokens whose logits exist at a time; `chunk_size` by default.
        fp8: multiply in e4m3, with scales by token and by row of a frozen weight, which is quantized on every call; the
            gradient to the logits is quantized by token, the weight's scales folded into it.
        rows: values that replace rows of `weight`, with these rows' indices; only the values get a gradient.
        columns: further columns of `weight`, for as many of x; they get a gradient by themselves.
        softcap: c of logits c·tanh(logit / c) (Gemma 2); None for none.
        backend: `auto`, `reference` or `triton`; see `CROSS_ENTROPY.choose`.

    Raises:
        ValueError: other shapes, a named backend that cannot serve, or a weight in FP8 that trains.
    """
    _check(x, weight, targets, loss_weights, columns)
    if rows is not None and columns is not None:
        raise ValueError("rows and columns are both given: leave one out")
    if not fp8:
        spec = _spec(x, weight, chunk, backend, softcap=softcap, columns=columns)
        return chunked_cross_entropy(spec, x, weight, targets, loss_weights, rows, columns)
    if rows is not None or columns is not None:
        raise ValueError("a head in FP8 has no rows or columns of its own: leave out fp8, or these")
    if softcap is not None:
        raise ValueError("a head in FP8 caps no logits: leave out fp8")
    return fp8_cross_entropy(_spec(x, weight, chunk, backend, fp8=True), x, weight, targets, loss_weights)


def linear_log_probs(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    counted: Float[Array, " M"],
    chunk: int | None = None,
    *,
    columns: Float[Array, "V R"] | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    exact: bool = False,
    backend: str = "auto",
) -> Float[Array, " M"]:
    """Return each token's counted · log softmax(x·Wᵀ)[target], float32.

    The forward pass forms every token's gradient to `x` from its chunk's logits, which the backward pass scales by the
    token's cotangent. Only a gradient to `weight` computes the logits again.

    Args:
        x: hidden states of M tokens, after the final norm.
        weight: the output projection.
        targets: the token to predict at each position.
        counted: 1, or 0 for positions without a prediction. Not differentiated.
        chunk: tokens whose logits exist at a time; `chunk_size` by default.
        columns: as of `linear_cross_entropy`.
        softcap: c of logits c·tanh(logit / c) (Gemma 2); None for none.
        temperature: divides the logits, within their cap; kernels serve 1 alone.
        exact: sum exponentials in one order, with or without gradients, that of `trained_log_probs`.
        backend: `auto`, `reference` or `triton`; see `CROSS_ENTROPY.choose`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    spec = _spec(x, weight, chunk, backend, softcap=softcap, temperature=temperature, columns=columns, exact=exact)
    return chunked_log_probs(spec, x, weight, targets, counted, columns)


def trained_log_probs(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    products: Float[Array, "M V"],
    targets: Int[Array, " M"],
    *,
    softcap: float | None = None,
    backend: str = "auto",
) -> Float[Array, " M"]:
    """Return log-probabilities of targets at temperature 1 with the bits of `linear_log_probs` with `exact`, float32.

    Args:
        x, weight: hidden states of M tokens, after the final norm, and output projection.
        products: x·Wᵀ in float32, with sums in the order of training's.
        targets: the tokens.
        softcap: c of logits c·tanh(logit / c) (Gemma 2); None for none.
        backend: `auto`, `reference` or `triton`; see `CROSS_ENTROPY.choose`.
    """
    spec, ones = _spec(x, weight, None, backend, softcap=softcap, exact=True), jnp.ones(len(targets), jnp.float32)
    w = extend(weight, None, x.dtype)
    # Kernels are compiled for the width of training's logits: another one's lanes would be added in another order.
    logits = jnp.pad(products, ((0, 0), (0, len(w) - products.shape[1])))
    return -spec.losses_of(x, w, logits, targets, ones)


def linear_scores(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    chunk: int | None = None,
    *,
    softcap: float | None = None,
    exact: bool = False,
) -> tuple[Float[Array, " M"], Int[Array, " M"]]:
    """Return each token's cross-entropy, and the token with the largest logit.

    Args:
        x: hidden states of M tokens, after the final norm.
        weight: the output projection.
        targets: the token to predict at each position.
        chunk: tokens whose logits exist at a time; `chunk_size` by default.
        softcap: bound of the logits; None for none.
        exact: sum in an order that no number of tokens changes.
    """
    return chunked_scores(_scoring(x, weight, chunk, softcap, exact), x, weight, targets)


def linear_likely(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    count: int,
    chunk: int | None = None,
    *,
    softcap: float | None = None,
    exact: bool = False,
) -> tuple[Float[Array, " M"], Int[Array, "M count"], Float[Array, "M count"]]:
    """Return each target's log-probability, and the most likely tokens in its place with theirs.

    Arguments are those of `linear_scores`, and the number of likely tokens.
    """
    return chunked_likely(_scoring(x, weight, chunk, softcap, exact), x, weight, targets, count)


def _scoring(x, weight, chunk: int | None, softcap: float | None, exact: bool) -> ChunkSpec:
    return _spec(x, weight, chunk, "auto" if exact else "reference", softcap=softcap, exact=exact)


def linear_entropies(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    counted: Float[Array, " M"],
    chunk: int | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    trained: bool = False,
) -> Float[Array, " M"]:
    """Return each token's counted · entropy of softmax(x·Wᵀ) in nats, float32; `trained` ones have gradients.

    The other arguments are those of `linear_log_probs`.
    """
    spec = _spec(x, weight, chunk, "reference", softcap=softcap, temperature=temperature)
    return chunked_entropies(spec, *((x, weight) if trained else lax.stop_gradient((x, weight))), counted)


def linear_divergences(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    teacher_x: Float[Array, "M E"],
    teacher_weight: Float[Array, "V E"],
    counted: Float[Array, " M"],
    *,
    beta: float,
    top_k: int | None = None,
    chunk: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Float[Array, " M"]:
    """Return each token's counted · divergence between softmax(x·Wᵀ) and a teacher's, float32.

    The teacher gets no gradient.

    Args:
        x, weight: hidden states of M tokens, after the final norm, and output projection.
        teacher_x, teacher_weight: those of the teacher, of any width, for the same vocabulary.
        counted: 1, or 0 for tokens that are left out. Not differentiated.
        beta: 0 for the forward divergence KL(teacher‖student), 1 for the reverse, between for the generalized
            Jensen-Shannon divergence.
        top_k: distinguish the teacher's most likely tokens alone, all others together; None for all tokens.
        chunk: tokens whose logits exist at a time; by default half of `chunk_size`, since there are two.
        temperature: divides both logits, within their caps.
        softcap, teacher_softcap: c of logits c·tanh(logit / c); None for none.
    """
    chunk = chunk or max(chunk_size(len(weight)) // 2, 1)
    return chunked_divergences(
        x,
        weight,
        teacher_x,
        teacher_weight,
        counted,
        chunk=chunk,
        beta=beta,
        top_k=top_k,
        softcap=softcap,
        teacher_softcap=teacher_softcap,
        temperature=temperature,
    )


def log_sum_squares(
    x: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    counted: Float[Array, " M"],
    chunk: int | None = None,
    *,
    softcap: float | None = None,
) -> Float[Array, " M"]:
    """Return each token's counted · log Σ softmax(x·Wᵀ)² over the vocabulary, float32, without a gradient."""
    return chunked_log_sum_squares(
        _spec(x, weight, chunk, "reference", softcap=softcap), x, lax.stop_gradient(weight), counted
    )


def _check(x: Array, weight: Array, targets: Array, loss_weights: Array, columns: Array | None) -> None:
    further = 0 if columns is None else columns.shape[1]
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] + further:
        raise ValueError(f"x must be [M, D] and weight [V, D], got {x.shape} and {weight.shape}")
    if targets.shape != x.shape[:1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integers [M] = [{len(x)}], got {targets.shape} of {targets.dtype}")
    if loss_weights.shape != x.shape[:1]:
        raise ValueError(f"loss_weights must be [M] = [{len(x)}], got {loss_weights.shape}")


def _spec(
    x: Array,
    weight: Array,
    chunk: int | None,
    backend: str,
    *,
    fp8: bool = False,
    softcap: float | None = None,
    temperature: float = 1.0,
    columns: Array | None = None,
    exact: bool = False,
) -> ChunkSpec:
    V = len(weight)
    call = CrossEntropyCall(dtype=x.dtype, vocab_size=V, softcap=softcap, temperature=temperature)
    kernels, chunk = CROSS_ENTROPY.load(call, backend=backend), chunk or chunk_size(V)
    if kernels is not None:
        kernels = replace(kernels, softcap=call.softcap, vocab_size=call.vocab_size)
    if fp8:
        scaled = kernels.scaled if kernels else ReferenceScaledCrossEntropy(V)
        return ChunkSpec(cross_entropy=scaled, vocab_size=V, chunk=chunk)
    wide = x.dtype != jnp.float16  # whose exponents are too few for numerators
    return ChunkSpec(
        cross_entropy=kernels or ReferenceCrossEntropy(V, softcap, temperature, exact),
        exact=exact,
        vocab_size=V,
        chunk=chunk,
        softcap=softcap,
        temperature=temperature,
        softmax_gradient=kernels.softmax_gradient if kernels and wide else None,
        product_gradient=kernels.product_gradient
        if kernels and columns is None and not exact and kernels.multiplies(x, weight)
        else None,
    )


def chunk_size(vocab_size: int) -> int:
    """Return the tokens in a chunk: the largest power of two whose logits fit `LOGITS_BYTES`."""
    return 1 << max(LOGITS_BYTES // (4 * vocab_size), 1).bit_length() - 1
