"""Gemma 3's vision tower, SigLIP: learned positions, and a projector of pooled patches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.residual import Norm
from jaxglue.models.tower import Group, Parameter, TowerBlock, Vision, tower_context
from jaxglue.models.tower_config import BlockNames, TowerConfig, tower_sizes
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.ops.rows import take_rows
from jaxglue.vision.rows import Patches

_SIZES = {
    "width": ("hidden_size", 1152),
    "layers": ("num_hidden_layers", 27),
    "heads": ("num_attention_heads", 16),
    "intermediate": ("intermediate_size", 4304),
    "patch": ("patch_size", 14),
    "image": ("image_size", 896),
}
_GEMMA_NORM = NormStyle(offset=1.0, rounds_first=False)


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(TowerConfig):
    """Shape of Gemma 3's tower."""

    image: int = 896
    """Pixels of each side of an image."""

    names = BlockNames(
        before_attention="layer_norm1",
        attention="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        output="out_proj",
        before_mlp="layer_norm2",
        up=("fc1",),
        down="fc2",
    )
    roots = ("vision_tower", "multi_modal_projector")
    projector = ("multi_modal_projector",)

    @property
    def spans(self) -> Literal["none", "windows", "all"]:
        """See `TowerConfig`."""
        return "all"

    def make(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs) -> Vision:
        """See `TowerConfig`."""
        return SiglipVision(self, config.hidden_size, dtype=dtype, rngs=rngs)

    def initial(self, name: str, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """See `TowerConfig`; the projector's norm multiplies by 1 + its weight."""
        zero = name.endswith("mm_soft_emb_norm.weight")
        return jnp.zeros(spec.shape, spec.dtype) if zero else super().initial(name, spec)


def with_tower(raw: Mapping[str, Any], config: DecoderConfig, settings: Mapping[str, Any]) -> DecoderConfig:
    """Return the architecture with the tower of a config.json; raise ValueError for what is not supported."""
    vision = raw["vision_config"]
    sizes = tower_sizes(vision, _SIZES)
    if vision.get("vision_use_head"):
        raise ValueError("vision_config in config.json: vision_use_head is not supported")
    side, tokens = sizes["image"] // sizes["patch"], raw.get("mm_tokens_per_image") or 256
    merge = side // int(tokens**0.5)
    return SiglipConfig(**sizes, merge=merge, eps=vision.get("layer_norm_eps") or 1e-6, **settings).within(config)


class Projector(nnx.Module):
    """The norm of pooled patches, and a matrix [W, D] that is a parameter by itself."""

    def __init__(self, config: TowerConfig, width: int, *, dtype: Any, rngs: nnx.Rngs):
        std, shape = config.initializer_range, (config.width, width)
        self.mm_input_projection_weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * std)
        self.mm_soft_emb_norm = Norm(config.width, config.eps, style=_GEMMA_NORM, dtype=dtype)

    def __call__(self, pooled: Float[Array, "B I W"]) -> Float[Array, "B I D"]:
        """Return the features of pooled patches."""
        normed, weight = self.mm_soft_emb_norm(pooled), self.mm_input_projection_weight[...].astype(pooled.dtype)
        return jnp.matmul(normed, weight, preferred_element_type=jnp.float32).astype(pooled.dtype)


class SiglipVision(Vision):
    """Tower and projector."""

    def __init__(self, config: SiglipConfig, width: int, *, dtype: Any, rngs: nnx.Rngs):
        W, std, p = config.width, config.initializer_range, config.patch
        makes: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.vision_tower = Group(
            embeddings=Group(
                patch_embedding=Parameter((W, 3, p, p), std, bias=W, **makes),
                position_embedding=Parameter(((config.image // p) ** 2, W), std, **makes),
            ),
            encoder=Group(layers=nnx.List([TowerBlock(config, **makes) for _ in range(config.layers)])),
            post_layernorm=Norm(W, config.eps, style=config.norm, dtype=dtype),
        )
        self.multi_modal_projector = Projector(config, width, **makes)
        self.config: SiglipConfig = config

    def __call__(self, patches: Patches, dtype: Any, *, backend: str = "auto") -> Float[Array, "B I D"]:
        """See `Vision`."""
        tower, config = self.vision_tower, self.config
        x = self.convolve(patches, tower.embeddings.patch_embedding, dtype)
        places = patches.places[..., 0] * (config.image // config.patch) + patches.places[..., 1]
        x = x + take_rows(tower.embeddings.position_embedding.weight[...], places).astype(dtype)
        x = tower.post_layernorm(self.run_blocks(tower.encoder.layers, x, None, tower_context(patches, backend)))
        pooled = x.astype(jnp.float32).reshape(x.shape[0], -1, config.merge**2, x.shape[2]).mean(2)
        return self.multi_modal_projector(pooled.astype(dtype))
