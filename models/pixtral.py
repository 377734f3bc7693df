"""Mistral 3's vision tower, Pixtral: axial rotation, gated feed-forwards, and a projector that merges 2 × 2 patches."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.linear import Linear
from jaxglue.models.residual import Norm
from jaxglue.models.tower import Group, Parameter, TowerBlock, Vision, axial_angles, tower_context
from jaxglue.models.tower_config import BlockNames, TowerConfig, tower_sizes
from jaxglue.ops.norm_rope import LLAMA_NORM
from jaxglue.vision.rows import Patches

_SIZES = {
    "width": ("hidden_size", 1024),
    "layers": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 16),
    "intermediate": ("intermediate_size", 4096),
    "patch": ("patch_size", 14),
}
_ACTIVATIONS: dict[str, Any] = {"gelu": partial(jax.nn.gelu, approximate=False), "silu": jax.nn.silu}


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(TowerConfig):
    """Shape of Mistral 3's tower."""

    theta: float = 10_000.0
    act: str = "gelu"
    projector_bias: bool = False
    projector_eps: float = 1e-5
    names = BlockNames(
        before_attention="attention_norm",
        attention="attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        output="o_proj",
        before_mlp="ffn_norm",
        mlp="feed_forward",
        up=("gate_proj", "up_proj"),
        down="down_proj",
    )
    norm = LLAMA_NORM
    bias = False
    roots = ("vision_tower", "multi_modal_projector")
    projector = ("multi_modal_projector",)

    def activate(self, x: Array) -> Array:
        """See `TowerConfig`."""
        return _ACTIVATIONS[self.act](x)

    def make(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs) -> Vision:
        """See `TowerConfig`."""
        return PixtralVision(self, config.hidden_size, dtype=dtype, rngs=rngs)


def with_tower(raw: Mapping[str, Any], config: DecoderConfig, settings: Mapping[str, Any]) -> DecoderConfig:
    """Return the architecture with the tower of a config.json; raise ValueError for what is not supported."""
    vision = raw["vision_config"]
    sizes = tower_sizes(vision, _SIZES)
    act, layer = vision.get("hidden_act") or "gelu", raw.get("vision_feature_layer", -1)
    if act not in _ACTIVATIONS or (raw.get("projector_hidden_act") or "gelu") != "gelu" or layer != -1:
        raise ValueError(
            "config.json: of Mistral 3's tower only hidden_act gelu or silu, projector_hidden_act gelu and "
            "vision_feature_layer -1 are supported"
        )
    head_dim = vision.get("head_dim") or sizes["width"] // sizes["heads"]
    if head_dim * sizes["heads"] != sizes["width"]:
        raise ValueError(f"vision_config in config.json: heads of {head_dim} are not supported")
    rope = vision.get("rope_parameters") or {}
    tower = PixtralConfig(
        **sizes,
        merge=raw.get("spatial_merge_size") or 2,
        eps=1e-5,
        theta=float(rope.get("rope_theta") or vision.get("rope_theta") or 10_000.0),
        act=act,
        projector_bias=bool(raw.get("multimodal_projector_bias")),
        projector_eps=config.rms_norm_eps,
        **settings,
    )
    return tower.within(config)


class PixtralVision(Vision):
    """Tower and projector."""

    def __init__(self, config: PixtralConfig, width: int, *, dtype: Any, rngs: nnx.Rngs):
        W, std, p = config.width, config.initializer_range, config.patch
        makes: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        linear: Any = partial(Linear, std=std, **makes)
        self.vision_tower = Group(
            patch_conv=Parameter((W, 3, p, p), std, **makes),
            ln_pre=Norm(W, config.eps, style=config.norm, dtype=dtype),
            transformer=Group(layers=nnx.List([TowerBlock(config, **makes) for _ in range(config.layers)])),
        )
        self.multi_modal_projector = Group(
            norm=Norm(W, config.projector_eps, style=LLAMA_NORM, dtype=dtype),
            patch_merger=Group(merging_layer=linear(W * config.merge**2, W, bias=False)),
            linear_1=linear(W, width, bias=config.projector_bias),
            linear_2=linear(width, width, bias=config.projector_bias),
        )
        self.config: PixtralConfig = config

    def __call__(self, patches: Patches, dtype: Any, *, backend: str = "auto") -> Float[Array, "B I D"]:
        """See `Vision`."""
        tower, projector, config = self.vision_tower, self.multi_modal_projector, self.config
        context = tower_context(patches, backend)
        x = tower.ln_pre(self.convolve(patches, tower.patch_conv, dtype))
        half = config.head_dim // 2
        frequencies = [
            jnp.asarray([config.theta ** -(i / half) for i in range(k, half, 2)], jnp.float32) for k in (0, 1)
        ]
        x = self.run_blocks(
            tower.transformer.layers, x, axial_angles(patches, (frequencies[0], frequencies[1])), context
        )
        normed = projector.norm(x).reshape(x.shape[0], -1, config.merge**2, x.shape[2])
        merged = jnp.swapaxes(normed, 2, 3).reshape(x.shape[0], normed.shape[1], -1)  # channels are the outer axis
        hidden = projector.linear_1(projector.patch_merger.merging_layer(merged, context), context)
        return projector.linear_2(jax.nn.gelu(hidden, approximate=False), context)
