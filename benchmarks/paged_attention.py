"""Time attention of new tokens over pages, as a decode step calls it, against the time to read keys and values.

    python benchmarks/paged_attention.py --json benchmarks/results/paged_attention.json

Qwen3-8B's heads; several layers' caches in one program. Contexts are equal, or uniform up to twice the mean with the
longest first, as engines sort their slots. The limit is the visible keys' and values' bytes, with their scales, at the
rate of a plain reduction in the same run. `error` is the relative difference from float32 on some streams, and `again`
whether a second run gave the same bits. `--tiles` compares others: tokens of a warp : warps : stages.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_kernels import PAGE, draw, error, exact, read_rate
from measure import table, write_results

from jaxglue.ops.norm_rope import LLAMA_NORM, HeadNorms
from jaxglue.ops.paged_attention import (
    APPEND_AND_ATTEND,
    PAGED_ATTENTION,
    KVPages,
    append,
    append_and_attend,
    make_pages,
    paged_attention,
)
from jaxglue.ops.paged_attention.triton import PagedTiles, TritonPagedAttention
from jaxglue.ops.rope import RopeConfig, RopeTables, Rotary, rope_tables

HEADS = 32, 8, 128
LAYERS, TURNS, FEW, REPEATS = 4, 8, 4, 9
FP8 = jnp.float8_e4m3fn


class Case(NamedTuple):
    """Streams of a step."""

    streams: int
    context: int
    """Tokens of a stream, in the mean where they are uneven."""
    dtype: Any
    uneven: bool = False

    @property
    def name(self) -> str:
        """Return the case in words."""
        kind = "uneven" if self.uneven else "equal"
        return f"{self.streams} × {self.context:,} {kind}, {'fp8' if self.dtype == FP8 else 'bf16'}"


CASES = [
    Case(256, 1000, FP8),
    Case(256, 1000, jnp.bfloat16),
    Case(64, 1000, FP8),
    Case(256, 388, FP8, True),
    Case(512, 388, FP8, True),
    Case(64, 388, jnp.bfloat16, True),
    Case(256, 388, jnp.bfloat16, True),
    Case(512, 388, jnp.bfloat16, True),
]


class Inputs(NamedTuple):
    """Arrays of a case, for all tiles."""

    qkv: tuple[jax.Array, jax.Array, jax.Array]
    caches: list[KVPages]
    places: tuple
    """Arguments of `append` after the cache."""
    tables: jax.Array
    positions: jax.Array


def make(case: Case) -> Inputs:
    """Draw a case's arrays."""
    (N, K, H), rng = HEADS, np.random.default_rng(0)
    lengths = np.full(case.streams, case.context)
    if case.uneven:
        lengths = np.sort(rng.integers(1, 2 * case.context, case.streams))[::-1]
    pages = -(-int(lengths.max()) // PAGE)
    tables = jnp.asarray(1 + rng.permutation(case.streams * pages).reshape(case.streams, pages), jnp.int32)
    positions = jnp.asarray(lengths - 1, jnp.int32)
    empty = make_pages(case.streams * pages + 1, K, PAGE, H, case.dtype)

    @jax.jit
    def fill(key, cache):
        def values(array, key):
            if array.dtype == jnp.float32:  # scales: those of values with a deviation of one
                return jax.random.uniform(key, array.shape, minval=0.004, maxval=0.008)
            scale = 150 if array.dtype == FP8 else 1
            return (jnp.clip(jax.random.normal(key, array.shape, jnp.bfloat16), -2.9, 2.9) * scale).astype(array.dtype)

        leaves, tree = jax.tree.flatten(cache)
        return jax.tree.unflatten(tree, map(values, leaves, jax.random.split(key, len(leaves))))

    caches = [fill(jax.random.key(layer), empty) for layer in range(LAYERS)]
    rotary = Rotary(RopeConfig(rope_theta=1e6), H)
    rope = RopeTables((rotary,), (rope_tables(positions[None], rotary.config, H),))
    norms, rows = HeadNorms(jnp.ones(H), jnp.ones(H), 1e-6, LLAMA_NORM), jnp.arange(case.streams)
    places = tables[rows, positions // PAGE], positions % PAGE, rope, rotary, norms, 1.0
    qkv = draw(3, case.streams, N, H), draw(4, case.streams, K, H), draw(5, case.streams, K, H)
    return Inputs(qkv, caches, places, tables, positions)


def program(inputs: Inputs) -> Callable:
    """Return a function of (q, k, v, caches) that attends in all layers, several times."""

    def run(q, k, v, caches):
        outs = []
        for _ in range(TURNS):  # without a loop, whose turns would add their own time
            outs = []
            for index, cache in enumerate(caches):
                out, caches[index] = append_and_attend(q, k, v, cache, *inputs.places, inputs.tables, inputs.positions)
                outs.append(out)
        return outs, caches

    return run


def reference(inputs: Inputs) -> jax.Array:
    """Return float32 results of some streams, in the last layer."""
    q, _, cache = append(*inputs.qkv, inputs.caches[-1], *inputs.places)
    few = jnp.linspace(0, q.shape[0] - 1, FEW).astype(jnp.int32)
    arrays = exact((q[few], cache))
    return paged_attention(*arrays, inputs.tables[few], inputs.positions[few], backend="reference")


def compiled(inputs: Inputs, kernels: TritonPagedAttention, two: bool) -> Any:
    """Compile a case's program; `two` for a launch that writes and one that attends."""
    try:
        with PAGED_ATTENTION.using(kernels), APPEND_AND_ATTEND.using(None if two else kernels):
            return jax.jit(program(inputs), donate_argnums=3).lower(*inputs.qkv, inputs.caches).compile()
    except Exception as failure:
        return failure


def measured(case: Case, inputs: Inputs, run: Any, want: jax.Array, rate: float) -> dict[str, Any]:
    """Run a case; its caches are given back."""
    if isinstance(run, Exception):
        return {"us a layer": "-", "of the limit": "-", "error": repr(run)[:80], "again": "-"}

    def once() -> tuple[jax.Array, float]:
        begun = time.perf_counter()
        outs, inputs.caches[:] = jax.block_until_ready(run(*inputs.qkv, inputs.caches))
        return outs[-1], time.perf_counter() - begun

    (first, _), (second, _), *others = (once() for _ in range(REPEATS))
    taken = min(seconds for _, seconds in others) / TURNS / LAYERS
    few = jnp.linspace(0, case.streams - 1, FEW).astype(jnp.int32)
    _, K, H = HEADS
    token = 2 * K * (H * jnp.dtype(case.dtype).itemsize + (4 if case.dtype == FP8 else 0))
    limit = int((inputs.positions + 1).sum()) * token / rate
    return {
        "us a layer": round(taken * 1e6, 1),
        "of the limit": f"{limit / taken:.0%}",
        "error": f"{error(first[few], want):.5f}",
        "again": "equal" if bool((first == second).all()) else "DIFFERS",
    }


def kinds(tiles: Sequence[str]) -> dict[str, Callable[[], TritonPagedAttention]]:
    """Return kernels by name."""
    made = {"default": partial(TritonPagedAttention.of, (9, 0))}
    for text in tiles:
        tokens, warps, stages = map(int, text.split(":"))
        chosen = PagedTiles(tokens=tokens, num_warps=warps, num_stages=stages)
        made[text] = partial(TritonPagedAttention.of, (9, 0), tiles=chosen)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", nargs="*", default=[], help="tokens of a warp:warps:stages")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of CASES")
    parser.add_argument("--two", action="store_true", help="also one launch that writes and one that attends")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rate, results = read_rate(), []
    print(f"{jax.devices()[0].device_kind}: reads {rate / 1e12:.2f} TB/s", flush=True)
    for case in (CASES[i] for i in args.cases):
        inputs = make(case)
        want = reference(inputs)
        chosen = [(name, False) for name in kinds(args.tiles)] + ([("default", True)] if args.two else [])
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda kind: compiled(inputs, kinds(args.tiles)[kind[0]](), kind[1]), chosen))  # noqa: B023
        rows = []
        for (name, two), run in zip(chosen, runs, strict=True):
            rows.append({"case": case.name, "tiles": name, "launches": 2 if two else 1})
            rows[-1] |= measured(case, inputs, run, want, rate)
        results += rows
        print(table(rows), flush=True)
        if args.json:
            write_results(args.json, {"read TB/s": round(rate / 1e12, 3), "rows": results})


if __name__ == "__main__":
    main()
