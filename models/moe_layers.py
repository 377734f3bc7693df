"""Mixture-of-experts blocks shared by the model families."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import LayerContext
from jaxglue.models.family import ExpertParts
from jaxglue.models.linear import Linear
from jaxglue.models.parameters import Buffer
from jaxglue.models.per_layer import Matrix
from jaxglue.models.residual import Branch
from jaxglue.ops.collectives import copy_to, reduce_from
from jaxglue.ops.moe import (
    ExpertAdapter,
    ExpertProjection,
    Routing,
    auxiliary_loss,
    experts,
    route,
    z_loss,
)
from jaxglue.ops.norm_rope import NormStyle, rms_norm
from jaxglue.ops.projection import project
from jaxglue.ops.projection.ordered import ordered_float32_product, ordered_product
from jaxglue.ops.quant.formats import FORMATS, Quantized
from jaxglue.ops.quant.stack import hold_matrices
from jaxglue.ops.residual_norm import Normed


class ExpertLinear(nnx.Module):
    """Parameters of one projection of all experts: matrices, quantized or not, or their parts, biases, adapters.

    Hugging Face names `weight` `gate_up_proj`, `bias` `gate_up_proj_bias` and so on: see `hf_name`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertParts,
        in_features: int,
        out_features: int,
        *,
        dtype,
        rngs: nnx.Rngs,
    ):
        assert config.moe is not None
        E, std, key = config.moe.num_experts, config.initializer_range, rngs.params()
        self.transposed, self.quantize = experts.transposed or config.moe.quantize != "none", config.moe.quantize
        shape = (E, out_features, in_features) if self.transposed else (E, in_features, out_features)
        made = FORMATS[self.quantize]
        if made.weight is not None and not (made.parts or experts.transposed):
            raise ValueError(f"{made.flag} needs the experts in MXFP4: leave it out")
        weight = None if made.parts else hold_matrices(made, jax.random.normal(key, shape, dtype) * std)
        self.weight = None if made.parts else nnx.Param(weight)
        for part, spec in made.part_specs(shape).items() if made.parts else ():
            setattr(self, part, nnx.Param(made.random_part(part, key, spec, std)))
        self.bias = nnx.Param(jnp.zeros((E, out_features), dtype)) if experts.bias else None
        self.lora_A: nnx.LoRAParam | None = nnx.data(None)
        self.lora_B: nnx.LoRAParam | None = nnx.data(None)
        self.lora_scale = 0.0
        self.experts, self.in_features, self.out_features = E, in_features, out_features
        self.fp8 = config.fp8_experts

    def add_lora(self, *, rank: int, scale: float, dropout: float, name: str, rngs: nnx.Rngs) -> None:
        """Add a float32 adapter to every expert, initialized as in `Linear`: A [E, R, in], B [E, out, R].

        Raises:
            ValueError: dropout is on, which PEFT does not support for experts, so it could not load the adapter.
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
    def projection(self) -> ExpertProjection:
        """Return the parameters for `experts`."""
        A, B = self.lora_A, self.lora_B
        return ExpertProjection(
            weight=self._matrix,
            bias=None if self.bias is None else self.bias[...],
            adapter=None if A is None or B is None else ExpertAdapter(A[...], B[...]),
        )

    @property
    def _matrix(self) -> Float[Array, "E a b"] | Quantized:
        if self.weight is not None:
            return self.weight.get_value()
        made = FORMATS[self.quantize]
        return made.join({part: getattr(self, part)[...] for part in made.parts})


class Experts(nnx.Module):
    """Feed-forwards of all experts: `gate_up_proj` from D to 2F, or without gates `up_proj` to F, and `down_proj`."""

    def __init__(self, config: DecoderConfig, experts: ExpertParts, *, dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        D, F = config.moe.latent_size or config.hidden_size, config.moe.intermediate_size
        gated = experts.activation != "relu2"
        self.first_name = "gate_up_proj" if gated else "up_proj"
        first = ExpertLinear(config, experts, D, 2 * F if gated else F, dtype=dtype, rngs=rngs)
        setattr(self, self.first_name, first)
        self.down_proj = ExpertLinear(config, experts, F, D, dtype=dtype, rngs=rngs)
        self.activation = experts.activation

    @property
    def projections(self) -> tuple[ExpertLinear, ExpertLinear]:
        """Return the projection from D, gate and up as one, and that back to it."""
        return getattr(self, self.first_name), self.down_proj

    def __call__(self, x: Float[Array, "M D"], routing: Routing, context: LayerContext) -> Float[Array, "M D"]:
        """Sum the weighted outputs of each token's experts."""
        gate_up, down = self.projections
        return experts(
            x,
            routing,
            gate_up.projection,
            down.projection,
            activation=self.activation,
            transpose_rhs=gate_up.transposed,
            lora_scales=(gate_up.lora_scale, down.lora_scale),
            ranks=getattr(context, "ranks", None),
            fp8=gate_up.fp8 and context.fp8,
            inference=getattr(context, "inference", False),
            exact=context.exact,
        )


class Router(nnx.Module):
    """Linear scores of every expert for every token. Not a `Linear`, so it gets no adapter."""

    def __init__(self, config: DecoderConfig, parts: ExpertParts, *, dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        E, D, std = config.moe.num_experts, config.hidden_size, config.initializer_range
        self.float32 = parts.float32_router
        weight_dtype = jnp.float32 if self.float32 else dtype
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (E, D), weight_dtype) * std)
        self.bias = nnx.Param(jnp.zeros(E, dtype)) if parts.bias else None
        shape = (*(1,) * (parts.correction_axes - 1), E)
        self.e_score_correction_bias = Buffer(jnp.zeros(shape, jnp.float32)) if parts.correction else None

    def __call__(self, x: Float[Array, "M D"], *, exact: bool = False) -> Float[Array, "M E"]:
        """Compute the logits in float32; exact ones in one order of sums, whatever tokens are routed together."""
        if exact and self.float32:
            logits = ordered_float32_product(x, self.weight[...].astype(jnp.float32))
        elif exact:
            logits = ordered_product(x, self.weight[...].astype(x.dtype), jnp.float32)
        elif self.float32:  # not in TF32: small differences of logits decide
            weight = self.weight[...].astype(jnp.float32)
            logits = jnp.einsum("md,ed->me", x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
        else:
            logits = project(x, self.weight[...], jnp.float32)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)

    @property
    def correction(self) -> Float[Array, " E"] | None:
        """Return the correction of the scores for the choice of experts alone, if there is one."""
        return None if self.e_score_correction_bias is None else self.e_score_correction_bias[...].reshape(-1)


class ScaledRouter(nnx.Module):
    """Choice of experts by a residual stream that it norms and scales itself, and a factor of each one's weights.

    The first product is in float32; the weights of a token's experts sum to one before they are multiplied.
    """

    def __init__(self, config: DecoderConfig, norm: NormStyle, *, dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        E, D = config.moe.num_experts, config.hidden_size
        self.proj = Matrix((E, D), config.initializer_range, dtype=dtype, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(D, dtype))
        self.per_expert_scale = nnx.Param(jnp.ones(E, dtype))
        self.eps, self.style, self.experts_per_token = config.rms_norm_eps, norm, config.moe.num_experts_per_tok

    def __call__(self, x: Float[Array, "M D"], *, exact: bool = False) -> tuple[Float[Array, "M E"], Routing]:
        """Return the logits, and the routing; see `Router` for `exact`."""
        D = x.shape[-1]
        normed = rms_norm(x, jnp.ones(D, x.dtype), self.eps, self.style) * self.scale[...].astype(x.dtype)
        multiply, matrix = ordered_product if exact else project, self.proj.weight[...].astype(x.dtype)
        logits = multiply(normed * jnp.asarray(D**-0.5, x.dtype), matrix, jnp.float32)
        routing = route(logits, self.experts_per_token, normalize=True, exact=exact)
        factors = self.per_expert_scale[...].astype(jnp.float32)
        # A gather's gradient would be a scatter with atomics.
        chosen = jax.nn.one_hot(routing.expert_ids, factors.size, dtype=jnp.float32)
        scaled = routing.weights * jnp.einsum("mke,e->mk", chosen, factors, precision=jax.lax.Precision.HIGHEST)
        return logits, replace(routing, weights=scaled)


class SparseMLP(nnx.Module):
    """Sparse feed-forward: each token's experts, chosen and weighted by a router, and one that all tokens share."""

    def __init__(
        self, config: DecoderConfig, parts: ExpertParts, shared: nnx.Module | None = None, *, dtype, rngs: nnx.Rngs
    ):
        """Make router and experts beside the shared one, a `GatedMLP`."""
        assert config.moe is not None
        setattr(self, parts.router, Router(config, parts, dtype=dtype, rngs=rngs))
        self.experts = Experts(config, parts, dtype=dtype, rngs=rngs)
        self.parts, self.experts_per_token = parts, config.moe.num_experts_per_tok
        self.normalize, self.groups = config.moe.norm_topk_prob, config.moe.groups
        self.routed_scale = config.moe.routed_scale
        if shared is not None:
            setattr(self, parts.shared, shared)
        self.has_shared = shared is not None
        self.shared_expert_gate: Linear | None = nnx.data(None)
        if shared is not None and parts.shared_gate:
            std = config.initializer_range
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, std=std, dtype=dtype, rngs=rngs)

    @property
    def inputs(self) -> tuple[()]:
        """Return the projections that alone read the layer's norm: none, since the router reads it."""
        return ()

    def __call__(self, x: Normed, context: LayerContext) -> Branch:
        """Apply the feed-forward."""
        assert isinstance(x, jax.Array)
        tokens = copy_to(x).reshape(-1, x.shape[-1])
        router = getattr(self, self.parts.router)
        logits = router(tokens, exact=context.exact)
        routing = route(
            logits,
            self.experts_per_token,
            order=self.parts.order,
            normalize=self.normalize,
            correction=router.correction,
            groups=self.groups,
            scale=self.routed_scale,
            inference=getattr(context, "inference", False),
            exact=context.exact,
        )
        y = reduce_from(self.routed(tokens, logits, routing, context).reshape(x.shape))
        return Branch(lambda stream: self._add_shared(stream + y, x, context))

    def routed(self, tokens: Float[Array, "M D"], logits: Float[Array, "M E"], routing: Routing, context) -> Array:
        """Return the sum of each token's weighted experts."""
        return apply_experts(self.experts, tokens, logits, routing, context)

    def _add_shared(self, stream: Float[Array, "B T D"], x: Float[Array, "B T D"], context: LayerContext) -> Array:
        """Return the stream plus the shared expert's output, if there is one."""
        if not self.has_shared:
            return stream
        branch = getattr(self, self.parts.shared)(x, context)
        if self.shared_expert_gate is None:
            return stream + branch
        return stream + jax.nn.sigmoid(self.shared_expert_gate(x, context)) * branch.add_to(jnp.zeros_like(x))


def apply_experts(
    experts: Experts, tokens: Float[Array, "M D"], logits: Float[Array, "M E"], routing: Routing, context: LayerContext
) -> Float[Array, "M D"]:
    """Return the sum of each token's weighted experts, show the routing and add the router losses."""
    context.observe_routing(routing)
    return _add_router_losses(experts(tokens, routing, context), logits, routing, context)


def _add_router_losses(y, logits, routing: Routing, context: LayerContext) -> Float[Array, "M D"]:
    """Return y; the backward pass adds the gradient of the router losses, if any, to that of the logits."""
    if (weights := context.router_losses) is None:
        return y
    mask = context.token_mask
    return attach_loss(y, weights.balance * auxiliary_loss(logits, routing, mask) + weights.z * z_loss(logits, mask))


@jax.custom_vjp
def attach_loss(y: Float[Array, "*B"], loss: Float[Array, ""]) -> Float[Array, "*B"]:  # noqa: ARG001
    """Return y; the backward pass treats `loss` as a term of the objective."""
    return y


attach_loss.defvjp(lambda y, loss: (y, None), lambda _, dy: (dy, jnp.float32(1)))
