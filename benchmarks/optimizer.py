"""Time an optimizer step of LoRA on all linear layers: kernels, their GPU time, and the host's dispatch time.

    python benchmarks/optimizer.py --json benchmarks/results/optimizer.json

"XLA" is the reference: compiled updates of eight layers at a time.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import device_events, table, write_results
from step import workload

from jaxglue.engine.transfer import commit
from jaxglue.ops.adam import ADAM
from jaxglue.planner.workload import abstract_parts
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig

SHAPES = ("qwen3-0.6b", "qwen3-8b")
CASES = (("XLA", "float32"), ("kernels", "float32"), ("kernels", "bfloat16"), ("XLA", "8bit"), ("kernels", "8bit"))


def row(shape: str, by: str, moments: str) -> dict:
    optimizer = AdamWOptimizer(OptimizerConfig(moments=moments), total_steps=100)
    trainable = abstract_parts(workload(shape, None, 8192, "lora"))[1]
    trainable = commit(jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), trainable))
    gradients, state = jax.tree.map(lambda leaf: 2 * leaf, trainable), optimizer.init(trainable)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    begun = time.perf_counter()
    times, dispatch = [], []
    for step in range(8):
        start = time.perf_counter()
        trainable, state, values = optimizer.update(trainable, state, gradients, step)
        dispatch.append(time.perf_counter() - start)
        jax.block_until_ready((trainable, values))
        times.append(time.perf_counter() - start)
        first = time.perf_counter() - begun if step == 0 else first
    events = device_events(lambda: optimizer.update(trainable, state, gradients, 8))
    return {
        "model": shape,
        "tensors": len(jax.tree.leaves(trainable)),
        "by": by,
        "moments": moments,
        "state MB": round(stored / 1e6, 1),
        "kernels": len(events),
        "GPU ms": round(sum(events), 3),
        "host ms": round(1e3 * float(np.median(dispatch[2:])), 2),
        "in all ms": round(1e3 * float(np.median(times[2:])), 2),
        "first s": round(first, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for shape in args.shapes:
        for by, moments in CASES:
            with ADAM.using(None) if by == "XLA" else nullcontext():
                results.append(row(shape, by, moments))
            print(results[-1], flush=True)
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
