"""Mixture-of-experts blocks that the model families share."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import LayerContext
from jaxglue.models.layers import project
from jaxglue.ops.moe import ExpertLora, Routing, auxiliary_loss, moe_mlp, route, z_loss
from jaxglue.ops.moe.activation import Activation
from jaxglue.ops.moe.parallel import expert_parallel
from jaxglue.ops.quant.mxfp4 import BLOCK, MXFP4


class ExpertLayout(NamedTuple):
    """What differs between families in how experts are stored and computed."""

    activation: Activation
    transposed: bool
    """Whether matrices are stored [E, out, in]; MXFP4 ones always are."""
    bias: bool


class ExpertLinear(nnx.Module):
    """One projection of all experts: matrices (or their MXFP4 blocks), biases and adapters. `Experts` computes.

    Hugging Face holds `weight` as `gate_up_proj`, `bias` as `gate_up_proj_bias` and so on: see `hf_name`.
    """

    def __init__(
        self, config: DecoderConfig, layout: ExpertLayout, in_features: int, out_features: int, *, dtype, rngs: nnx.Rngs
    ):
        assert config.moe is not None
        E, std, mxfp4 = config.moe.num_experts, config.initializer_range, config.moe.mxfp4
        shape = (E, out_features, in_features) if layout.transposed else (E, in_features, out_features)
        blocks = (E, out_features, _blocks(in_features) if mxfp4 else 0)
        self.weight = None if mxfp4 else nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * std)
        self.blocks = nnx.Param(jax.random.bits(rngs.params(), (*blocks, BLOCK // 2), jnp.uint8)) if mxfp4 else None
        self.scales = nnx.Param(jnp.full(blocks, mxfp4_scale(std), jnp.uint8)) if mxfp4 else None
        self.bias = nnx.Param(jnp.zeros((E, out_features), dtype)) if layout.bias else None
        self.lora_A: nnx.LoRAParam | None = nnx.data(None)
        self.lora_B: nnx.LoRAParam | None = nnx.data(None)
        self.lora_scale = 0.0
        self.experts, self.in_features, self.out_features = E, in_features, out_features
        self.transposed = layout.transposed or config.moe.mxfp4

    def add_lora(self, *, rank: int, scale: float, dropout: float, name: str, rngs: nnx.Rngs) -> None:
        """Adds a float32 adapter to every expert, each as `Linear` does: A [E, R, in], B [E, out, R].

        Raises:
            ValueError: with dropout, which PEFT does not have for experts either, so the adapter could not be loaded.
        """
        if dropout:
            raise ValueError(
                f"dropout={dropout} is not supported for the adapters of experts ({name}), nor by PEFT: "
                "set it to 0, or name other targets"
            )
        E, bound = self.experts, self.in_features**-0.5
        A = jax.random.uniform(rngs.params(), (E, rank, self.in_features), minval=-bound, maxval=bound)
        self.lora_A = nnx.LoRAParam(A)
        self.lora_B = nnx.LoRAParam(jnp.zeros((E, self.out_features, rank)))
        self.lora_scale = scale

    @property
    def matrix(self) -> Float[Array, "E a b"] | MXFP4:
        """The experts' matrices, as they are stored."""
        if self.weight is not None:
            return self.weight[...]
        assert self.blocks is not None and self.scales is not None
        return MXFP4(blocks=self.blocks[...], scales=self.scales[...])

    @property
    def adapter(self) -> tuple[Array, Array] | None:
        """A and B, or None where there is no adapter."""
        return None if self.lora_A is None or self.lora_B is None else (self.lora_A[...], self.lora_B[...])


def _blocks(features: int) -> int:
    if features % BLOCK:
        raise ValueError(f"MXFP4 experts need sizes that are multiples of {BLOCK}, got {features}")
    return features // BLOCK


def mxfp4_scale(std: float) -> int:
    """The e8m0 exponent with which uniformly random blocks have about this standard deviation."""
    return 127 + round(math.log2(std / 2.93))


class Experts(nnx.Module):
    """The gated feed-forwards of all experts: `gate_up_proj` to 2F and `down_proj` from F."""

    def __init__(self, config: DecoderConfig, layout: ExpertLayout, *, dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        D, F = config.hidden_size, config.moe.intermediate_size
        self.gate_up_proj = ExpertLinear(config, layout, D, 2 * F, dtype=dtype, rngs=rngs)
        self.down_proj = ExpertLinear(config, layout, F, D, dtype=dtype, rngs=rngs)
        self.activation = layout.activation

    def __call__(self, x: Float[Array, "M D"], routing: Routing) -> Float[Array, "M D"]:
        """Every token through its experts, weighted and summed."""
        gate_up, down = self.gate_up_proj, self.down_proj
        adapters = ExpertLora(gate_up=gate_up.adapter, down=down.adapter, scale=gate_up.lora_scale or down.lora_scale)

        def mlp(x, routing: Routing, adapters: ExpertLora) -> Float[Array, "M D"]:
            return moe_mlp(
                x,
                routing,
                gate_up.matrix,
                down.matrix,
                activation=self.activation,
                gate_up_bias=None if gate_up.bias is None else gate_up.bias[...],
                down_bias=None if down.bias is None else down.bias[...],
                transpose_rhs=gate_up.transposed,
                lora=adapters,
            )

        return expert_parallel(mlp, x, routing, adapters)


class Router(nnx.Module):
    """Scores every expert for every token. Not a `Linear`, so that adapters leave it alone."""

    def __init__(self, config: DecoderConfig, *, bias: bool, dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        shape = (config.moe.num_experts, config.hidden_size)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * config.initializer_range)
        self.bias = nnx.Param(jnp.zeros(shape[0], dtype)) if bias else None

    def __call__(self, x: Float[Array, "M D"]) -> Float[Array, "M E"]:
        """Logits in float32."""
        logits = project(x, self.weight[...], jnp.float32)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)


def mix_experts(
    x: Float[Array, "B T D"], router: Router, experts: Experts, context: LayerContext, k: int, **options: Any
) -> Float[Array, "B T D"]:
    """The feed-forward of a sparse layer: k experts for each token, chosen as `options` of `route` say."""
    tokens = x.reshape(-1, x.shape[-1])
    logits = router(tokens)
    routing = route(logits, k, **options)
    context.observe_routing(routing)
    y = _add_router_losses(experts(tokens, routing), logits, routing, context)
    return y.reshape(x.shape)


def _add_router_losses(y, logits, routing: Routing, context: LayerContext) -> Float[Array, "M D"]:
    """y unchanged; its backward pass also gives `logits` the gradient of the router's losses, where they are on."""
    if (weights := context.router_losses) is None:
        return y
    mask = context.token_mask
    return with_loss(y, weights.balance * auxiliary_loss(logits, routing, mask) + weights.z * z_loss(logits, mask))


@jax.custom_vjp
def with_loss(y: Float[Array, "*B"], loss: Float[Array, ""]) -> Float[Array, "*B"]:
    """y; the backward pass treats `loss` as a part of what is minimized, although nothing carries it there."""
    return y


with_loss.defvjp(lambda y, loss: (y, None), lambda _, dy: (dy, jnp.float32(1)))
