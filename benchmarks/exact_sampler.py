"""Probe an exact sampler: which products give a row the same bits among few rows as among many, and at what price.

    python benchmarks/exact_sampler.py --json benchmarks/results/exact_sampler.json

Sampling multiplies 64 or 256 rows where training multiplies 16,384. `equal` is the share of outputs whose bits are
those of the same rows among 16,384, `same as XLA` those of XLA's product of 16,384 rows. `fixed` is a Triton matmul
that sums along K in one order, whatever its tiles. Attention is over 1,000 keys, in pages against packed rows.
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

MANY, FEW = 16384, (64, 256)
MATRICES = {"gate": (12288, 4096), "down": (4096, 12288), "o": (4096, 4096), "k": (1024, 4096)}
OPTIONS: dict[str, dict[str, Any]] = {
    "XLA": {},
    "XLA without split K": {"xla_gpu_enable_split_k_autotuning": False},
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


class Case(NamedTuple):
    """A product of some rows, compiled: once for its bits, and several times with other weights for its time."""

    matrix: str
    rows: int
    form: str
    out: jax.Array
    program: Callable
    arguments: tuple
    calls: int

    def row(self, many: dict[str, np.ndarray]) -> dict[str, Any]:
        """Time the case and compare its bits with those of the same rows among many."""
        own, taken = np.asarray(self.out).view(np.int16), seconds(self.program, *self.arguments) / self.calls * 1e6
        same = {"equal": many.get(self.form, many["XLA"]), "same as XLA": many["XLA"]}
        found = {"matrix": self.matrix, "rows": self.rows, "form": self.form, "us": round(taken, 1)}
        return found | {name: f"{(own == other[: self.rows]).mean():.4%}" for name, other in same.items()}


def case(name: str, rows: int, form: str) -> Case | None:
    """Compile a product; None where that fails."""
    (N, K), function = MATRICES[name], {"fixed": fixed, "ours": ours}.get(form, xla)
    x, options, turns = draw(1, MANY, K)[:rows], OPTIONS.get(form) or None, 10
    count = 2 if rows == MANY else 16 if N * K < 2e7 else 8
    weights = [draw(10 + i, N, K, scale=K**-0.5) for i in range(count)]

    def chain(x, weights):
        return [function(x, weight)[:1] for weight in weights]

    try:
        out = jax.jit(function).lower(x, weights[0]).compile(compiler_options=options)(x, weights[0])
        program = looped(chain, x, weights).lower(x, weights).compile(compiler_options=options)
        return Case(name, rows, form, out, program, (x, weights), turns * count)
    except Exception as error:  # the others still say something
        print(f"{name} {rows} {form} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def products(name: str, forms: Sequence[str]) -> list[dict[str, Any]]:
    """Compare and time the products with a matrix."""
    calls = [(MANY, form) for form in forms if form != "ours"]
    calls += [(rows, form) for rows in FEW for form in forms]
    with ThreadPoolExecutor(8) as pool:
        cases = [found for found in pool.map(lambda call: case(name, *call), calls) if found is not None]
    many = {each.form: np.asarray(each.out).view(np.int16) for each in cases if each.rows == MANY}
    return [each.row(many) for each in cases]


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
    parser.add_argument("--matrices", nargs="+", choices=MATRICES, default=[*MATRICES])
    parser.add_argument("--forms", nargs="+", default=[*OPTIONS, "fixed", "ours"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"products": [], "attention": []}
    calls: list[tuple[str, Callable]] = [("products", partial(products, name, args.forms)) for name in args.matrices]
    calls += [("attention", partial(attention, *shape)) for shape in ((64, 1000),)]
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
