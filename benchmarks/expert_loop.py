"""The experts' feed-forward by a loop over experts, as PyTorch models route: each expert looks for its tokens anew.

transformers' experts, where nothing fused replaces them, take one expert after the other: they find its assignments
among all of the batch (`torch.where` of a mask), gather their tokens, apply the expert and add the weighted outputs to
the tokens' rows. This is the same in XLA, without reading sizes on the host: a loop inside the expert takes as many
tiles of rows as its assignments need, so that any load is right and none is dropped. The backward pass computes the
experts' values again, tile by tile.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxglue.ops import moe
from jaxglue.ops.moe import ExpertLora, Routing
from jaxglue.ops.moe.reference import Activation, activate, scaled
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import Quantized


def looped_mlp(
    x: Float[Array, "M D"],
    routing: Routing,
    gate_up: Float[Array, "E D 2F"] | Quantized,
    down: Float[Array, "E F D"] | Quantized,
    *,
    activation: Activation = "swiglu",
    gate_up_bias: Float[Array, "E 2F"] | None = None,
    down_bias: Float[Array, "E D"] | None = None,
    transpose_rhs: bool = False,
    lora: ExpertLora | None = None,
    **_: Any,
) -> Float[Array, "M D"]:
    """Compute `jaxglue.ops.moe.moe_mlp`; matrices have no gradient."""
    matrices = [dequantize(each, x.dtype) if isinstance(each, Quantized) else each for each in (gate_up, down)]
    first, second = (each.mT if transpose_rhs else each for each in matrices)
    lora = ExpertLora() if lora is None else lora
    adapters = scaled(lora.gate_up, lora.scales[0]), scaled(lora.down, lora.scales[1])
    frozen = jax.tree.map(lax.stop_gradient, {"matrices": (first, second), "biases": (gate_up_bias, down_bias)})
    return _looped(activation, x, routing.weights, adapters, frozen, routing.expert_ids).astype(x.dtype)


def install() -> None:
    """Let models route by the loop, in this process and from now on."""
    moe.moe_mlp = looped_mlp  # type: ignore[assignment]


def _expert(activation: Activation, x, weights, adapters, frozen) -> Float[Array, "tile D"]:
    """Apply an expert to some tokens, with the weights that its output has in their sums."""
    (first, second), biases = frozen["matrices"], frozen["biases"]
    projected = _project(x, first, biases[0], adapters[0])
    hidden = activate(projected, activation).astype(x.dtype)
    return _project(hidden, second, biases[1], adapters[1]).astype(jnp.float32) * weights[:, None]


def _project(x, matrix, bias, adapter):
    out = x @ matrix.astype(x.dtype)
    if bias is not None:
        out += bias.astype(x.dtype)
    if adapter is not None:
        out += (x @ adapter.A.astype(x.dtype).T) @ adapter.B.astype(x.dtype).T
    return out


def _tile(assignments: int, experts: int) -> int:
    """Return the rows of a tile: about an even load's, of which few stay empty."""
    return 1 << max((assignments // experts).bit_length() - 1, 3)


def _each_tile(expert, expert_ids, experts: int, carry, body):
    """Find an expert's assignments among all; carry a value over its tiles of (assignments, their tokens)."""
    M, k = expert_ids.shape
    tile = _tile(M * k, experts)
    chosen = expert_ids.ravel() == expert
    found = jnp.nonzero(chosen, size=M * k, fill_value=M * k)[0]  # torch.where
    found = jnp.pad(found, (0, tile), constant_values=M * k)

    def step(state):
        begin, carry = state
        assignments = lax.dynamic_slice(found, (begin,), (tile,))
        return begin + tile, body(carry, assignments, assignments // k)

    return lax.while_loop(lambda state: state[0] < chosen.sum(), step, (0, carry))[1]


def _rows(array, index):
    return array.at[index].get(mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _looped(activation: Activation, x, weights, adapters, frozen, expert_ids) -> Float[Array, "M D"]:
    experts = jax.tree.leaves(frozen)[0].shape[0]

    def add(out, scanned):
        expert, adapters, frozen = scanned

        def body(out, assignments, tokens):
            y = _expert(activation, _rows(x, tokens), _rows(weights.ravel(), assignments), adapters, frozen)
            return out.at[tokens].add(y, mode="drop")

        return _each_tile(expert, expert_ids, experts, out, body), None

    return lax.scan(add, jnp.zeros(x.shape, jnp.float32), (jnp.arange(experts), adapters, frozen))[0]


def _forward(activation: Activation, *operands):
    return _looped(activation, *operands), operands


def _backward(activation: Activation, operands, dout):
    x, weights, adapters, frozen, expert_ids = operands
    experts = jax.tree.leaves(frozen)[0].shape[0]

    def add(sums, scanned):
        expert, adapters, frozen = scanned

        def body(carry, assignments, tokens):
            dx, dweights, dadapters = carry
            values = _rows(x, tokens), _rows(weights.ravel(), assignments), adapters
            _, pull = jax.vjp(lambda *values: _expert(activation, *values, frozen), *values)
            own = pull(_rows(dout, tokens))
            dx = dx.at[tokens].add(own[0].astype(jnp.float32), mode="drop")
            dweights = dweights.at[assignments].set(own[1], mode="drop")
            return dx, dweights, jax.tree.map(jnp.add, dadapters, own[2])

        dx, dweights, dadapters = _each_tile(
            expert, expert_ids, experts, (*sums, jax.tree.map(jnp.zeros_like, adapters)), body
        )
        return (dx, dweights), dadapters

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros(weights.size, weights.dtype)
    (dx, dweights), dadapters = lax.scan(add, zeros, (jnp.arange(experts), adapters, frozen))
    return dx.astype(x.dtype), dweights.reshape(weights.shape), dadapters, None, None


_looped.defvjp(_forward, _backward)
