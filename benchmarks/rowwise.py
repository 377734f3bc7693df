"""Operations on each token by itself, by XLA and by our kernels: microseconds, and the share of the copy rate.

python benchmarks/rowwise.py --json benchmarks/results/rowwise.json

The backward pass includes what a layer computes again there because it was not kept: the rotated heads. The limit is
the bytes that have to be read and written, at the rate of a device copy.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from inputs import SHAPES
from measure import device_milliseconds, table, write_results

from jaxglue.rowwise import HeadNorms, rotate_heads

COPY = 4.3e12  # bytes/s of a device copy on an H200, read and written
TOKENS = {"qwen3-0.6b": 8192, "qwen3-8b": 16384, "llama-3.1-8b": 16384}


class Case(NamedTuple):
    """A function of a backend's name and arguments."""

    operation: str
    function: Callable[..., Any]
    arguments: tuple
    bytes: int


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def rotation(shape: str) -> Iterator[Case]:
    """Norm (in Qwen3) and rotation of queries and keys."""
    config, T = SHAPES[shape], TOKENS[shape]
    N, K, H = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    heads, tables = (normal(1, T, N, H), normal(1, T, K, H)), 2 * (jnp.ones((1, T, H // 2)),)
    weights = 2 * (jnp.ones(H, jnp.bfloat16),)
    normed = config["model_type"] == "qwen3"

    def forward(backend, heads, weights, tables):
        norms = HeadNorms(*weights, 1e-6) if normed else None
        return rotate_heads(*heads, *tables, norms=norms, backend=backend)

    def backward(backend, heads, weights, tables, dheads):
        out, pull = jax.vjp(lambda heads: forward(backend, heads, weights, tables), heads)
        return out, pull(dheads)

    array, table_bytes = T * (N + K) * H * 2, T * H * 4
    name = "q/k norm and rotation" if normed else "rotation"
    yield Case(f"{name}, forward", forward, (heads, weights, tables), 2 * array + table_bytes)
    read = 5 if normed else 4
    yield Case(f"{name}, backward", backward, (heads, weights, tables, heads), read * array + 2 * table_bytes)


def results_of(shape: str, case: Case) -> Iterator[dict]:
    for backend in ("reference", "triton"):
        function = jax.jit(partial(case.function, backend))
        microseconds = 1e3 * device_milliseconds(partial(function, *case.arguments))
        limit = 1e6 * case.bytes / COPY
        yield {
            "shape": f"{shape}, {TOKENS[shape]:,} tokens",
            "operation": case.operation,
            "backend": {"reference": "XLA", "triton": "Triton"}[backend],
            "µs": round(microseconds, 1),
            "limit µs": round(limit, 1),
            "of the limit": f"{limit / microseconds:.0%}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = [row for shape in args.shapes for case in rotation(shape) for row in results_of(shape, case)]
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
