"""Expanding NF4 and int8 weights to bfloat16: our kernel and XLA beside a copy of as many bytes.

python benchmarks/expand.py --json benchmarks/results/expand.json
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import device_milliseconds, table, write_results

from jaxglue.ops.quant.expand import expand
from jaxglue.ops.quant.formats import Quantized, dequantize_matrix, quantize_matrix

SHAPES = {
    "Qwen3-8B up": [(12288, 4096)],
    "Qwen3-8B q, k, v together": [(4096, 4096), (1024, 4096), (1024, 4096)],
    "Qwen3-8B gate, up together": [(12288, 4096), (12288, 4096)],
    "Qwen3-0.6B up": [(3072, 1024)],
}
CASES = {"nf4": ("kernel", "XLA"), "int8": ("XLA",)}


def rows(name: str, shapes: list[tuple[int, int]], how: str) -> list[dict]:
    """A row for each backend, and one for a copy that reads and writes as many bytes in all."""
    weights = [random_weight(how, shape, jax.random.key(number)) for number, shape in enumerate(shapes)]
    backends = {"kernel": jax.jit(expand), "XLA": jax.jit(_by_xla)}
    outs = {backend: backends[backend](*weights) for backend in CASES[how]}
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) + outs["XLA"].nbytes
    for out in outs.values():
        np.testing.assert_array_equal(out.view(jnp.uint16), outs["XLA"].view(jnp.uint16))
    source = jnp.zeros(moved // 4, jnp.bfloat16)
    calls = {backend: partial(backends[backend], *weights) for backend in CASES[how]}
    calls["copy"] = partial(jax.jit(lambda a: a + jnp.bfloat16(1)), source)
    times = {backend: device_milliseconds(call, calls=20) for backend, call in calls.items()}
    return [
        {
            "weights": name,
            "format": how,
            "by": backend,
            "µs": round(1e3 * ms, 1),
            "TB/s": round(moved / ms / 1e9, 2) if ms else 0,
            "of the copy": f"{times['copy'] / ms:.0%}" if ms else "",
        }
        for backend, ms in times.items()
    ]


def random_weight(how: str, shape: tuple[int, int], key) -> Quantized:
    """Random codes, which are quicker to make than a matrix that is quantized to them."""
    abstract = jax.eval_shape(lambda: quantize_matrix(jnp.zeros(shape, jnp.bfloat16), how))
    keys = iter(jax.random.split(key, 4))

    def fill(leaf):
        if leaf.dtype == jnp.float32:
            return jnp.full(leaf.shape, 0.03)
        return jax.random.bits(next(keys), leaf.shape, jnp.uint8).view(leaf.dtype)

    return jax.tree.map(fill, abstract)


def _by_xla(*weights):
    return jnp.concatenate([dequantize_matrix(weight, jnp.bfloat16) for weight in weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = [row for name, shapes in SHAPES.items() for how in CASES for row in rows(name, shapes, how)]
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
