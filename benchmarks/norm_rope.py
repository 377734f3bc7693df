"""Norms, rotation, SwiGLU and residual adds by XLA and by our kernels: microseconds and share of the copy rate.

python benchmarks/norm_rope.py --json benchmarks/results/norm_rope.json

A backward pass includes the values that a layer recomputes in it: normed stream, rotated heads and activation. The
limit is the bytes to read and write, each once, at the rate of a device copy.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from measure import device_milliseconds, table, write_results
from shapes import SHAPES

from jaxglue.ops.gated_mlp.swiglu import lora_swiglu
from jaxglue.ops.norm_rope import HeadNorms, rotate_heads, stream_norm

COPY = 4.3e12  # bytes/s of a device copy on an H200, read and written
RANK = 16
TOKENS = {"qwen3-0.6b": 8192, "qwen3-8b": 16384, "llama-3.1-8b": 16384}


class Case(NamedTuple):
    """A function of a backend's name and arguments, forward only or with its gradient."""

    operation: str
    function: Callable[..., Any]
    arguments: tuple
    passes: int
    """Reads and writes of arrays of the operation's size."""
    bytes: int
    has_kernel: bool = True


def normals(*shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Return distinct arrays: a kernel reads an array that it gets twice only once."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also computes the gradient to its first argument."""

    def both(backend, moving, *others):
        *others, dout = others
        out, pull = jax.vjp(lambda moving: function(backend, moving, *others), moving)
        return out, pull(dout)

    return both


def norm(backend, x, weight):
    return stream_norm(x, weight, 1e-6, backend=backend)


def norm_output(backend, x, weight):
    """Return the norm without the stream, which a separate program would copy."""
    return norm(backend, x, weight)[1]


def norm_gradient(backend, x, weight, douts):
    (_, normed), dx = with_gradient(norm)(backend, x, weight, douts)
    return normed, dx


def rotation(backend, heads, weights, tables):
    return rotate_heads(*heads, *tables, norms=None if weights is None else HeadNorms(*weights, 1e-6), backend=backend)


def swiglu(backend, gate_up):
    gate, up = gate_up
    return jax.nn.silu(gate) * up


def swiglu_lora(backend, wide, hidden, matrices):
    return lora_swiglu(*wide, hidden, matrices, backend=backend)


def swiglu_lora_gradient(backend, *arguments):
    *arguments, douts = arguments
    return jax.vjp(partial(swiglu_lora, backend), *arguments)[1](douts)


def cases(shape: str) -> Iterator[Case]:
    """Yield the operations of a layer beside matmuls and attention."""
    config, T = SHAPES[shape], TOKENS[shape]
    D, F, H = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    (x, y, z), weight, row = normals(*3 * [(1, T, D)]), jnp.ones(D, jnp.bfloat16), 2 * T * D
    yield Case("residual add", lambda _, x, y: x + y, (x, y), 3, 3 * row, has_kernel=False)
    yield Case("norm", norm_output, (x, weight), 2, 2 * row)
    yield Case("norm, backward with the stream's gradient", norm_gradient, (x, weight, (y, z)), 5, 5 * row)

    normed = config["model_type"] == "qwen3"
    *heads, dq, dk = normals((1, T, N, H), (1, T, K, H), (1, T, N, H), (1, T, K, H))
    tables = jnp.zeros((1, T, H // 2)), jnp.ones((1, T, H // 2))
    arguments = tuple(heads), 2 * (jnp.ones(H, jnp.bfloat16),) if normed else None, tables
    array, table_bytes = 2 * T * (N + K) * H, 4 * T * H
    name, passes = ("q/k norm and rotation", 5) if normed else ("rotation", 4)
    yield Case(name, rotation, arguments, 2, 2 * array + table_bytes)
    yield Case(
        f"{name}, backward", with_gradient(rotation), (*arguments, (dq, dk)), passes, passes * array + table_bytes
    )

    (*gate_up, dout), array = normals(*3 * [(1, T, F)]), 2 * T * F
    yield Case("SwiGLU", swiglu, (tuple(gate_up),), 3, 3 * array, has_kernel=False)
    yield Case("SwiGLU, backward", with_gradient(swiglu), (tuple(gate_up), dout), 6, 6 * array, has_kernel=False)

    hidden, dranks, *matrices = normals((1, T, 2 * RANK), (1, T, RANK), (F, RANK), (F, RANK), (RANK, F))
    arguments = tuple(gate_up), hidden, tuple(matrix.astype(jnp.float32) for matrix in matrices)
    name = f"SwiGLU between adapters of rank {RANK}"
    yield Case(name, swiglu_lora, arguments, 3, 3 * array)
    yield Case(f"{name}, backward", swiglu_lora_gradient, (*arguments, (dout, dranks)), 5, 5 * array)


def results_of(shape: str, case: Case) -> Iterator[dict]:
    for backend, name in {"reference": "XLA", "triton": "Triton"}.items():
        if backend == "triton" and not case.has_kernel:
            continue
        function = jax.jit(partial(case.function, backend))
        microseconds = 1e3 * device_milliseconds(partial(function, *case.arguments))
        limit = 1e6 * case.bytes / COPY
        yield {
            "shape": f"{shape}, {TOKENS[shape]:,} tokens",
            "operation": case.operation,
            "passes": case.passes,
            "by": name,
            "µs": round(microseconds, 1),
            "limit µs": round(limit, 1),
            "of the limit": f"{limit / max(microseconds, 1e-9):.0%}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = [row for shape in args.shapes for case in cases(shape) for row in results_of(shape, case)]
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
