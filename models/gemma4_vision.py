"""Gemma 4's vision tower: sandwiched norms, stored bounds, rotation by columns and rows, and pooled patches."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.linear import Linear
from jaxglue.models.parameters import Buffer
from jaxglue.models.residual import Norm
from jaxglue.models.tower import Angles, Group, Vision, tower_context
from jaxglue.models.tower_config import TowerConfig, tower_sizes
from jaxglue.ops.attention import packed_attention
from jaxglue.ops.norm_rope import NormStyle, reference_norm
from jaxglue.ops.rope import apply_rope
from jaxglue.ops.rows import take_rows
from jaxglue.vision.rows import Patches

_NORM = NormStyle(rounds_first=False)
_TOWER = {
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 16),
    "heads": ("num_attention_heads", 12),
    "intermediate": ("intermediate_size", 3072),
    "patch": ("patch_size", 16),
    "merge": ("pooling_kernel_size", 3),
    "positions": ("position_embedding_size", 10_240),
}


@dataclass(frozen=True, kw_only=True)
class Gemma4TowerConfig(TowerConfig):
    """Shape of Gemma 4's tower."""

    positions: int = 10_240
    """Learned positions of each axis."""
    theta: float = 100.0
    clipped: bool = False
    """Inputs and outputs of linear layers have stored bounds."""
    standardized: bool = False
    """Pooled patches are shifted and scaled by stored vectors."""
    bidirectional: bool = False
    """An image's tokens see later ones of it."""

    norm = _NORM
    bias = False
    roots: ClassVar[tuple[str, ...]] = ("vision_tower", "embed_vision")
    projector: ClassVar[tuple[str, ...]] = ("embed_vision",)

    @property
    def spans(self) -> Literal["none", "windows", "all"]:
        """See `TowerConfig`."""
        return "windows" if self.bidirectional else "none"

    def make(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs) -> Vision:
        """See `TowerConfig`."""
        return Gemma4Vision(self, config.hidden_size, dtype=dtype, rngs=rngs)

    def initial(self, name: str, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """See `TowerConfig`; bounds are the largest numbers, as infinite weights are taken for damaged ones."""
        if name.endswith(("_min", "_max")):
            return jnp.full(spec.shape, (-1 if name.endswith("_min") else 1) * jnp.finfo(spec.dtype).max, spec.dtype)
        return super().initial(name, spec)


def with_tower(raw: Mapping[str, Any], config: DecoderConfig, settings: Mapping[str, Any]) -> DecoderConfig:
    """Return the architecture with the tower of a config.json; raise ValueError for what is not supported."""
    vision = raw["vision_config"]
    sizes = tower_sizes(vision, _TOWER)
    head_dim = sizes["width"] // sizes["heads"]
    fixed = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": head_dim, "num_key_value_heads": sizes["heads"]}
    for name, value in fixed.items():
        if vision.get(name, value) != value:
            raise ValueError(
                f"vision_config in config.json: {name} {vision[name]!r:.60} is not supported: only {value}"
            )
    own = {**settings, "mean": (0.5,) * 3, "std": (0.5,) * 3}  # of the model itself
    tower = Gemma4TowerConfig(
        **sizes,
        eps=vision.get("rms_norm_eps") or 1e-6,
        theta=(vision.get("rope_parameters") or {}).get("rope_theta") or 100.0,
        clipped=bool(vision.get("use_clipped_linears")),
        standardized=bool(vision.get("standardize")),
        bidirectional=is_bidirectional(raw),
        **own,
    )
    return tower.within(config)


def is_bidirectional(raw: Mapping[str, Any]) -> bool:
    """Tell whether an image's tokens see later ones of it."""
    return (raw.get("text_config") or {}).get("use_bidirectional_attention") == "vision"


class ClippedLinear(nnx.Module):
    """A linear layer, under `linear`, whose inputs and outputs may have stored bounds."""

    def __init__(self, inputs: int, outputs: int, *, clipped: bool, std: float, dtype: Any, rngs: nnx.Rngs):
        self.linear = Linear(inputs, outputs, bias=False, std=std, dtype=dtype, rngs=rngs)
        self.clipped = clipped
        if clipped:
            self.input_min, self.output_min = Buffer(jnp.array(-jnp.inf, dtype)), Buffer(jnp.array(-jnp.inf, dtype))
            self.input_max, self.output_max = Buffer(jnp.array(jnp.inf, dtype)), Buffer(jnp.array(jnp.inf, dtype))

    def __call__(self, x: Float[Array, "B P in"], context: PackedContext) -> Float[Array, "B P out"]:
        """Return the layer's output."""
        if not self.clipped:
            return self.linear(x, context)
        bounds = (self.input_min, self.input_max, self.output_min, self.output_max)
        low, high, lowest, highest = (bound[...].astype(x.dtype) for bound in bounds)
        return jnp.clip(self.linear(jnp.clip(x, low, high), context), lowest, highest)


class Gemma4Block(nnx.Module):
    """x + norm(attention(norm(x))), then + norm(mlp(norm(x)))."""

    def __init__(self, config: Gemma4TowerConfig, *, dtype: Any, rngs: nnx.Rngs):
        W, F, H = config.width, config.intermediate, config.head_dim
        linear = partial(ClippedLinear, clipped=config.clipped, std=config.initializer_range, dtype=dtype, rngs=rngs)
        norm = partial(Norm, eps=config.eps, style=config.norm, dtype=dtype)
        projections = {name: linear(W, W) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        self.self_attn = Group(**projections, q_norm=norm(H), k_norm=norm(H))
        self.mlp = Group(gate_proj=linear(W, F), up_proj=linear(W, F), down_proj=linear(F, W))
        self.input_layernorm, self.post_attention_layernorm = norm(W), norm(W)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(W), norm(W)
        self.config = config

    def __call__(self, x: Float[Array, "B P W"], angles: Angles, context: PackedContext) -> Float[Array, "B P W"]:
        """Let the patches of each image see each other."""
        x = x + self.post_attention_layernorm(self._attend(self.input_layernorm(x), angles, context))
        normed, mlp = self.pre_feedforward_layernorm(x), self.mlp
        gate = self.config.activate(mlp.gate_proj(normed, context).astype(jnp.float32)).astype(x.dtype)
        return x + self.post_feedforward_layernorm(mlp.down_proj(gate * mlp.up_proj(normed, context), context))

    def _attend(self, normed: Float[Array, "B P W"], angles: Angles, context: PackedContext) -> Array:
        attention, H = self.self_attn, self.config.head_dim
        projected = (getattr(attention, name)(normed, context) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (y.reshape(*y.shape[:2], -1, H) for y in projected)
        q, k = (_turn(norm(y), angles) for norm, y in ((attention.q_norm, q), (attention.k_norm, k)))
        v = reference_norm(v, jnp.ones(H, v.dtype), self.config.eps)
        q = (q * H**0.5).astype(q.dtype)  # scores have no factor
        attended = packed_attention(q, k, v, context.segments, backend=context.backend)
        return attention.o_proj(attended.reshape(normed.shape), context)


def _turn(x: Float[Array, "B P N H"], angles: Angles) -> Float[Array, "B P N H"]:
    """Turn the first half of each head by a patch's column, and the other by its row."""
    parts = zip(jnp.split(x, 2, axis=-1), jnp.split(angles, 2, axis=-1), strict=True)
    return jnp.concatenate([apply_rope(part, jnp.cos(angle), jnp.sin(angle)) for part, angle in parts], axis=-1)


class Gemma4Vision(Vision):
    """Tower and projector."""

    def __init__(self, config: Gemma4TowerConfig, width: int, *, dtype: Any, rngs: nnx.Rngs):
        W, std = config.width, config.initializer_range
        linear = partial(Linear, bias=False, std=std, dtype=dtype, rngs=rngs)
        table = jax.random.normal(rngs.params(), (2, config.positions, W), dtype) * std
        stored = {"std_bias": Buffer(jnp.zeros(W, dtype)), "std_scale": Buffer(jnp.ones(W, dtype))}
        self.vision_tower = Group(
            **stored if config.standardized else {},
            patch_embedder=Group(
                input_proj=linear(3 * config.patch**2, W),
                position_embedding_table=nnx.Param(table),
            ),
            encoder=Group(layers=nnx.List([Gemma4Block(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)])),
        )
        self.embed_vision = Group(embedding_projection=linear(W, width))
        self.config: Gemma4TowerConfig = config

    def __call__(self, patches: Patches, dtype: Any, *, backend: str = "auto") -> Float[Array, "B I D"]:
        """See `Vision`."""
        tower, config, context = self.vision_tower, self.config, tower_context(patches, backend)
        row, column = patches.places[..., 0], patches.places[..., 1]
        table = tower.patch_embedder.position_embedding_table[...]
        x = tower.patch_embedder.input_proj(self.pixels(patches).astype(dtype), context)
        x = x + (take_rows(table[0], column) + take_rows(table[1], row)).astype(dtype)
        quarter = config.head_dim // 4
        frequencies = jnp.asarray([config.theta ** -(i / quarter) for i in range(quarter)], jnp.float32)
        angles = jnp.concatenate([place[..., None] * frequencies for place in (column, row)], axis=-1)
        x = self.run_blocks(tower.encoder.layers, x, angles, context)
        pooled = x.astype(jnp.float32).reshape(x.shape[0], -1, config.merge**2, x.shape[2]).mean(2)
        pooled = pooled.astype(dtype).astype(jnp.float32) * config.width**0.5
        if config.standardized:
            shift, scale = (stored[...].astype(jnp.float32) for stored in (tower.std_bias, tower.std_scale))
            pooled = (pooled - shift) * scale
        return project(self.embed_vision, pooled.astype(dtype), config.eps, context)


def project(projector: Group, x: Float[Array, "B I W"], eps: float, context: PackedContext) -> Float[Array, "B I D"]:
    """Return the features of normed patches."""
    normed = reference_norm(x, jnp.ones(x.shape[-1], x.dtype), eps)
    return projector.embedding_projection(normed, context)
