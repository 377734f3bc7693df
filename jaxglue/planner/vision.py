"""Time and memory of a vision tower, by its shape: nothing is traced."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxglue.models.config import DecoderConfig
from jaxglue.models.tower_config import TowerConfig
from jaxglue.ops.attention.tiles import tile_columns
from jaxglue.planner import calibration as fitted
from jaxglue.planner.gpus import Gpu
from jaxglue.planner.workload import Workload

_ROW = 8192
"""Patches of a row of images that a frozen tower takes at once."""
_HEADS = 64, 128, 256
"""Columns of heads whose rates are known."""
_BYTES = 2
"""Of an activation."""


@dataclass(frozen=True)
class TowerCost:
    """Cost of an image of so many patches."""

    config: DecoderConfig
    patches: int

    @property
    def tower(self) -> TowerConfig:
        """Return the tower's shape."""
        assert self.config.vision is not None
        return self.config.vision

    @property
    def tokens(self) -> int:
        """Return the features of the image."""
        return self.patches // self.tower.merge**2

    @property
    def flops(self) -> tuple[float, float]:
        """Return FLOPs of linear layers and of attention, forward."""
        W, F, L, P = self.tower.width, self.tower.intermediate, self.tower.layers, self.patches
        joined, D = W * self.tower.merge**2, self.config.hidden_size
        ups = len(self.tower.names.up)
        linear = 2.0 * P * (L * (4 * W * W + (1 + ups) * W * F) + 3 * self.tower.patch**2 * W)
        return linear + 2.0 * self.tokens * joined * (joined + D), 4.0 * L * P * P * W

    def seconds(self, gpu: Gpu) -> float:
        """Return the time of an image, by the rates of a text's layers: matmuls, attention, and bytes between them."""
        tower, P = self.tower, self.patches
        linear, attention = self.flops
        first, rest = tile_columns(tower.head_dim, tower.head_dim)
        columns = (first + rest) * fitted.TWO_PARTS if rest else first
        rate = fitted.ATTENTION["short", next((size for size in _HEADS if columns <= size), _HEADS[-1])].forward
        # Dimensions that fill a tile of heads cost as others do; every patch sees all of its image.
        attended = attention * (columns / tower.head_dim) * (1 + rate.waste / P) / (rate.share * gpu.matmul)
        # Of a block: two norms, two sums with their input, turned queries and keys, and the hidden layer's activation.
        moved = P * (14 * tower.width + (1 + len(tower.names.up)) * tower.intermediate) * _BYTES
        return linear / gpu.matmul + attended + tower.layers * moved / gpu.copy

    def feature_bytes(self, dtype) -> int:
        """Return the bytes of the image's features."""
        return self.tokens * self.tower.feature_width(self.config.hidden_size) * jnp.dtype(dtype).itemsize


def tower_seconds(workload: Workload, gpu: Gpu) -> float:
    """Return the time of a tower that runs in each step, for a micro-batch on a GPU; 0 without one.

    For gradients to its projector it runs a second time, after the text. Where all of it trains, its blocks run once
    more then, and their gradients take twice as long as the forward pass, or three times where weights have some.
    """
    if workload.tower is None or workload.config.vision is None:
        return 0.0
    passes = {"none": 1, "projector": 2, "all": 5 if workload.lora is not None else 6}[workload.config.vision.trains]
    images = workload.tower.images * workload.batch_size * workload.seq_len
    image = TowerCost(workload.config, round(workload.tower.patches)).seconds(gpu)
    return fitted.TOWER_IN_STEPS * passes * images * image


def tower_block(config: DecoderConfig, dtype, patches: int = _ROW) -> int:
    """Return the bytes of values in a block of a tower at work, by default on a row of those that run once."""
    tower, size = config.vision, jnp.dtype(dtype).itemsize
    if tower is None:
        return 0
    # Its input and norm, queries, keys and values, turned ones, the hidden layer in float32 and again.
    return patches * (8 * tower.width * size + tower.intermediate * (4 + size * len(tower.names.up)))


def tower_in_steps(workload: Workload) -> int:
    """Return the bytes of a tower's values in a step, where it runs: the text's are not there yet, or any more."""
    tower = workload.config.vision
    if tower is None or (workload.tower is None and tower.trains == "none"):
        return 0
    patches = workload.tokens * tower.merge**2
    block = tower_block(workload.config, workload.dtype, patches)
    if tower.trains == "none":
        return block
    inputs = patches * tower.width * jnp.dtype(workload.dtype).itemsize * tower.layers
    return 3 * block + (inputs if tower.trains == "all" else 0)


def feature_bytes(config: DecoderConfig, tokens: int, dtype) -> int:
    """Return the bytes of images' features in full rows of a micro-batch, which are there while the text's values are.

    Args:
        config: with the tower.
        tokens: of a micro-batch.
        dtype: of activations.
    """
    tower = config.vision
    if tower is None:
        return 0
    features = 2 * tower.feature_width(config.hidden_size) + tower.layers_seen * config.hidden_size
    return tokens * features * jnp.dtype(dtype).itemsize
