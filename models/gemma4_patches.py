"""Gemma 4 12B's images: large patches, normed and projected, without a tower."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.gemma4_vision import is_bidirectional, project
from jaxglue.models.linear import Linear
from jaxglue.models.residual import Norm
from jaxglue.models.tower import Group, Vision, tower_context
from jaxglue.models.tower_config import TowerConfig, tower_sizes
from jaxglue.ops.norm_rope import LAYER_NORM
from jaxglue.ops.rows import take_rows
from jaxglue.vision.rows import Patches

_SIZES = {
    "width": ("mm_embed_dim", 3840),
    "patch": ("patch_size", 16),
    "pooled": ("pooling_kernel_size", 3),
    "positions": ("mm_posemb_size", 1120),
}
_EPS = 1e-5
"""Of the norms around the projection to `width`, which no config.json says."""


@dataclass(frozen=True, kw_only=True)
class PatchesConfig(TowerConfig):
    """Shape of Gemma 4 12B's projection of patches."""

    positions: int = 1120
    """Learned positions of each axis."""
    bidirectional: bool = False
    """An image's tokens see later ones of it."""

    norm = LAYER_NORM
    roots = ("vision_embedder", "embed_vision")
    projector = ("vision_embedder", "embed_vision")

    @property
    def spans(self) -> Literal["none", "windows", "all"]:
        """See `TowerConfig`."""
        return "windows" if self.bidirectional else "none"

    def make(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs) -> Vision:
        """See `TowerConfig`."""
        return PatchesVision(self, config.hidden_size, dtype=dtype, rngs=rngs)


def with_patches(raw: Mapping[str, Any], config: DecoderConfig, settings: Mapping[str, Any]) -> DecoderConfig:
    """Return the architecture with the projection of a config.json; raise ValueError for what is not supported."""
    vision = raw["vision_config"]
    sizes = tower_sizes(vision, _SIZES, heads=False)
    tower = PatchesConfig(
        width=sizes["width"],
        patch=sizes["patch"] * sizes["pooled"],
        positions=sizes["positions"],
        merge=1,
        layers=0,
        heads=1,
        intermediate=0,
        eps=vision.get("rms_norm_eps") or 1e-6,
        bidirectional=is_bidirectional(raw),
        **settings,
    )
    return tower.within(config)


class PatchesVision(Vision):
    """The projection, and that to the text's width."""

    def __init__(self, config: PatchesConfig, width: int, *, dtype: Any, rngs: nnx.Rngs):
        W, C, std = config.width, 3 * config.patch**2, config.initializer_range
        norm = partial(Norm, eps=_EPS, style=config.norm, dtype=dtype)
        linear = partial(Linear, std=std, dtype=dtype, rngs=rngs)
        table = jax.random.normal(rngs.params(), (config.positions, 2, W), dtype) * std
        self.vision_embedder = Group(
            patch_ln1=norm(C),
            patch_dense=linear(C, W, bias=True),
            patch_ln2=norm(W),
            pos_embedding=nnx.Param(table),
            pos_norm=norm(W),
        )
        self.embed_vision = Group(embedding_projection=linear(W, width, bias=False))
        self.config: PatchesConfig = config

    def __call__(self, patches: Patches, dtype: Any, *, backend: str = "auto") -> Float[Array, "B I D"]:
        """See `Vision`."""
        parts, context = self.vision_embedder, tower_context(patches, backend)
        pixels = (patches.values.astype(jnp.float32) * jnp.float32(1 / 255)).astype(dtype)
        x = parts.patch_ln2(parts.patch_dense(parts.patch_ln1(pixels), context))
        table, (row, column) = parts.pos_embedding[...], (patches.places[..., axis] for axis in (0, 1))
        x = x + (take_rows(table[:, 0], column) + take_rows(table[:, 1], row)).astype(dtype)
        return project(self.embed_vision, parts.pos_norm(x), self.config.eps, context)
