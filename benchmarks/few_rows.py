"""Compare what may serve a decode step: products of few rows by our kernel or cuBLAS, attention of new tokens.

    python benchmarks/few_rows.py --json benchmarks/results/few_rows.json

Matrices are Qwen3-8B's, several layers' worth in one program, without XLA's Triton matmuls, as in windows. Rows are
printed as they come. `error` is the relative difference from float32, and `again` whether a second run gave the same
bits. Attention is of streams with up to twice `CONTEXT` tokens, in any order or the longest first, as in windows.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_kernels import PAGE, TURNS, Decoding, draw, looped, seconds
from measure import table, write_results

from jaxglue.ops import backend
from jaxglue.ops.norm_rope import LLAMA_NORM, HeadNorms
from jaxglue.ops.paged_attention import APPEND_AND_ATTEND, append_and_attend, make_pages
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.projection.few_rows import FEW_ROWS, gate_few_rows, project_few_rows
from jaxglue.ops.projection.few_rows_triton import TritonFewRows
from jaxglue.ops.projection.fp8 import encode
from jaxglue.ops.projection.fp8_adapters import QuantizedRows
from jaxglue.ops.quant.fp8 import quantize_fp8
from jaxglue.ops.rope import RopeConfig, RopeTables, Rotary, rope_tables

MATRICES = {
    "gate, up": (4096, (12288, 12288)),
    "q, k, v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "down": (12288, (4096,)),
}
"""Inputs, and outputs of the projections that share them."""
KERNELS: dict[str, Callable[[], Any]] = {
    "triton": lambda: TritonFewRows.of((9, 0)),
    "cublas": lambda: None,
}
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
LARGE, CONTEXT = 2e8, 388
"""Values of the weights in a program, and of attention the mean tokens of a stream."""


class Case(NamedTuple):
    """A kernel at a shape."""

    rows: int
    name: str
    fp8: bool
    kernel: str


def products(case: Case) -> Callable:
    """Return a function of (x, weights of several layers, stream or None) that gives the products of each layer."""
    kernels = KERNELS[case.kernel]()

    def one(x, weights, stream) -> list[jax.Array]:
        parts = [Projection(weight=weight) for weight in weights]
        if kernels is None:
            ys = adapted_projection(x, parts, Decoding(), stream=stream)
            return [jax.nn.silu(ys[0]) * ys[1]] if case.name == "gate, up" else ys
        rows = QuantizedRows(x, *encode(x)) if case.fp8 else x
        if case.name == "gate, up":
            return [gate_few_rows(kernels, rows, parts, Decoding(), "silu")]
        return project_few_rows(kernels, rows, parts, Decoding(), stream)

    return lambda x, layers, stream: [one(x, weights, stream) for weights in layers]


def draw_weights() -> dict[bool, dict[str, list[tuple]]]:
    """Return the weights of several layers by name, in bfloat16 (False) and stored for FP8 (True)."""
    dense = {
        name: [
            tuple(draw(10 * c + i, n, K, scale=K**-0.5) for i, n in enumerate(sizes))
            for c in range(max(2, int(LARGE // (sum(sizes) * K))))
        ]
        for name, (K, sizes) in MATRICES.items()
    }
    return {
        False: dense,
        True: {name: [tuple(map(quantize_fp8, ws)) for ws in layers] for name, layers in dense.items()},
    }


def compile_products(cases: Sequence[Case], weights: dict[bool, dict]) -> list[tuple[Any, tuple]]:
    """Return each case's program, or the error, and its arguments."""
    dense = weights[False]

    def compiled(case: Case) -> tuple[Any, tuple]:
        K, sizes = MATRICES[case.name]
        stream = draw(8, 1, case.rows, sizes[0]) if case.name in ("o", "down") else None
        arguments = draw(7, 1, case.rows, K), weights[case.fp8][case.name], stream
        try:
            with FEW_ROWS.using(None):
                run = looped(products(case), *arguments, compiler_options=OPTIONS)
                return run.lower(*arguments).compile(), (*arguments, dense[case.name][-1])
        except Exception as error:
            return error, arguments

    with ThreadPoolExecutor(len(MATRICES)) as pool:
        return list(pool.map(compiled, cases))


def time_products(case: Case, program: Any, arguments: tuple) -> dict[str, Any]:
    """Run a case."""
    shown = {"kernel": case.kernel, "matrices": case.name, "rows": case.rows, "weights": "e4m3" if case.fp8 else "bf16"}
    if isinstance(program, Exception):
        return shown | {"us": "-", "error": repr(program)[:120], "again": "-"}
    x, layers, stream, dense = arguments
    first, second = (program(x, layers, stream)[-1] for _ in range(2))
    taken = seconds(program, x, layers, stream) / TURNS / len(layers)
    with jax.default_matmul_precision("highest"):
        want = [x[0].astype(jnp.float32) @ weight.astype(jnp.float32).T for weight in dense]
    want = [jax.nn.silu(want[0]) * want[1]] if case.name == "gate, up" else want
    want = want if stream is None else [want[0] + stream[0].astype(jnp.float32)]
    error = max(
        float(jnp.linalg.norm(y[0].astype(jnp.float32) - w) / jnp.linalg.norm(w))
        for y, w in zip(first, want, strict=True)
    )
    same = all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    return shown | {"us": round(taken * 1e6, 1), "error": f"{error:.4f}", "again": "equal" if same else "DIFFERS"}


def time_attention(streams: int, dtype, longest_first: bool) -> dict[str, Any]:
    """Compare attention that writes its tokens with two launches."""
    rng, pages, layers = np.random.default_rng(0), 2 * CONTEXT // PAGE + 1, 4
    tables = jnp.asarray(1 + rng.permutation(streams * pages).reshape(streams, pages), jnp.int32)
    drawn = rng.integers(0, 2 * CONTEXT, streams)
    positions = jnp.asarray(np.sort(drawn)[::-1] if longest_first else drawn, jnp.int32)
    count = streams * pages + 1
    every = jnp.repeat(jnp.arange(count), PAGE), jnp.tile(jnp.arange(PAGE), count)
    write = jax.jit(lambda cache, k, v: cache.write(k, v, *every))
    empty = make_pages(count, 8, PAGE, 128, dtype)
    caches = [
        write(empty, draw(2 * i, count * PAGE, 8, 128), draw(2 * i + 1, count * PAGE, 8, 128)) for i in range(layers)
    ]
    q, k, v = draw(3, streams, 32, 128), draw(4, streams, 8, 128), draw(5, streams, 8, 128)
    rotary = Rotary(RopeConfig(rope_theta=1e6), 128)
    rope = RopeTables((rotary,), (rope_tables(positions[None], rotary.config, 128),))
    norms, rows = HeadNorms(jnp.ones(128), jnp.ones(128), 1e-6, LLAMA_NORM), jnp.arange(streams)
    places = tables[rows, positions // PAGE], positions % PAGE, rope, rotary, norms, 1.0

    def run(q, k, v, caches):
        def turn(_, state):
            outs, caches = [], []
            for cache in state[1]:
                out, cache = append_and_attend(q, k, v, cache, *places, tables, positions)
                outs.append(out)
                caches.append(cache)
            return outs, caches

        return jax.lax.fori_loop(0, TURNS, turn, ([q] * layers, caches))

    def measured(at_once: bool) -> tuple[float, Any]:
        with nullcontext() if at_once else APPEND_AND_ATTEND.using(None):
            program = jax.jit(run).lower(q, k, v, caches).compile()
        found = program(q, k, v, caches)
        return seconds(program, q, k, v, caches) / TURNS / layers * 1e6, found

    (one, (outs, written)), (two, (wanted, expected)) = measured(True), measured(False)
    difference = jnp.linalg.norm((outs[-1] - wanted[-1]).astype(jnp.float32))
    same = all(
        bool((a.astype(jnp.float32) == b.astype(jnp.float32)).all())
        for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True)
    )
    return {
        "streams": streams,
        "cache": jnp.dtype(dtype).name,
        "longest first": longest_first,
        "us in one launch": round(one, 1),
        "in two": round(two, 1),
        "difference": f"{float(difference / jnp.linalg.norm(wanted[-1].astype(jnp.float32))):.4f}",
        "caches": "equal" if same else "DIFFER",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--fp8-rows", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backend.UNTRIED.clear()
    results: dict[str, list] = {"attention": [], "products": []}

    def show(kind: str, row: dict[str, Any]) -> None:
        results[kind].append(row)
        print(table([row]).split("\n")[-1] if len(results[kind]) > 1 else table([row]), flush=True)
        if args.json:
            write_results(args.json, results)

    print(jax.devices()[0].device_kind, flush=True)
    sizes, weights = [(rows, False) for rows in args.rows] + [(rows, True) for rows in args.fp8_rows], draw_weights()
    for (rows, fp8), kernel in itertools.product(sizes, args.kernels):
        cases = [Case(rows, name, fp8, kernel) for name in MATRICES if kernel != "triton" or rows <= 256]
        for case, (program, arguments) in zip(cases, compile_products(cases, weights), strict=True):
            show("products", time_products(case, program, arguments))
    for streams, dtype in ((64, jnp.bfloat16), (256, jnp.bfloat16), (256, jnp.float8_e4m3fn)):
        for longest_first in (False, True):
            show("attention", time_attention(streams, dtype, longest_first))


if __name__ == "__main__":
    main()
