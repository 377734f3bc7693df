"""Measure large bf16 matmuls: the burst rate, and the sustained rate under the GPU's power limit.

    python benchmarks/matmul.py --json benchmarks/results/matmul.json

Shapes are those of Qwen3 layers. Zeros switch fewer transistors than random numbers and show the cost of power.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from measure import table, write_results

from jaxglue.engine.compiler import jit_step

SHAPES = {
    "Qwen3-8B, up": (16384, 4096, 12288),
    "Qwen3-8B, down": (16384, 12288, 4096),
    "Qwen3-8B, output": (16384, 4096, 4096),
    "Qwen3-0.6B, up": (8192, 1024, 3072),
    "Qwen3-0.6B, down": (8192, 3072, 1024),
}
"""Rows, columns of the input, columns of the output."""
_HEAT, _COUNTED, _REST = 1.5, 0.5, 0.5
"""Seconds of warm-up, of the sustained measurement, and of idleness before the burst."""


@jit_step
def _forward(x, weight):
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


@jit_step
def _backward(x, weight):
    return x @ weight


def rate(call: Callable[[], jax.Array], flops: float, seconds: float) -> float:
    """Return the TFLOP/s of calls over this many seconds."""
    begun, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < seconds:
        jax.block_until_ready([call() for _ in range(8)])
        calls += 8
    return calls * flops / spent / 1e12


def query_clock_and_power() -> subprocess.Popen[str]:
    """Start a process that prints the GPU's present MHz and watts."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(name: str, direction: str, values: str) -> dict:
    rows, inner, columns = SHAPES[name]
    function, shape = (_forward, (columns, inner)) if direction == "forward" else (_backward, (inner, columns))
    zeros = values == "zeros"
    x, weight = (
        jnp.zeros(size, jnp.bfloat16) if zeros else jax.random.normal(jax.random.key(seed), size, jnp.bfloat16)
        for seed, size in enumerate([(rows, inner), shape])
    )
    flops = 2.0 * rows * inner * columns
    jax.block_until_ready(function(x, weight))
    time.sleep(_REST)
    burst = rate(lambda: function(x, weight), flops, 0.01)
    rate(lambda: function(x, weight), flops, _HEAT)
    with query_clock_and_power() as query:
        sustained = rate(lambda: function(x, weight), flops, _COUNTED)
        clock, power = map(float, query.communicate()[0].split(","))
    row = {"matmul": f"{name}, {direction}", "values": values, "burst TFLOP/s": round(burst, 1)}
    return row | {"sustained TFLOP/s": round(sustained, 1), "MHz": clock, "W": power}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = [measure(name, direction, "random") for name in SHAPES for direction in ("forward", "backward")]
    results.append(measure("Qwen3-8B, up", "forward", "zeros"))
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
