"""Probe an exact sampler: which products give a row the same bits among few rows as among many, and at what price.

    python benchmarks/exact_sampler.py --json benchmarks/results/exact_sampler.json

Sampling multiplies 64 or 256 rows where training multiplies 16,384. `equal` is the share of outputs whose bits are
those of the same rows among 16,384, `same as XLA` those of XLA's product of 16,384 rows. `fixed` is a Triton matmul
that sums along K in one order, whatever its tiles. Attention is over 1,000 keys, in pages against packed rows.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from decode_kernels import Decoding, draw, looped, seconds
from jax_triton import triton_call
from measure import table, write_results

from jaxglue.ops import launch  # noqa: F401  mends jax-triton
from jaxglue.ops.attention import packed_attention
from jaxglue.ops.paged_attention import KVPages, make_pages, paged_attention
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.segments import pack_segments

MANY, FEW = 16384, (8, 64, 256)
MATRICES = {"k": (1024, 4096), "o": (4096, 4096), "gate": (12288, 4096), "down": (4096, 12288)}
OPTIONS: dict[str, dict[str, Any]] = {
    "XLA": {},
    "XLA without split K": {"xla_gpu_enable_split_k_autotuning": False},
    "XLA, cuBLAS alone": {"xla_gpu_enable_triton_gemm": False},
    "XLA, deterministic": {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_split_k_autotuning": False},
}
SWAPPED = {8: (64, 16, 128, 4, 4), 64: (64, 64, 128, 4, 4), 256: (64, 256, 64, 4, 4)}
"""Rows of the weight and of x in a tile, columns in a step, warps and stages, by the rows of x."""
LARGE = (128, 256, 64, 8, 4)


@triton.jit
def fixed_kernel(
    x, w, M, out, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply x [M, K] by w [N, K]; a tile's sums run along K in order, 16 columns an instruction."""
    program, tiles = tl.program_id(0), N // BLOCK_N
    rows = tl.cdiv(M, BLOCK_M)
    group = program // (GROUP * tiles) * GROUP
    size = tl.minimum(rows - group, GROUP)
    m = (group + program % (GROUP * tiles) % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % (GROUP * tiles) // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (m < M)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_tile, w_tile = x + m[None, :] * K + k[:, None], w + n[:, None] * K + k[None, :]
    for _ in range(K // BLOCK_K):
        acc = tl.dot(tl.load(w_tile), tl.load(x_tile, mask=inside, other=0.0), acc)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    tl.store(out + m[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=inside)


def fixed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute x·Wᵀ by `fixed_kernel`."""
    (M, K), N = x.shape, len(weight)
    block_n, block_m, block_k, warps, stages = SWAPPED.get(M, LARGE)
    sizes = {"N": N, "K": K, "BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": block_k, "GROUP": 8}
    out = jax.ShapeDtypeStruct((M, N), x.dtype)
    grid = (triton.cdiv(M, block_m) * (N // block_n),)
    return triton_call(
        x, weight, M, kernel=fixed_kernel, out_type=out, grid=grid, num_warps=warps, num_stages=stages, **sizes
    )


def xla(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def ours(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute x·Wᵀ as sampling does."""
    return adapted_projection(x, [Projection(weight=weight)], Decoding())[0]


def microseconds(function: Callable, x: jax.Array, weights: list[jax.Array], options: dict[str, Any]) -> float:
    """Return the time of a product, among those with several weights in one program."""

    def chain(x, weights):
        return [function(x, weight)[:1] for weight in weights]

    turns = 10
    program = looped(chain, x, weights)
    compiled = program.lower(x, weights).compile(compiler_options=options) if options else program
    return seconds(compiled, x, weights) / (turns * len(weights)) * 1e6


def products(name: str) -> list[dict[str, Any]]:
    """Compare and time the products with a matrix."""
    N, K = MATRICES[name]
    x = draw(1, MANY, K)
    weights = [draw(10 + i, N, K, scale=K**-0.5) for i in range(16 if N * K < 2e7 else 8)]
    many = {option: np.asarray(compiled(xla, x, weights[0], o)).view(np.int16) for option, o in OPTIONS.items()}
    many["fixed"] = np.asarray(jax.jit(fixed)(x, weights[0])).view(np.int16)
    many["ours"] = many["XLA"]
    rows = []
    for option, o in OPTIONS.items():
        same = float((many[option] == many["XLA"]).mean())
        rows.append(_row(name, MANY, option, microseconds(xla, x, weights[:2], o), 1.0, same))
    same = float((many["fixed"] == many["XLA"]).mean())
    rows.append(_row(name, MANY, "fixed", microseconds(fixed, x, weights[:2], {}), 1.0, same))
    for count in FEW:
        few = x[:count]
        calls = {option: (xla, o) for option, o in OPTIONS.items()} | {"fixed": (fixed, {}), "ours": (ours, {})}
        for option, (function, o) in calls.items():
            try:
                own = np.asarray(compiled(function, few, weights[0], o)).view(np.int16)
                equal, same = (float((own == many[other][:count]).mean()) for other in (option, "XLA"))
                rows.append(_row(name, count, option, microseconds(function, few, weights, o), equal, same))
            except Exception as error:  # the others still say something
                print(f"{name} {count} {option} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return rows


def compiled(function: Callable, x, weight, options: dict[str, Any]) -> jax.Array:
    return jax.jit(function).lower(x, weight).compile(compiler_options=options or None)(x, weight)


def _row(name: str, rows: int, form: str, taken: float, equal: float, same: float) -> dict[str, Any]:
    shown = {"equal": f"{equal:.4%}", "same as XLA": f"{same:.4%}"}
    return {"matrix": name, "rows": rows, "form": form, "us": round(taken, 1)} | shown


def attention(sequences: int, tokens: int) -> list[dict[str, Any]]:
    """Compare the last tokens' attention in packed rows and in pages, and between two rows of packed documents."""
    N, K, H, page = 32, 8, 128, 64
    P = -(-tokens // page)
    q, k, v = (draw(i, 1, sequences * tokens, heads, H) for i, heads in enumerate((N, K, K)))

    def packed(q, k, v, first: int):
        """Attend with a document of `first` tokens before the others, which shifts their tiles."""
        T = -(-(first + sequences * tokens) // 1024) * 1024
        padded = [jnp.pad(x, ((0, 0), (first, T - first - x.shape[1]), (0, 0), (0, 0))) for x in (q, k, v)]
        lengths = [[first, *[tokens] * sequences]] if first else [[tokens] * sequences]
        out = jax.jit(packed_attention)(*padded, jax.device_put(pack_segments(lengths, seq_len=T)))
        return out[0, first : first + sequences * tokens].reshape(sequences, tokens, N, H)[:, -1]

    whole = packed(q, k, v, 0)
    shifted = packed(q, k, v, 37)
    cache = make_pages(1 + sequences * P, K, page, H, jnp.bfloat16)

    def paged(x):
        own = x[0].reshape(sequences, tokens, K, H)
        own = jnp.pad(own, ((0, 0), (0, P * page - tokens), (0, 0), (0, 0)))
        return own.reshape(sequences * P, page, K, H).swapaxes(1, 2)

    cache = KVPages(keys=cache.keys.at[1:].set(paged(k)), values=cache.values.at[1:].set(paged(v)))
    tables = jnp.arange(1, 1 + sequences * P, dtype=jnp.int32).reshape(sequences, P)
    positions = jnp.full(sequences, tokens - 1, jnp.int32)
    last = q[0].reshape(sequences, tokens, N, H)[:, -1]
    rows = []
    for name, got in (
        ("packed, another place", shifted),
        ("pages", jax.jit(paged_attention)(last, cache, tables, positions)),
    ):
        equal = float((np.asarray(got).view(np.int16) == np.asarray(whole).view(np.int16)).mean())
        difference = float(jnp.linalg.norm(jnp.float32(got) - jnp.float32(whole)) / jnp.linalg.norm(jnp.float32(whole)))
        rows.append({"sequences": sequences, "tokens": tokens, "form": name, "equal": f"{equal:.4%}"})
        rows[-1]["difference"] = f"{difference:.2e}"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"products": [], "attention": []}
    calls: list[tuple[str, Callable]] = [("attention", partial(attention, *shape)) for shape in ((8, 1000), (64, 1000))]
    calls += [("products", partial(products, name)) for name in ("gate", "down", "o", "k")]
    for name, call in calls:
        try:
            rows = call()
        except Exception as error:  # the others still say something
            print(f"{name} FAILED: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        results[name] += rows
        print(table(rows), flush=True)
        if args.json:
            write_results(args.json, results)


if __name__ == "__main__":
    main()
