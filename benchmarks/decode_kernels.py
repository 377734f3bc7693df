"""Time the kernels of a decode step against the memory's speed: attention over pages, projections, experts.

    python benchmarks/decode_kernels.py --json benchmarks/results/decode_kernels.json

A row's limit is the time to read its weights, or visible keys and values, at the rate of a plain reduction in the same
run, or to multiply at the tensor cores' rate where that takes longer. Kernels run many times inside one program, with
weights that do not fit into the L2 cache together. `error` is the relative difference from float32.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure import table, write_results

from jaxglue.ops.gated_mlp import GatedParts, gated_mlp
from jaxglue.ops.moe import make_routing, moe_mlp, route
from jaxglue.ops.paged_attention import KVPages, make_pages, paged_attention
from jaxglue.ops.projection import LowRankAdapter, Projection, adapted_projection
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.ops.quant.mxfp4 import quantize_mxfp4

RATE = {"none": 700e12, "fp8": 1400e12}
"""FLOP/s of long matmuls on an H100 or H200, by the weights' format; others multiply in bfloat16."""
PAGE, RANK, LARGE = 64, 16, 4e8
"""The last: values of the weights in a program, many times what the L2 cache holds."""
TURNS = 10
"""Calls in a program, whose start takes longer than a kernel."""
SETTINGS = (
    *((rows, quantize, False) for rows in (1, 64, 256) for quantize in ("none", "fp8")),
    (64, "none", True),
    (64, "int8", False),
    (64, "nf4", False),
)
"""Rows, weights' format, and whether there are live adapters."""
QWEN3_8B = {"q, k, v": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "feed-forward": (4096, (12288, 12288))}
"""Inputs, and outputs of the projections that share them; `feed-forward` includes the projection back."""
EXPERTS = {"qwen3-30b-a3b": (128, 8, 2048, 768, "swiglu", False), "gpt-oss-20b": (32, 4, 2880, 2880, "gpt_oss", True)}
"""Experts, experts of a token, D, F, activation, and whether matrices are in MXFP4."""


class Decoding(NamedTuple):
    """Conditions of decoding."""

    dropout_key: None = None
    fp8: bool = True
    inference: bool = True


def seconds(function: Callable, *arguments, repeats: int = 5) -> float:
    """Return the least time of a call after two others."""
    for _ in range(2):
        jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begun)
    return min(times)


class Case(NamedTuple):
    """A kernel at a shape, compiled."""

    name: str
    shape: str
    program: Callable
    arguments: tuple
    calls: int
    """Calls of the kernel in a run of the program."""
    limit: float
    """Seconds of a call at the memory's or the tensor cores' rate."""
    error: float

    def row(self) -> dict[str, Any]:
        """Time the case."""
        taken = seconds(self.program, *self.arguments) / self.calls
        return {
            "kernel": self.name,
            "shape": self.shape,
            "us": round(taken * 1e6, 1),
            "limit us": round(self.limit * 1e6, 1),
            "of the limit": f"{self.limit / taken:.0%}",
            "error": f"{self.error:.4f}",
        }


def looped(function: Callable, *arguments, **options) -> Any:
    """Return a program that calls a function `TURNS` times, one after another, and returns its last results.

    Args:
        function: of arrays.
        arguments: its arrays.
        options: of `jax.jit`.
    """
    results = jax.eval_shape(function, *arguments)

    def run(*arguments):
        def turn(i, _):
            again, _ = jax.lax.optimization_barrier((arguments, i))  # or XLA would call it once, before the loop
            return function(*again)

        return jax.lax.fori_loop(0, TURNS, turn, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results))

    return jax.jit(run, **options)


def read_rate() -> float:
    """Return the bytes/s of a reduction over 2 GiB."""
    x, turns = jnp.ones((1 << 16, 1 << 14), jnp.bfloat16), 10

    @jax.jit
    def run(x):
        def turn(_, total):
            return total * 0.5 + (x + total.astype(x.dtype)).astype(jnp.float32).sum(1).max()

        return jax.lax.fori_loop(0, turns, turn, jnp.float32(0))

    return turns * x.nbytes / seconds(run, x)


def draw(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def exact(tree: Any) -> Any:
    """Return float32 values of a tree's floats, quantized ones as they are."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def error(got: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))


def attention(streams: int, tokens: int, heads: tuple[int, int, int], dtype, rate: float) -> Case:
    """Compile attention of streams with this many tokens each; heads are (N, K, H)."""
    (N, K, H), P = heads, -(-tokens // PAGE)
    tables = jnp.asarray(1 + np.random.default_rng(0).permutation(streams * P).reshape(streams, P), jnp.int32)
    cache = make_pages(streams * P + 1, K, PAGE, H, dtype)
    keys, values = (draw(i, *cache.keys.shape).astype(dtype) for i in range(2))
    scales = [None if x is None else x + 0.01 for x in (cache.key_scales, cache.value_scales)]
    cache = KVPages(keys=keys, values=values, key_scales=scales[0], value_scales=scales[1])
    positions, q, layers = jnp.full(streams, tokens - 1, jnp.int32), draw(2, streams, N, H), 4

    def chain(q, cache):
        for _ in range(layers):
            q = paged_attention(q, cache, tables, positions)
        return q

    few = slice(0, 2)
    want = paged_attention(*exact((q[few], cache)), tables[few], positions[few], backend="reference")
    difference = error(paged_attention(q, cache, tables, positions)[few], want)
    limit = streams * tokens * 2 * K * (H * keys.dtype.itemsize + (0 if scales[0] is None else 4)) / rate
    shape = f"{streams} × {tokens:,} tokens, {N}/{K} heads of {H}, {jnp.dtype(dtype).name}"
    return Case("attention", shape, looped(chain, q, cache), (q, cache), layers * TURNS, limit, difference)


def projections(seed: int, K: int, sizes: Sequence[int], quantize: str, adapted: bool) -> list[Projection]:
    """Return random projections of one input."""

    def adapter(i: int, N: int) -> LowRankAdapter | None:
        A, B = draw(i, RANK, K, scale=K**-0.5), draw(i, N, RANK, scale=0.1)
        return LowRankAdapter(A=A.astype(jnp.float32), B=B.astype(jnp.float32), scale=2.0) if adapted else None

    made = FORMATS[quantize].quantize
    parts = ((seed + i, N) for i, N in enumerate(sizes))
    return [Projection(weight=made(draw(i, N, K, scale=K**-0.5)), adapter=adapter(i, N)) for i, N in parts]


def arrays_of(part: Projection) -> tuple[Any, tuple[jax.Array, jax.Array] | None]:
    return part.weight, None if part.adapter is None else (part.adapter.A, part.adapter.B)


def rebuilt(weight: Any, matrices: tuple[jax.Array, jax.Array] | None) -> Projection:
    """Return a projection from `arrays_of` it."""
    adapter = None if matrices is None else LowRankAdapter(A=matrices[0], B=matrices[1], scale=2.0)
    return Projection(weight=weight, adapter=adapter)


def multiply(x, part: Projection) -> jax.Array:
    """Return a projection's product in float32."""
    weight = dequantize(part.weight, jnp.float32) if is_quantized(part.weight) else part.weight.astype(jnp.float32)
    y = x @ weight.T
    return y if part.adapter is None else y + part.adapter.scale * (x @ part.adapter.A.T) @ part.adapter.B.T


def projection(name: str, rows: int, quantize: str, adapted: bool, rate: float) -> Case:
    """Compile the projections of one input, or a whole feed-forward, of Qwen3-8B."""
    (K, sizes), gated = QWEN3_8B[name], name == "feed-forward"
    x, stream = draw(1, 1, rows, K), draw(2, 1, rows, 4096)
    values = sum(sizes) * K * (1.5 if gated else 1)
    copies = max(3, int(LARGE // values))
    weights = []
    for copy in range(copies):
        parts = projections(1000 * copy, K, sizes, quantize, adapted)
        weights.append(parts + (projections(1000 * copy + 9, sizes[0], (4096,), quantize, adapted) if gated else []))

    def apply(x, parts):
        if gated:
            return [gated_mlp(x, GatedParts(*parts), Decoding(), stream=stream)]
        return adapted_projection(x, parts, Decoding(), stream=stream if name == "o" else None)

    def chain(x, copies):
        return [apply(x, [rebuilt(*arrays) for arrays in each]) for each in copies]

    arguments = x, [[arrays_of(part) for part in parts] for parts in weights]
    program = looped(chain, *arguments)
    with jax.default_matmul_precision("highest"):
        wide, parts = x.astype(jnp.float32), weights[0]
        want = multiply(wide, parts[0])
        if gated:
            want = multiply(jax.nn.silu(want) * multiply(wide, parts[1]), parts[2])
        want = want + stream if gated or name == "o" else want
    difference = error(program(*arguments)[0][0], want)
    size = {"none": 2, "fp8": 1, "int8": 1, "nf4": 0.516}[quantize]
    limit = max(values * size / rate, 2 * rows * values / RATE.get(quantize, RATE["none"]))
    shape = f"{rows} rows, {quantize.replace('none', 'bf16')}{', live adapters' if adapted else ''}"
    return Case(name, shape, program, arguments, copies * TURNS, limit, difference)


def taken(matrices: Any, chosen: jax.Array) -> Any:
    """Return the chosen experts' matrices."""
    return jax.tree.map(lambda x: x[chosen], matrices)


def experts(name: str, rows: int, rate: float) -> Case:
    """Compile a feed-forward of experts."""
    E, k, D, F, activation, packed = EXPERTS[name]
    x, logits, copies = draw(1, rows, D), jax.random.normal(jax.random.key(3), (rows, E)), 2

    def matrix(seed: int, columns: int, inputs: int):
        values = draw(seed, E, columns, inputs, scale=inputs**-0.5)
        return quantize_mxfp4(values) if packed else values

    weights = [(matrix(2 * i, 2 * F, D), matrix(2 * i + 1, D, F)) for i in range(copies)]
    options: dict[str, Any] = {"activation": activation, "transpose_rhs": True}

    def chain(x, logits, weights):
        routing = route(logits, k, normalize=True)
        return [moe_mlp(x, routing, *matrices, **options, inference=True) for matrices in weights]

    few = slice(0, 1)
    with jax.default_matmul_precision("highest"):
        routing = route(logits[few], k, normalize=True)
        chosen = routing.expert_ids[0]  # the reference multiplies by all experts that it is given
        dense = [dequantize(m, jnp.float32) if packed else m.astype(jnp.float32) for m in taken(weights[0], chosen)]
        own = make_routing(jnp.arange(k)[None], routing.weights, k)
        want = moe_mlp(x[few].astype(jnp.float32), own, *dense, **options, backend="reference")
    jitted = looped(chain, x, logits, weights)
    touched = len(np.unique(jax.lax.top_k(logits, k)[1]))
    limit = touched * 3 * D * F * (0.5 + 1 / 32 if packed else 2) / rate
    shape = f"{rows} rows, {touched} of {E} experts, {'MXFP4' if packed else 'bf16'}"
    difference = error(jitted(x, logits, weights)[0][few], want)
    return Case(name, shape, jitted, (x, logits, weights), copies * TURNS, limit, difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rate, heads, fp8 = read_rate(), (32, 8, 128), jnp.float8_e4m3fn
    print(f"{jax.devices()[0].device_kind}: reads {rate / 1e12:.2f} TB/s", flush=True)
    made: list[Callable[[], Case]] = []
    for streams, tokens, dtype in (
        (256, 1000, jnp.bfloat16),
        (256, 1000, fp8),
        (64, 1000, jnp.bfloat16),
        (1, 16000, fp8),
    ):
        made.append(partial(attention, streams, tokens, heads, dtype, rate))
    for name in QWEN3_8B:
        for rows, quantize, adapted in SETTINGS:
            made.append(partial(projection, name, rows, quantize, adapted, rate))
    made += [partial(experts, name, rows, rate) for name in EXPERTS for rows in (1, 64, 256)]
    results = []
    for some in itertools.batched(made, 8):  # Triton compiles a kernel in seconds, and weights fill the memory
        with ThreadPoolExecutor(8) as pool:
            cases = list(pool.map(lambda make: make(), some))
        results += [case.row() for case in cases]
        print(table(results[-len(some) :]), flush=True)
    if args.json:
        write_results(args.json, {"read TB/s": round(rate / 1e12, 3), "rows": results})


if __name__ == "__main__":
    main()
