"""Compare what may serve a decode step: products of few rows by our kernel or cuBLAS.

    python benchmarks/few_rows.py --json benchmarks/results/few_rows.json

    python benchmarks/few_rows.py --matrices "q, k, v of gpt-oss-20b" --kernels triton --tiles 64/4/4/264 --fp8-rows

Matrices are several layers' worth in one program, without XLA's Triton matmuls, as in windows. Rows are printed as
they come. `error` is the relative difference from float32, and `again` whether a second run gave the same bits.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from decode_kernels import TURNS, Decoding, draw, looped, seconds
from measure import table, write_results

from jaxglue.ops import backend
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.projection.few_rows import FEW_ROWS, gate_few_rows, project_few_rows
from jaxglue.ops.projection.few_rows_operands import MOST_ROWS
from jaxglue.ops.projection.few_rows_triton import FewRowsTiles, TritonFewRows
from jaxglue.ops.projection.fp8 import encode
from jaxglue.ops.projection.fp8_adapters import QuantizedRows
from jaxglue.ops.quant.fp8 import quantize_fp8

MATRICES = {
    "gate, up": (4096, (12288, 12288)),
    "q, k, v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "down": (12288, (4096,)),
    "q, k, v of gpt-oss-20b": (2880, (4096, 512, 512)),
    "o of gpt-oss-20b": (4096, (2880,)),
}
"""Inputs, and outputs of the projections that share them; Qwen3-8B's but for those named."""
KERNELS: dict[str, Callable[[], Any]] = {
    "triton": lambda: TritonFewRows.of((9, 0)),
    "cublas": lambda: None,
}
DEFAULT = ("gate, up", "q, k, v", "o", "down")
"""Matrices that are timed unless others are named."""
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
LARGE = 2e8
"""Values of the weights in a program."""


class Case(NamedTuple):
    """A kernel at a shape."""

    rows: int
    name: str
    fp8: bool
    kernel: str


def kernels_of(name: str) -> Any:
    """Return kernels by name, or ours with tiles of 64 rows by columns/warps/stages/programs; None of cuBLAS."""
    if name in KERNELS:
        return KERNELS[name]()
    block_k, num_warps, num_stages, programs = map(int, name.split("/"))
    compiled = {"num_warps": num_warps, "num_stages": num_stages, "programs": programs}
    return TritonFewRows.of((9, 0), tiles=FewRowsTiles(block_n=64, block_k=block_k, **compiled))


def products(case: Case) -> Callable:
    """Return a function of (x, weights of several layers, stream or None) that gives the products of each layer."""
    kernels = kernels_of(case.kernel)

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


def draw_weights(names: Sequence[str]) -> dict[bool, dict[str, list[tuple]]]:
    """Return the weights of several layers by name, in bfloat16 (False) and stored for FP8 (True)."""
    dense = {
        name: [
            tuple(draw(10 * c + i, n, K, scale=K**-0.5) for i, n in enumerate(sizes))
            for c in range(max(2, int(LARGE // (sum(sizes) * K))))
        ]
        for name, (K, sizes) in MATRICES.items()
        if name in names
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
        stream = draw(8, 1, case.rows, sizes[0]) if len(sizes) == 1 else None
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--fp8-rows", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--matrices", nargs="+", choices=list(MATRICES), default=list(DEFAULT))
    parser.add_argument("--tiles", nargs="*", default=[], help="also our kernel by columns/warps/stages/programs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backend.UNTRIED.clear()
    results: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        results.append(row)
        print(table([row]).split("\n")[-1] if len(results) > 1 else table([row]), flush=True)
        if args.json:
            write_results(args.json, {"products": results})

    print(jax.devices()[0].device_kind, flush=True)
    sizes = [(rows, False) for rows in args.rows] + [(rows, True) for rows in args.fp8_rows]
    weights = draw_weights(args.matrices)
    for (rows, fp8), kernel in itertools.product(sizes, [*args.kernels, *args.tiles]):
        names = [n for n in args.matrices if kernel == "cublas" or rows <= MOST_ROWS or len(MATRICES[n][1]) > 1]
        cases = [Case(rows, name, fp8, kernel) for name in names]
        for case, (program, arguments) in zip(cases, compile_products(cases, weights), strict=True):
            show(time_products(case, program, arguments))


if __name__ == "__main__":
    main()
