"""A decoder layer with adapters, differentiated by hand: all adapters' gradients are one launch at its end."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.attention.rotation import Rotation
from jaxglue.ops.gated_mlp.swiglu import Matrices
from jaxglue.ops.norm_rope import LLAMA_NORM, HeadNorms, NormStyle
from jaxglue.ops.rope import RopeTables, Rotary

AdapterMatrices = tuple[Float[Array, "R in"], Float[Array, "out R"]]
"""Both matrices in float32, the second one times the adapter's scale."""
_ALIGNMENT = 64
"""Extended values have a multiple of it in columns."""
_QKV, _OUT, _GATE_UP, _DOWN = _GROUPS = slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)
"""Linear layers that share an input."""


class LayerNorms(NamedTuple):
    """Weights of a layer's norms."""

    attention: Float[Array, " D"]
    """Before attention."""
    feed_forward: Float[Array, " D"]
    """Before the feed-forward."""
    heads: HeadNorms | None
    """Norms of queries and keys; None without."""


class FrozenWeights(NamedTuple):
    """Frozen parameters."""

    norms: LayerNorms
    linears: tuple[Float[Array, "out in"], ...]
    """Queries, keys, values, attention's output, gate, up and down."""


class RotatedContext(Protocol):
    """Rotary tables of the rows and attention within them; a pytree."""

    @property
    def rope(self) -> RopeTables:
        """Return the rotary tables."""

    def attend_rotated(self, rotation: Rotation, z, *, window: int | None) -> Float[Array, "B T N H"]:
        """See `rotated_attention`."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Static, hashable arguments of `small_layer`."""

    rotary: Rotary
    """Rotary embedding whose halves turn."""
    eps: float
    """Added to a mean square by the norms."""
    window: int | None
    style: NormStyle = LLAMA_NORM
    """Of the layer's norms."""
    activation: str = "silu"
    """Of the feed-forward's gate."""


class WeightGroup(NamedTuple):
    """Weights and adapters of linear layers with one input."""

    weights: Sequence[Float[Array, "out in"]]
    adapters: Sequence[AdapterMatrices]
    joined: bool = False
    """Ranks are multiplied with the weights, not before them."""

    def width(self, rank: int) -> int:
        """Return the columns of extended inputs or, where ranks are multiplied with the weights, of outputs."""
        columns = sum(map(len, self.weights)) if self.joined else self.weights[0].shape[1]
        return extended_width(columns, rank * len(self.weights))


class ExtendedWeights(NamedTuple):
    """Weights and adapters of linear layers with one input, in the activations' dtype."""

    whole: Float[Array, "out width"]
    """Weights one below the other; second matrices in the columns of their ranks or, joined, first ones below."""
    downs: Float[Array, "lanes in"] | None = None
    """First matrices one below the other, then zeros; None in joined groups."""


class Pair(NamedTuple):
    """Arrays [M, …] whose product wideᵀ·narrow is the gradient to an adapter."""

    wide: Array
    columns: slice
    """Columns of `wide` that are multiplied."""
    narrow: Array
    first: int
    """Narrow's first rank."""
    is_second: bool
    """The gradient is to a second matrix [columns, R], not to a first one [R, columns]."""


class Partials(NamedTuple):
    """Partial sums [parts, columns, R] of an adapter's gradient."""

    sums: Array
    is_second: bool
    """See `Pair`."""


def extended_width(columns: int, ranks: int) -> int:
    """Return the columns of extended values."""
    return -(-(columns + ranks) // _ALIGNMENT) * _ALIGNMENT


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused_layer(
    kernels: Any,
    spec: LayerSpec,
    x: Float[Array, "B T D"],
    weights: FrozenWeights,
    adapters: tuple[AdapterMatrices, ...],
    context: RotatedContext,
) -> Float[Array, "B T D"]:
    """Return the layer's output; weights and context get no gradient.

    Args:
        kernels: `TritonSmallLayer`.
        spec: of the layer.
        x: the residual stream.
        weights: of the layer.
        adapters: of its linear layers, all of one rank.
        context: of the rows.

    Raises:
        ValueError: weights train beside the adapters.
    """
    return _run(kernels, spec, x, weights, adapters, context)[0]


def _forward(kernels, spec: LayerSpec, x, weights, adapters, context):
    if any(leaf.perturbed for leaf in jax.tree.leaves(weights)):
        raise ValueError("a small layer's weights are frozen beside adapters, but some are to train")
    y, (values, *others) = _run(kernels, spec, *jax.tree.map(lambda leaf: leaf.value, (x, weights, adapters, context)))
    return y, (values if x.perturbed else (None, *values[1:]), *others)


def _run(kernels, spec: LayerSpec, x, weights: FrozenWeights, adapters, context: RotatedContext):
    B, T, D = x.shape
    rows = x.reshape(-1, D)
    rank, linears = len(adapters[0][0]), [weight.astype(x.dtype) for weight in weights.linears]
    groups = [WeightGroup(linears[part], adapters[part], joined=part in (_OUT, _GATE_UP)) for part in _GROUPS]
    qkv, out, gate_up, down = extended = kernels.extend_weights(groups)
    entered = kernels.extend(rows, weights.norms.attention, qkv.downs, 3 * rank, eps=spec.eps)
    z = checkpoint_name(_times(entered, qkv.whole), names.QUERY)
    heads = len(linears[0]) // spec.rotary.head_dim, len(linears[1]) // spec.rotary.head_dim
    cos, sin = context.rope.of(spec.rotary)
    rotation = Rotation(kernels=kernels, heads=heads, norms=weights.norms.heads, cos=cos, sin=sin)
    attend = partial(context.attend_rotated, rotation, window=spec.window)
    attended, attend_back = jax.vjp(attend, z.reshape(B, T, -1, spec.rotary.head_dim))
    attended = attended.reshape(len(rows), -1)
    left = _times(attended, out.whole)
    added = kernels.add_norm(rows, left, adapters[_OUT][0][1], weights.norms.feed_forward, eps=spec.eps)
    middle, normed, out_ranks = (checkpoint_name(value, names.ATTENTION_RESIDUAL) for value in added)
    gates = checkpoint_name(_times(normed, gate_up.whole), names.GATE)
    y, down_ranks = kernels.swiglu(gates, _swiglu_matrices(adapters))
    down_ranks = checkpoint_name(down_ranks, names.LOW_RANK)
    values = rows, entered, z, attend_back, attended, out_ranks, middle, normed, gates, down_ranks
    return (middle + _times(y, down.whole)).reshape(x.shape), (values, extended, weights, adapters)


def _backward(kernels, spec: LayerSpec, residuals, dy):
    values, (qkv, out, gate_up, down), weights, adapters = residuals
    rows, entered, z, attend_back, attended, out_ranks, middle, normed, gates, down_ranks = values
    (B, T, D), rank = dy.shape, len(adapters[0][0])
    dy = dy.reshape(-1, D)
    dgates, partials = kernels.swiglu_gradient(gates, _swiglu_matrices(adapters), dy @ down.whole)
    up, dnormed = adapters[_OUT][0][1], dgates @ gate_up.whole
    dmiddle = kernels.middle_gradient(middle, weights.norms.feed_forward, dy, dnormed, up, eps=spec.eps)
    dattended = dmiddle @ out.whole
    (dz,) = attend_back(dattended.reshape(B, T, -1, spec.rotary.head_dim))
    dz = dz.reshape(z.shape)
    skipped = D if rows is None else 0  # with x constant only the ranks need a gradient
    dx, dentered = None, dz @ qkv.whole[:, skipped:]
    if rows is not None:
        dx = kernels.entered_gradient(
            rows, weights.norms.attention, dmiddle, dentered, entered, qkv.downs, eps=spec.eps
        )
        dx = dx.reshape(B, T, D)
    all_columns, columns = slice(0, D), sum(map(len, weights.linears[_GATE_UP]))
    firsts = [D + i * rank for i in range(3)]
    ends = itertools.accumulate(map(len, weights.linears[_QKV]), initial=0)
    pairs = [
        *(Pair(entered, all_columns, dentered, first - skipped, False) for first in firsts),
        *(Pair(dz, slice(*part), entered, i, True) for part, i in zip(itertools.pairwise(ends), firsts, strict=True)),
        Pair(attended, slice(0, attended.shape[1]), dmiddle, D, False),
        Pair(dmiddle, all_columns, out_ranks, 0, True),
        *(Pair(normed, all_columns, dgates, columns + i * rank, False) for i in range(2)),
        Pair(dy, all_columns, down_ranks, 0, True),
    ]
    sums = [Partials(partial, second) for partial, second in zip(partials, (True, True, False), strict=True)]
    gradients = kernels.adapter_gradients(pairs, sums, rank)
    q, k, v, *seconds, out_a, out_b, gate, up, down_b, gate_b, up_b, down_a = gradients
    feed_forward = (gate, gate_b), (up, up_b), (down_a, down_b)
    return dx, None, (*zip((q, k, v), seconds, strict=True), (out_a, out_b), *feed_forward), None


fused_layer.defvjp(_forward, _backward, symbolic_zeros=True)


def _swiglu_matrices(adapters: tuple[AdapterMatrices, ...]) -> Matrices:
    """Return the adapters' matrices for SwiGLU's kernels."""
    (_, gate), (_, up) = adapters[_GATE_UP]
    return gate, up, adapters[-1][0]


def _times(extended: Float[Array, "M width"], weights: Float[Array, "out width"]) -> Float[Array, "M out"]:
    return jax.lax.dot_general(extended, weights, (((1,), (1,)), ((), ())))
