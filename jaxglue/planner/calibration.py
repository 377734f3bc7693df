"""Every number of the planner that was fitted to measurements: value, unit, GPU, and the measurement.

Rates of a data sheet are in `gpus`, and choices of ours beside the code that makes them.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxglue.ops.kernel_cost import KernelKind

_GIB = 2**30


class Fitted(float):
    """A number with its unit, the GPUs on which it was measured, and by what."""

    unit: str
    gpu: str
    method: str

    def __new__(cls, value: float, unit: str, gpu: str, method: str) -> "Fitted":
        """Return the number with its record."""
        self = super().__new__(cls, value)
        self.unit, self.gpu, self.method = unit, gpu, method
        return self

    def __getnewargs__(self) -> tuple[float, str, str, str]:  # type: ignore[override]
        return float(self), self.unit, self.gpu, self.method


_BOTH, _UNRECORDED = "H100, H200", "measured once, not recorded"
_grid = partial(Fitted, gpu=_BOTH, method="benchmarks/planner.py --grid, seeds 1 to 13")
_steps = partial(Fitted, gpu="H200", method="benchmarks/results/sft_step.json")
_lengths = partial(Fitted, gpu=_BOTH, method="benchmarks/results/attention_lengths.json, docs/attention.md")
_long = partial(Fitted, gpu="H200", method="benchmarks/results/attention_hopper.json")
_wide = partial(Fitted, gpu="H100", method="benchmarks/results/attention_wide.json")

# GPUs: shares of the data sheet's rates (`gpus`).
MATMUL_SHARE = _grid(0.69, "of the data sheet's FLOP/s")
"""Rate of a layer's matmuls: 680 of 989 TFLOP/s, whose power lowers the clock (790 in a single large one)."""
H100_MATMUL_SHARE = Fitted(0.705, "of the data sheet's FLOP/s", "H100", "benchmarks/planner.py --grid, seeds 1 to 13")
"""The same of an H100, whose slower memory leaves matmuls more power."""
SUSTAINED = _grid(0.89, "of a single large matmul's FLOP/s")
"""Rate that a layer's matmuls sustain, where a GPU is measured."""
COPY_SHARE = _grid(0.87, "of the data sheet's bytes/s")
"""Rate at which kernels read and write memory: 4.2 of 4.8 TB/s."""
H100_COPY_SHARE = Fitted(0.91, "of the data sheet's bytes/s", "H100", "benchmarks/planner.py --grid, seeds 1 to 13")
PEER_SHARE = Fitted(0.7, "of the data sheet's bytes/s", "H200", _UNRECORDED)
"""Rate of collectives."""
TOWER_IN_STEPS = Fitted(1.35, "of the time of its images by the text's rates", "H200", "vision_planner_others.json")
"""Time of a vision tower that runs in each step: its rows have room for the images of the fullest."""
TWO_PARTS = Fitted(1.28, "of the time of one tile of as many columns", "H200", "attention_images.json")
"""Time of attention whose heads have a tile of two parts: those of 72 columns take 80% of one of 128."""
FP8_GAIN = Fitted(1430 / 692, "of bf16 FLOP/s", "H200", "matmuls in a step")
"""Rate of FP8 matmuls in a step."""
FEW_VALUES_GAIN = _grid(1.03, "of bf16 FLOP/s")
"""Rate of matmuls with NF4's weights: 16 values in a block draw less power."""
LINK_SHARE = _grid(0.85, "of the link's bytes/s")
"""Rate of copies between host and device that a plan counts on: both directions wait for each other."""
FILES_RATE = Fitted(25e9, "bytes/s", "H200", "`rates.measure_files`, 16 cores")
"""Rate of mapped files in the page cache."""
CALL = Fitted(28e-6, "s", "H200", "`rates.measure_dispatch`")
ARRAY = Fitted(1.4e-6, "s", "H200", "`rates.measure_dispatch`")
COPY = Fitted(30e-6, "s", "H200", "`rates.measure_dispatch`")
"""Host's time to call a program, for each further array of it, and for each array that is copied."""

# Kernels (`cost`).
KERNEL_GAP = _grid(0.3e-6, "s")
"""Time between kernels."""
SHORTEST_KERNEL = _grid(0.8e-6, "s")
MATMUL_START = _grid(3.3e-6, "s")
"""Time in which a matmul starts and ends."""
UNHEATED = _grid(0.8, "of a long matmul's time")
"""Time of a short one's rest: rates are those of long ones, whose power lowers the clock."""
LOOP_TURN = _steps(1.1e-6, "s")
"""Time of a turn of a kernel's loop."""
CODES_RATE = _grid(0.83e12, "codes/s")
"""8-bit codes that XLA converts, where memory is not slower."""
KERNEL_SHARE = _steps(0.92, "of `Gpu.copy`")
"""Rate at which our kernels, and matmuls bound by memory, move their bytes; XLA's own do at all of it."""
KIND_SHARES = {
    KernelKind.ADAPTER_GRADIENTS: _steps(0.73, "of `Gpu.copy`"),
    KernelKind.DELTA_RULE: Fitted(0.55, "of `Gpu.copy`", "H100", "benchmarks/delta_rule.py"),
}
"""The same by kind: that of adapters' gradients keeps sums of all ranks, the delta rule's wait for their matmuls."""
FP8_SHARE = _grid(0.55, "of `Gpu.copy`")
"""The same of kernels that read or write FP8 values."""
MOST_MOVED = {
    KernelKind.MXFP4: _grid(3.4e12, "bytes/s"),
    KernelKind.EXPERTS_MATMUL: _grid(3.8e12, "bytes/s"),
}
"""Bytes that kernels move, where memory is not slower."""
EXPERTS_SHARE = _grid(0.9, "of `Gpu.matmul`")
"""Rate of experts' matmuls."""

# Attention (`attention`).


class AttentionRate(NamedTuple):
    """Speed of a pass: time is linear in visible pairs and in tokens."""

    share: float
    """Share of the matmul rate at which visible pairs are computed."""
    waste: float
    """Pairs computed for each token besides the visible ones: masked parts of tiles, and loops' starts."""


class AttentionRates(NamedTuple):
    """Rates of a kernel's forward and backward passes."""

    forward: AttentionRate
    backward: AttentionRate


class TileRates(NamedTuple):
    """Speed of the programs of a Hopper kernel."""

    share: float
    """Share of the matmul rate at which tiles are multiplied."""
    start: float
    """Seconds in which a program starts and ends."""
    moved: float = 0
    """Bytes moved beside it for each element of queries: products with the output, float32 sums and their rounding."""


def _rate(share: float, waste: float, fitted: Callable[..., Fitted] = _lengths) -> AttentionRate:
    return AttentionRate(fitted(share, "of `Gpu.matmul`"), fitted(waste, "pairs a token"))


def _tiles(share: float, start: float, moved: float = 0, fitted: Callable[..., Fitted] = _long) -> TileRates:
    return TileRates(fitted(share, "of `Gpu.matmul`"), fitted(start, "s"), moved)


ATTENTION = {
    ("short", 64): AttentionRates(_rate(0.62, 190), _rate(0.55, 120)),
    ("short", 128): AttentionRates(_rate(0.66, 150), _rate(0.60, 140)),
    ("long", 128): AttentionRates(_rate(0.70, 400), _rate(0.57, 250)),
    ("cudnn", 128): AttentionRates(_rate(0.82, 490), _rate(0.76, 400)),
    ("short", 256): AttentionRates(_rate(0.67, 160, _wide), _rate(0.385, 230, _wide)),
    ("long", 256): AttentionRates(_rate(0.67, 160, _wide), _rate(0.40, 250, _wide)),
    ("cudnn", 256): AttentionRates(_rate(0.86, 490, _wide), _rate(0.53, 400, _wide)),
}
"""Rates by kernel and largest head dim: Triton kernels with tiles for short and long documents, and cuDNN's. In whole
steps, where power limits long passes to nine tenths of their rate alone."""
ATTENTION_START = _lengths(3e-6, "s")
"""Time in which a program of a Triton kernel starts and ends."""
KEYS_TURN = _lengths(0.65e-6 / 32, "s")
"""Its time for a key of its queries, with a head dim of 128."""
ROWS_TURN = _lengths(1.15e-6 / 64, "s")
"""Its time for a query row of its keys, with a head dim of 128."""
HOPPER_FORWARD = {64: _tiles(0.68, 4e-6), 128: _tiles(0.94, 3e-6), 256: _tiles(0.94, 4e-6, fitted=_wide)}
HOPPER_BACKWARD = {64: _tiles(0.62, 6e-6, 8), 128: _tiles(0.83, 4e-6, 12)}
"""Rates by head dim."""
HOPPER_PARTED = _long(0.94, "of the backward pass's rate")
"""Rate of the backward pass where a token's query heads do not fit a tile."""

# Host (`step`): the unit of most is a rate that is measured on every host (`gpus.Dispatch`).
ENDS = _grid(36.0, "calls")
"""To dispatch embedding and head."""
PASS = _grid(4.0, "calls")
"""To dispatch a layer's pass."""
KERNEL = _grid(0.11, "calls")
"""For each of its kernels."""
GROUPED_KERNEL = _grid(0.14, "calls")
"""For each kernel of one of several programs of layers, whose CUDA graphs get other addresses in turn."""
WHOLE = _grid(10.0, "calls")
"""To dispatch a micro-batch's only program."""
WHOLE_TRAINABLE = _grid(3.0, "arrays")
"""For each trainable array of it that is taken or returned."""
WHOLE_FROZEN = _grid(0.75, "arrays")
"""For each frozen one, which is only read."""
LAYER_ARRAY = _grid(0.85, "arrays")
"""For each array of a layer's program."""
STREAMED_LAYER = _grid(12.0, "calls")
"""To request copies of a layer's weights."""
STREAMED_ARRAY = _grid(1.5, "copies")
"""For each array among them."""
OFFLOADED_VALUE = _grid(9.0, "copies")
"""Time for a value to or from own page-locked buffers."""
SHORT_PASS = _grid(1.2e-3, "s")
"""GPU's time of a layer's pass, of which the host hardly dispatches one in this time."""
OVERLAP = _grid(4.0, "exponent")
GROUPED_OVERLAP = _grid(1.7, "exponent")
WHOLE_OVERLAP = _grid(6.0, "exponent")
"""Exponents with which GPU's and host's time make a step's: the higher, the better is the shorter one hidden. Of
several programs of layers, one starts once the host has passed all their parameters."""
COMPILE_ENDS = _grid(5.0, "s")
"""Time to compile embedding and head, with autotuning."""
COMPILE_LAYER = _grid(3.5, "s")
COMPILE_EXPERTS = _grid(4.0, "s")
"""Time to compile the passes of a layer, and of one with experts."""
COMPILE_GROUPED = _grid(0.15, "s")
"""Time to compile each further layer of a program."""
COMPILE_WHOLE = _grid(17.0, "s")
COMPILE_IN_WHOLE = _grid(0.4, "s")
"""Time to compile a micro-batch's only program, and for each layer in it."""
PINNING = Fitted(8 * _GIB, "bytes/s", "H200", _UNRECORDED)
"""Rate at which a run pins host memory, by threads beside compilation (`engine/host_buffers.py`)."""
WORTH_COMPILING = Fitted(1.2 * _GIB, "bytes", "H100", _UNRECORDED)
"""Host memory whose use is as bad as a second of compilation."""

# Sampling (`sampling`).
DECODE_READ = Fitted(0.75, "of the bytes/s that kernels read", "H200", "benchmarks/results/rl_step_h200.json")
"""Rate at which decode steps read weights, keys and values."""
DECODE_MATMUL = Fitted(0.8, "of a layer's matmuls' FLOP/s", "H100, H200", "rl_step.json, rl_step_h200.json")
"""Rate at which they multiply hundreds of rows."""
_few = partial(Fitted, unit="of the bytes/s that kernels read", gpu="H200")
EXPERTS_READ = {
    "none": _few(0.92, method="Qwen3-30B-A3B, benchmarks/results/generation_a3b_h200.json"),
    "mxfp4": _few(0.5, method="gpt-oss-20b, 64 tokens, benchmarks/results/experts_few_rows_probes_h200.json"),
    "fp8": _few(0.62, method="Qwen3.5-35B-A3B, benchmarks/results/experts_few_rows.json"),
    "nf4": _few(0.26, method="Qwen3.5-35B-A3B, benchmarks/results/experts_few_rows.json"),
    "int8": _few(0.54, method="Qwen3.5-35B-A3B, benchmarks/results/experts_few_rows.json"),
}
"""The same for experts, by their format."""
EXPERTS_MULTIPLY = Fitted(
    1.4, "of a layer's matmuls' FLOP/s", "H200", "generation_oss_lora_h200.json, generation_a3b_h200.json"
)
"""Rate of what experts of more tokens take beyond reading: their products lie mostly beside it."""
ADAPTED_EXPERTS = Fitted(120e-6, "s", "H200", "generation_oss_lora_h200.json, rl_oss_h200.json, rl_a3b_fp8_h200.json")
"""Time that live adapters of a layer's experts add, beside reading, to a step of more than `FEW_ADAPTED` tokens."""
FEW_ADAPTED = Fitted(128, "tokens", "H200", "generation_oss_lora_h200.json")
EXACT = {
    "H200": {
        streams: Fitted(seconds, "s", "H200", "benchmarks/results/exact_prices_h200.json")
        for streams, seconds in ((64, 9.9e-6), (256, 52.2e-6), (512, 85.4e-6))
    }
}
"""Time that a layer of Qwen3-8B with adapters adds to a decode step by exact sampling, by GPU and answers at a time:
(exact − near) / 36 layers."""
EXACT_LAYER = Fitted(425e6, "bytes", "H200", "benchmarks/results/exact_prices_h200.json")
"""Bytes of a step's weights by layers, there."""

# Memory (`memory`).
TEMPORARIES = _grid(1.03, "of `live_bytes.peak_bytes`")
"""XLA's temporary memory of a layer's backward pass; a twentieth of layers take more."""
SCATTERED = _grid(0.35, "of the largest temporary memory")
MOST_SCATTERED = _grid(1.5 * _GIB, "bytes")
"""Memory that a pool loses between other values, of which the largest temporary memory is one block, and its most."""
UNFILLED = Fitted(0.1, "of the peak", "H200", _UNRECORDED)
"""Memory of blocks beyond their arrays where weights are streamed: those that weights leave are of other sizes than
activations, and XLA's pool divides none for less than 128 MiB."""
LARGER_TEMPORARY = _grid(0.1, "of a layer's temporary memory")
"""Most by which it may exceed the prediction, counted where gaps take the spare."""
PROGRAMS_MEMORY = _grid(int(0.3 * _GIB), "bytes")
"""Loaded programs and workspaces of matmuls, for any model."""
OUTSIDE_POOL = Fitted(0.7 * _GIB, "bytes", "H100", "benchmarks/results/memory_limit.json")
"""Memory of a process beside JAX's pool: CUDA's context and the code of kernels."""
COLLECTIVES_MEMORY = Fitted(1.0 * _GIB, "bytes", "H200", "benchmarks/results/scaling_train.json")
"""Memory of a process that exchanges with other GPUs, beside it: NCCL's buffers, 0.8 GiB on two GPUs."""
CUDNN_WORKSPACE = Fitted(8, "bytes", "H200", "compiled programs' temporary memory")
"""Bytes of cuDNN's backward pass for each token, head, head dim and segment slot."""
SCALING_ERROR = Fitted(3e-4, "of the memory", "H200", "plans of scaled and of traced programs")
"""Most by which scaled programs differ from traced ones."""
