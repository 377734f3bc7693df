"""Dequantizing NF4 and int8 weights to bfloat16: our kernel and XLA beside a copy of as many bytes.

python benchmarks/dequantize.py --json benchmarks/results/dequantize.json
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import device_milliseconds, table, write_results

from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import Quantized, quantize_matrix

SHAPES = {"Qwen3-8B up": (12288, 4096), "Qwen3-8B k": (1024, 4096), "Qwen3-0.6B up": (3072, 1024)}
BACKENDS = {"nf4": ("triton", "reference"), "int8": ("reference",)}


def rows(name: str, shape: tuple[int, int], how: str) -> list[dict]:
    """Measure each backend, and a copy that moves as many bytes."""
    weight = random_weight(how, shape, jax.random.key(0))
    backends = {name: jax.jit(partial(dequantize, backend=name)) for name in BACKENDS[how]}
    outs = {name: function(weight) for name, function in backends.items()}
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) + outs["reference"].nbytes
    for out in outs.values():
        np.testing.assert_array_equal(out.view(jnp.uint16), outs["reference"].view(jnp.uint16))
    source = jnp.zeros(moved // 4, jnp.bfloat16)
    calls = {name: partial(function, weight) for name, function in backends.items()}
    calls["copy"] = partial(jax.jit(lambda a: a + jnp.bfloat16(1)), source)
    times = {by: device_milliseconds(call, calls=20) for by, call in calls.items()}
    return [
        {
            "weight": name,
            "format": how,
            "by": by,
            "µs": round(1e3 * ms, 1),
            "TB/s": round(moved / ms / 1e9, 2) if ms else 0,
            "of the copy": f"{times['copy'] / ms:.0%}" if ms else "",
        }
        for by, ms in times.items()
    ]


def random_weight(how: str, shape: tuple[int, int], key) -> Quantized:
    """Draw random codes, without quantizing a matrix."""
    abstract = jax.eval_shape(lambda: quantize_matrix(jnp.zeros(shape, jnp.bfloat16), how))
    keys = iter(jax.random.split(key, 4))

    def fill(leaf):
        if leaf.dtype == jnp.float32:
            return jnp.full(leaf.shape, 0.03)
        return jax.random.bits(next(keys), leaf.shape, jnp.uint8).view(leaf.dtype)

    return jax.tree.map(fill, abstract)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = [row for name, shape in SHAPES.items() for how in BACKENDS for row in rows(name, shape, how)]
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
