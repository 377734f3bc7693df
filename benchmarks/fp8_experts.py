"""Time GPT-OSS's experts from MXFP4: expanded to bf16, and multiplied in FP8, which holds their values.

    python benchmarks/fp8_experts.py --json benchmarks/results/fp8_experts.json

One layer of gpt-oss-20b with adapters of rank 16, in alternation: forward, and backward to tokens and adapters.
`--sweep` times each pass and matmul by itself, those in FP8 with several tiles.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import milliseconds, table, write_results

from jaxglue.ops.backend import compute_capability
from jaxglue.ops.moe import ExpertAdapter, ExpertLora, GroupMetadata, moe_mlp, route
from jaxglue.ops.moe.tiles import GroupedTiles, MatmulTiles, grouped_tiles
from jaxglue.ops.moe.triton import TritonMoe
from jaxglue.ops.moe.vjp import ExpertRows, ExpertScales
from jaxglue.ops.projection.fp8 import encode
from jaxglue.ops.quant import dequantize, mxfp4_to_fp8
from jaxglue.ops.quant.mxfp4 import MXFP4

D, E, X, R = 2880, 32, 4, 16
"""Model and feed-forward dimension, experts, experts per token, rank."""
TILES = ((256, 128, 8, 4), (256, 128, 8, 3), (256, 64, 8, 4), (128, 128, 8, 4), (128, 128, 4, 4), (256, 256, 8, 2))
"""(block_n, block_k, warps, stages) of FP8's grouped matmul."""
MATMULS = {"gate and up": (2 * D, D), "down": (D, D)}


def matrices(key, out: int, into: int) -> MXFP4:
    """Draw random matrices of all experts whose blocks' exponents differ by up to 5."""
    blocks, scales = jax.random.split(key)
    return MXFP4(
        blocks=jax.random.bits(blocks, (E, out, into // 32, 16), jnp.uint8),
        scales=jax.random.randint(scales, (E, out, into // 32), 115, 121).astype(jnp.uint8),
    )


def make_layer(tokens: int):
    """Return (inputs, cotangents) of `layer`."""
    keys = iter(jax.random.split(jax.random.key(0), 12))
    normal = lambda *shape, scale=1.0: scale * jax.random.normal(next(keys), shape)  # noqa: E731
    gate_up = ExpertAdapter(normal(E, R, D, scale=D**-0.5), normal(E, 2 * D, R, scale=0.02))
    down = ExpertAdapter(normal(E, R, D, scale=D**-0.5), normal(E, D, R, scale=0.02))
    x, dout = (normal(tokens, D).astype(jnp.bfloat16) for _ in range(2))
    weights = matrices(next(keys), 2 * D, D), matrices(next(keys), D, D)
    return (x, ExpertLora(gate_up=gate_up, down=down)), (normal(tokens, E), *weights), dout


def layer(x, lora, frozen, *, fp8: bool):
    """Apply the experts."""
    logits, gate_up, down = frozen
    routing = route(logits, X, order="topk_softmax")
    return moe_mlp(x, routing, gate_up, down, activation="gpt_oss", transpose_rhs=True, lora=lora, fp8=fp8)


def gradients(inputs, frozen, dout, *, fp8: bool):
    """Return the output and the gradients to tokens and adapters."""
    out, pull = jax.vjp(lambda x, lora: layer(x, lora, frozen, fp8=fp8), *inputs)
    return out, pull(dout)


def alternate(functions: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of functions called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(milliseconds(function, repeats=3))
    return {name: statistics.median(values) for name, values in times.items()}


def cosine(a, b) -> float:
    a, b = (np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def whole_layer(tokens: int, rounds: int) -> list[dict]:
    """Time a layer in both formats, and compare their results."""
    inputs, frozen, dout = make_layer(tokens)
    formats = {"bf16": False, "FP8": True}
    forward = {name: jax.jit(partial(layer, fp8=fp8)) for name, fp8 in formats.items()}
    both = {name: jax.jit(partial(gradients, fp8=fp8)) for name, fp8 in formats.items()}
    ahead = alternate({name: partial(f, *inputs, frozen) for name, f in forward.items()}, rounds)
    there_and_back = alternate({name: partial(f, inputs, frozen, dout) for name, f in both.items()}, rounds)
    results = {name: f(inputs, frozen, dout) for name, f in both.items()}
    (out, (dx, dlora)), (exact_out, (exact_dx, exact_dlora)) = results["FP8"], results["bf16"]
    print(f"cosine with bf16: output {cosine(out, exact_out):.5f}, tokens {cosine(dx, exact_dx):.5f}", end=", ")
    print(f"adapters {cosine(dlora, exact_dlora):.5f}", flush=True)
    return [
        {"multiplied in": name, "forward ms": round(ahead[name], 3), "with backward ms": round(there_and_back[name], 3)}
        for name in formats
    ]


def parts(tokens: int, rounds: int) -> list[dict]:
    """Time the matmuls and passes by themselves, FP8's with every choice of tiles."""
    capability = compute_capability()
    assert capability is not None
    kernels, rows = TritonMoe.of(capability, tiles=grouped_tiles(capability)), tokens * X
    groups = GroupMetadata.of(jax.device_put(np.full(E, rows // E, np.int32)), rows)
    results = []
    for name, (out, into) in MATMULS.items():
        weight = matrices(jax.random.key(1), out, into)
        x = jax.random.normal(jax.random.key(2), (rows, into), jnp.bfloat16)
        dense, (codes, factors) = jax.jit(dequantize)(weight), jax.jit(mxfp4_to_fp8)(weight)
        quantized, scales = jax.jit(encode)(x)
        passes = {
            "expand to bf16": partial(jax.jit(dequantize), weight),
            "expand to e4m3": partial(jax.jit(mxfp4_to_fp8), weight),
            "expand to e4m3, transposed": partial(jax.jit(partial(mxfp4_to_fp8, transposed=True)), weight),
            "quantize rows": partial(jax.jit(encode), x),
        }
        plain = jax.jit(
            lambda x, w, kernels=kernels: kernels.matmul(ExpertRows(x), w, None, groups, transpose_rhs=True)
        )
        matmuls = {"bf16 (128 × 256 × 64)": partial(plain, x, dense)}
        for tile in TILES:
            matmuls[f"FP8 {tile}"] = partial(fp8_matmul(kernels, tile, groups), quantized, codes, scales, factors)
        for what, ms in measured(passes | matmuls, rounds).items():
            rate = 2e-9 * rows * out * into / ms if what in matmuls and ms else 0
            results.append({"matrices": name, "what": what, "ms": round(ms, 3), "TFLOP/s": round(rate)})
    return results


def measured(functions: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Return the times of the functions that compile."""
    working = {}
    for name, function in functions.items():
        try:
            jax.block_until_ready(function())
            working[name] = function
        except Exception as error:
            print(f"{name}: {str(error).splitlines()[0]:.200}", flush=True)
    return alternate(working, rounds)


def fp8_matmul(kernels: TritonMoe, tile: tuple[int, int, int, int], groups: GroupMetadata) -> Callable:
    """Return the grouped matmul by other tiles."""
    block_n, block_k, warps, stages = tile
    matmul = MatmulTiles(block_m=128, block_n=block_n, block_k=block_k // 2, num_warps=warps, num_stages=stages)
    kernels = replace(kernels, tiles=GroupedTiles(matmul=matmul, outer=kernels.tiles.outer))

    def run(x, w, scales, factors):
        scaled = ExpertScales(scales, factors, jnp.bfloat16)
        return kernels.matmul(ExpertRows(x), w, None, groups, transpose_rhs=True, scales=scaled)

    return jax.jit(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = whole_layer(args.tokens, args.rounds)
    print(table(rows), flush=True)
    if args.sweep:
        print(table(swept := parts(args.tokens, args.rounds)))
        rows += swept
    if args.json:
        write_results(args.json, rows)


if __name__ == "__main__":
    main()
