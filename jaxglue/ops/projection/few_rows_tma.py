"""Launches of the Gluon kernel of few rows, and its tiles."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
from jax_triton.triton_lib import TensorDescriptor
from jaxtyping import Array, Float
from triton.experimental.gluon.language import NVMMASharedLayout

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.projection import few_rows_hopper as hopper
from jaxglue.ops.projection.few_rows_operands import FewRows
from jaxglue.ops.tile_ring import GROUP_ROWS

_SLAB = GROUP_ROWS.value
_PROGRAMS = 132
_LINE = 128
"""Bytes of a row in a step, which shared memory's swizzle allows."""
_SHARED = 225 << 10
"""Bytes of shared memory for tiles."""
_MOST_STAGES = 6
_LARGEST_TILE = 256


@dataclass(frozen=True, kw_only=True)
class HopperTiles:
    """How the weights' slabs of 64 rows are shared out."""

    groups: int
    """Slabs of a tile, each of which has a warpgroup: 2 or 3."""
    splits: int = 1
    """Parts of the sums of all tiles but the first `whole`."""
    whole: int = 0
    stages: int | None = None
    """Steps loaded ahead; as many as shared memory holds by default."""


@dataclass(frozen=True, kw_only=True)
class HopperFewRows(Launcher):
    """Projections of few rows, of weights in 16 bits or e4m3, without adapters."""

    tiles: HopperTiles | None = None
    """Tiles; None takes those measured."""

    def project(self, operands: FewRows, stream: Float[Array, "M N"] | None) -> list[Float[Array, "M N"]]:
        """Return the products, biases included, of one weight with the stream added."""
        return self._multiply(operands, stream, activation=None)

    def gate(self, operands: FewRows, activation: str) -> Float[Array, "M N"]:
        """Return activation(gate) · up of two weights."""
        return self._multiply(operands, None, activation=activation)[0]

    def _multiply(self, operands: FewRows, stream, *, activation: str | None) -> list[Float[Array, "M N"]]:
        (M, K), gated, itemsize = operands.x.shape, activation is not None, operands.x.dtype.itemsize
        sizes = [len(weight) for weight in operands.weights]
        block_m, block_k = min(_LARGEST_TILE, max(16, triton.next_power_of_2(M))), _LINE // itemsize
        layout = NVMMASharedLayout(_LINE, 8 * itemsize, rank=2)
        slabs, token_tiles, steps = sum(sizes) // _SLAB, triton.cdiv(M, block_m), triton.cdiv(K, block_k)
        tiles = self.tiles or choose_tiles(slabs, token_tiles, steps, block_m)
        count = triton.cdiv(slabs, tiles.groups)
        split = tiles.splits > 1
        units = (tiles.whole + (count - tiles.whole) * tiles.splits if split else count) * token_tiles
        stage = (block_m + tiles.groups * _SLAB) * _LINE
        constants = {
            "M": M,
            **{f"N_{i}": size for i, size in enumerate((*sizes, 0, 0)[:3])},
            "GATED": gated,
            "GELU": activation == "gelu_tanh",
            "GROUPS": tiles.groups,
            "SLABS": slabs,
            "TOKEN_TILES": token_tiles,
            "WHOLE": tiles.whole if split else count,
            "SPLITS": tiles.splits,
            "STEPS": steps,
            "UNITS": units,
            "PROGRAMS": min(_PROGRAMS, units),
            "STAGES": tiles.stages or min(_SHARED // stage, _MOST_STAGES),
        }
        described = lambda array, rows: TensorDescriptor.from_array(array, (rows, block_k), layout)  # noqa: E731
        rows = hopper.BAND.value if gated else _SLAB
        outs = [jax.new_ref(jax.lax.empty((M, size), operands.dtype)) for size in sizes[: 1 if gated else None]]
        left = (count - tiles.whole) * tiles.groups * token_tiles if split else 0
        arrays = (
            described(operands.x, block_m),
            *_three([described(weight, rows) for weight in operands.weights], fill=True),
            operands.x_scales,
            *_three(operands.scales or ()),
            *_three(operands.biases or ()),
            stream,
            jnp.zeros(max(2 * left, 1), jnp.int32),
            jax.new_ref(jax.lax.empty((max(left * tiles.splits * _SLAB * block_m, 1),), jnp.float32)),
            *_three(outs),  # not one several times: each would be a copy of its own
        )
        moved = sum(weight.size * itemsize for weight in operands.weights) + M * K * itemsize
        moved += M * sum(sizes[: 1 if gated else None]) * jnp.dtype(operands.dtype).itemsize
        flops = 2 * token_tiles * block_m * K * sum(sizes)
        cost = KernelCost(kind=KernelKind.ROWS, flops=flops, bytes=moved)
        self._launch(hopper.hopper_kernel, arrays, (), (constants["PROGRAMS"],), constants, cost=cost)
        return [jax.freeze(out) for out in outs]


def _three(arrays, *, fill: bool = False) -> tuple:
    """Return three arguments: the arrays, and None, or the first again, for those that are not there."""
    absent = arrays[0] if fill else None
    return (*arrays, absent, absent, absent)[:3]


def choose_tiles(slabs: int, token_tiles: int, steps: int, block_m: int) -> HopperTiles:
    """Return the tiles by which the busiest program moves the fewest bytes to and from its multiprocessor."""
    found = []
    for groups, splits in itertools.product((3, 2), (1, 2, 3, 4, 6, 8)):
        count = -(-slabs // groups)
        full = count * token_tiles // _PROGRAMS * _PROGRAMS // token_tiles
        for whole in {0, full} if splits > 1 else {count}:
            turns = -(-whole * token_tiles // _PROGRAMS)
            parts = -(-(count - whole) * splits * token_tiles // _PROGRAMS)
            loads = (turns * steps + parts * -(-steps // splits)) * (block_m + groups * _SLAB) * _LINE
            sums = parts * groups * _SLAB * block_m * 8  # written and read in float32
            tiles = HopperTiles(groups=groups, splits=splits, whole=whole if splits > 1 else 0)
            found.append((loads + sums, splits, -groups, tiles))
    return min(found, key=lambda entry: entry[:3])[3]
