"""Qwen's vision towers: learned positions between which a grid interpolates, axial rotation, mergers of 2 × 2."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.linear import Linear
from jaxglue.models.residual import Norm
from jaxglue.models.tower import Group, Parameter, TowerBlock, Vision, axial_angles, tower_context
from jaxglue.models.tower_config import TowerConfig, tower_sizes
from jaxglue.ops.rows import take_rows
from jaxglue.vision.rows import Patches

_THETA = 10_000.0
_SIZES = {
    "width": ("hidden_size", 1152),
    "layers": ("depth", 27),
    "heads": ("num_heads", 16),
    "intermediate": ("intermediate_size", 4304),
    "patch": ("patch_size", 16),
    "merge": ("spatial_merge_size", 2),
    "frames": ("temporal_patch_size", 2),
    "positions": ("num_position_embeddings", 2304),
}
_SECTIONS: dict[str, tuple[int, int, int]] = {
    "qwen3_vl": (24, 20, 20),
    "qwen3_5": (11, 11, 10),
    "qwen3_5_moe": (11, 11, 10),
}
"""Frequencies of the text that turn with time, height and width, where config.json does not say."""


@dataclass(frozen=True, kw_only=True)
class QwenTowerConfig(TowerConfig):
    """Shape of Qwen's tower."""

    frames: int = 2
    """Frames of a patch; an image is all of them."""
    positions: int = 2304
    """Learned positions, a square."""
    theta: float = _THETA
    sections: tuple[int, int, int] = _SECTIONS["qwen3_5"]
    """Frequencies of the text that turn with time, height and width, where its own settings do not say."""
    deepstack: tuple[int, ...] = ()
    """Blocks after each of which the patches are merged to features of a layer of the text."""

    roots = ("visual",)
    projector = "visual.merger", "visual.deepstack_merger_list"
    image_positions = True

    @property
    def layers_seen(self) -> int:
        """See `TowerConfig`."""
        return len(self.deepstack)

    def make(self, config: DecoderConfig, *, dtype: Any, rngs: nnx.Rngs) -> Vision:
        """See `TowerConfig`."""
        return QwenVision(self, config.hidden_size, dtype=dtype, rngs=rngs)

    def within(self, config: DecoderConfig) -> DecoderConfig:
        """See `TowerConfig`."""
        config = super().within(config)
        return replace(config, rope=replace(config.rope, sections=config.rope.sections or self.sections))


def with_tower(raw: Mapping[str, Any], config: DecoderConfig, settings: Mapping[str, Any]) -> DecoderConfig:
    """Return the architecture with the tower of a config.json; raise ValueError for what is not supported."""
    vision = raw["vision_config"]
    sizes = tower_sizes(vision, _SIZES)
    if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ValueError(f"vision_config in config.json: hidden_act {vision['hidden_act']!r:.60} is not supported")
    deepstack = _deepstack(vision, sizes["layers"], config)
    rope = vision.get("rope_parameters") or {}
    if (width := vision.get("out_hidden_size", config.hidden_size)) != config.hidden_size:
        raise ValueError(
            f"vision_config in config.json: out_hidden_size {width} is not the text's {config.hidden_size}"
        )
    settings = {"sections": _SECTIONS[raw["model_type"]], **settings}
    tower = QwenTowerConfig(**sizes, theta=rope.get("rope_theta") or _THETA, deepstack=deepstack, **settings)
    return tower.within(config)


def _deepstack(vision: Mapping[str, Any], blocks: int, config: DecoderConfig) -> tuple[int, ...]:
    """Return the blocks whose output enters the text's layers; raise ValueError for others than blocks in order."""
    stated = vision.get("deepstack_visual_indexes") or ()
    are_blocks = isinstance(stated, list | tuple) and all(type(i) is int and 0 <= i < blocks for i in stated)
    if not are_blocks or list(stated) != sorted(set(stated)) or len(stated) > config.num_hidden_layers:
        raise ValueError(
            f"vision_config in config.json: deepstack_visual_indexes must be blocks in order, at most one for each of "
            f"the text's layers, got {stated!r:.100}"
        )
    return tuple(stated)


class Merger(nnx.Module):
    """Two linear layers over patches that are neighbors; their norm is of each patch, or of them together."""

    def __init__(self, config: QwenTowerConfig, width: int, *, together: bool, dtype: Any, rngs: nnx.Rngs):
        joined = config.width * config.merge**2
        linear = partial(Linear, bias=True, std=config.initializer_range, dtype=dtype, rngs=rngs)
        self.norm = Norm(joined if together else config.width, config.eps, style=config.norm, dtype=dtype)
        self.linear_fc1, self.linear_fc2 = linear(joined, joined), linear(joined, width)
        self.together, self.merged = together, config.merge**2

    def __call__(self, x: Float[Array, "B P W"], context: PackedContext) -> Float[Array, "B I D"]:
        """Return a feature of each group of patches."""
        x = x if self.together else self.norm(x)
        x = x.reshape(x.shape[0], -1, x.shape[2] * self.merged)
        hidden = self.linear_fc1(self.norm(x) if self.together else x, context)
        return self.linear_fc2(jax.nn.gelu(hidden, approximate=False), context)


class QwenVision(Vision):
    """Tower and merger, under `visual`."""

    def __init__(self, config: QwenTowerConfig, width: int, *, dtype: Any, rngs: nnx.Rngs):
        W, std = config.width, config.initializer_range
        merger = partial(Merger, config, width, dtype=dtype, rngs=rngs)
        shape = W, 3, config.frames, config.patch, config.patch
        self.visual = Group(
            patch_embed=Group(proj=Parameter(shape, std, bias=W, dtype=dtype, rngs=rngs)),
            pos_embed=Parameter((config.positions, W), std, dtype=dtype, rngs=rngs),
            blocks=nnx.List([TowerBlock(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)]),
            merger=merger(together=False),
            deepstack_merger_list=nnx.List([merger(together=True) for _ in config.deepstack]),
        )
        self.config: QwenTowerConfig = config

    def __call__(self, patches: Patches, dtype: Any, *, backend: str = "auto") -> Float[Array, "B I D"]:
        """See `Vision`."""
        visual, context = self.visual, tower_context(patches, backend)
        x = self.convolve(patches, visual.patch_embed.proj, dtype) + self._positions(patches).astype(dtype)
        quarter = self.config.head_dim // 4
        frequencies = jnp.asarray([self.config.theta ** -(i / quarter) for i in range(quarter)], jnp.float32)
        angles, features = axial_angles(patches, (frequencies, frequencies)), list[Array]()
        ends = [index + 1 for index in self.config.deepstack]
        blocks = list(visual.blocks)
        for start, end, merger in zip([0, *ends], ends, visual.deepstack_merger_list, strict=False):
            x = self.run_blocks(blocks[start:end], x, angles, context)
            features.append(merger(x, context))
        x = self.run_blocks(blocks[ends[-1] if ends else 0 :], x, angles, context)
        return jnp.concatenate([visual.merger(x, context), *features], axis=-1)

    def _positions(self, patches: Patches) -> Float[Array, "B P W"]:
        """Return the learned positions between which a patch lies: an image's corners are those of the square."""
        side = int(self.config.positions**0.5)
        table = self.visual.pos_embed.weight[...].astype(jnp.float32)
        taps = [_taps(patches.places[..., axis], patches.places[..., 2 + axis], side) for axis in (0, 1)]
        parts = [
            take_rows(table, row * side + column) * (height * width)[..., None]
            for row, height in taps[0]
            for column, width in taps[1]
        ]
        return jnp.stack(parts).sum(0)


def _taps(place: Array, count: Array, side: int) -> list[tuple[Array, Array]]:
    """Return the two learned positions around each place on an axis, and their weights."""
    at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(count - 1, 1).astype(jnp.float32)
    low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, side - 1)
    part = at - low
    return [(low, 1 - part), (jnp.minimum(low + 1, side - 1), part)]
