"""Time attention's forward and backward passes over documents' lengths, rows' lengths and heads, by kernel.

    python benchmarks/attention_lengths.py --json benchmarks/results/attention_lengths.json
    python benchmarks/attention_lengths.py --part 2/2 --json benchmarks/results/attention_lengths.json
    python benchmarks/attention_lengths.py --tokens 65536 --windows 1024 2048 4096 8192 16384 --kernels hopper cudnn \
        --json benchmarks/results/attention_windows.json

`short` and `long` are the Triton kernels with tiles for short and for long documents. Rows already in the file are
kept. The GPU's sustained matmul rate and its copies' rates are measured first.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from attention import Heads, random_inputs, visible_pairs
from measure import log_normal_lengths, milliseconds, write_results

from jaxglue.ops.attention.tiles import kernel_tiles
from jaxglue.ops.segments import BatchKind, pack_segments, segment_bucket
from jaxglue.planner.rates import measure_gpu

LLAMA = Heads(N=32, K=8, H=128)
OTHERS = (
    Heads(N=64, K=8, H=64, sinks=True),
    Heads(N=64, K=8, H=64, window=128, sinks=True),
    Heads(N=32, K=8, H=64),
    Heads(N=16, K=8, H=128),
    Heads(N=40, K=8, H=128),
    Heads(N=32, K=4, H=128),
    *(Heads(N=32, K=8, H=128, window=window) for window in (1024, 2048, 4096, 8192, 16_384)),
    Heads(N=32, K=8, H=128, sinks=True),
    Heads(N=16, K=8, H=256),
    Heads(N=16, K=8, H=256, window=1024),
)
COLUMNS = (
    "heads (N, K, H, window, sinks)",
    "tokens",
    "documents",
    "slots",
    "kernel",
    "pairs",
    "forward ms",
    "backward ms",
)
_WORKSPACE_SHARE = 0.4
"""Share of the memory that cuDNN's backward pass may reserve: 8 bytes for each token, slot, head and head dim."""


def documents(tokens: int, *, few: bool = False) -> dict[str, list[int]]:
    """Return document lengths that fill a row, by name."""
    counts = (1, 4, 16, 64) if few else (1, 2, 4, 8, 16, 64, 256)
    equal = {f"{n} x {tokens // n}": [tokens // n] * n for n in counts if tokens // n >= 64}
    third = int(0.46 * tokens)
    uneven = {"30:30:5": [third, third, tokens - 2 * third], "one long, rest 512": _one_long(tokens)}
    mixed = {"log-normal": log_normal_lengths(tokens, max(2, tokens // 630))}
    return equal | (uneven | mixed if tokens >= 8192 and not few else mixed if tokens >= 8192 else {})


def _one_long(tokens: int) -> list[int]:
    return [tokens // 2] + [512] * (tokens // 1024)


def programs(args: argparse.Namespace) -> list[tuple[Heads, int, dict[str, list[int]]]]:
    """Return (heads, tokens, document lengths) of the chosen shapes, the ones that matter most first."""
    some = (
        shape
        for shape in _all_programs()
        if (not args.tokens or shape[1] in args.tokens) and (not args.windows or shape[0].window in args.windows)
    )
    part, parts = map(int, args.part.split("/"))
    return list(some)[part - 1 :: parts]


def _all_programs() -> Iterator[tuple[Heads, int, dict[str, list[int]]]]:
    for tokens in (65_536, 16_384, 8192, 32_768, 4096, 131_072, 1024, 256):
        yield LLAMA, tokens, documents(tokens)
    for tokens in (16_384, 65_536, 8192):
        for heads in OTHERS:
            yield heads, tokens, documents(tokens, few=True)


def kernels(heads: Heads) -> dict:
    """Return the kernels to time, by name."""
    from jaxglue.ops.attention.cudnn import CudnnAttention
    from jaxglue.ops.attention.hopper import HopperAttention
    from jaxglue.ops.attention.triton import TritonAttention

    def ours(long: bool) -> TritonAttention:
        tiles = kernel_tiles((9, 0), heads.H, window=heads.window, long=long)
        return TritonAttention(tiles=tiles, compute_capability=90)

    hopper = {"hopper": HopperAttention(compute_capability=90)} if heads.H in (64, 128, 256) else {}
    return {"short": ours(False), "long": ours(True), **hopper, "cudnn": CudnnAttention()}


def measure(heads: Heads, tokens: int, rows: dict[str, list[int]], only: list[str] | None = None) -> Iterator[tuple]:
    """Yield the table's rows of one shape; programs are compiled once for all documents of as many slots."""
    (q, k, v), sinks, dout = random_inputs(heads, tokens)
    for kernel, backend in kernels(heads).items():
        if kernel not in (only or kernels(heads)):
            continue
        forward = jax.jit(lambda *args, b=backend: b.forward(*args, window=heads.window))
        backward = jax.jit(lambda *args, b=backend: b.backward(*args, window=heads.window))
        for name, lengths in rows.items():
            slots = segment_bucket(len(lengths) if kernel == "cudnn" else max(map(len, rows.values())))
            if kernel == "cudnn" and not _fits(heads, tokens, slots):
                continue
            segments = jax.device_put(pack_segments([lengths], seq_len=tokens, kind=BatchKind(False, slots)))
            out, lse = forward(q, k, v, sinks, segments)
            times = (  # long enough for the clock to settle at the power limit
                milliseconds(forward, q, k, v, sinks, segments, budget=100, repeats=5),
                milliseconds(backward, q, k, v, sinks, segments, out, lse, dout, budget=200, repeats=5),
            )
            pairs = visible_pairs(lengths, heads.window)
            yield (astuple(heads), tokens, name, slots, kernel, pairs, *(float(f"{t:.4g}") for t in times))


def _fits(heads: Heads, tokens: int, slots: int) -> bool:
    limit = (jax.devices()[0].memory_stats() or {"bytes_limit": 0})["bytes_limit"]
    return 8 * tokens * heads.N * heads.H * slots < _WORKSPACE_SHARE * limit


def gpu_rates(seconds: float = 2.0) -> dict[str, float]:
    """Return burst and sustained TFLOP/s of a large matmul, and GB/s of copies on the device and over the link."""
    gpu = measure_gpu(jax.devices()[0])
    a, b = (jnp.ones(shape, jnp.bfloat16) * 0.01 for shape in ((16_384, 4096), (4096, 14_336)))
    dot, flops = jax.jit(jnp.dot), 2 * 16_384 * 4096 * 14_336
    rates = [_rate(dot, a, b, flops, 20)]
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        rates.append(_rate(dot, a, b, flops, 100))
    return {
        "matmul_burst": round(rates[0], 1),
        "matmul_sustained": round(float(np.median(rates[-5:])), 1),
        "copy": round(gpu.copy / 1e9, 1),
        "link": round(gpu.link / 1e9, 1),
    }


def _rate(dot, a, b, flops: int, calls: int) -> float:
    jax.block_until_ready(dot(a, b))
    begun = time.perf_counter()
    jax.block_until_ready([dot(a, b) for _ in range(calls)][-1])
    return flops * calls / (time.perf_counter() - begun) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="i/n: every n-th shape, from the i-th on")
    parser.add_argument("--minutes", type=float, default=7, help="start no shape after this time")
    parser.add_argument("--tokens", type=int, nargs="+", help="of rows; by default all")
    parser.add_argument("--windows", type=int, nargs="+", help="only heads with these windows")
    parser.add_argument("--kernels", nargs="+", help="by default all")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    begun = time.perf_counter()
    known = json.loads(args.json.read_text())["results"]["rows"] if args.json.exists() else []
    results = {"rates": gpu_rates(), "columns": COLUMNS, "rows": known}
    print(results["rates"], flush=True)
    for heads, tokens, rows in programs(args):
        if time.perf_counter() - begun > 60 * args.minutes:
            print("no time for", heads, tokens)
            continue
        for row in measure(heads, tokens, rows, args.kernels):
            results["rows"].append(row)
            print(*row, sep="  ", flush=True)
        write_results(args.json, results)


if __name__ == "__main__":
    main()
