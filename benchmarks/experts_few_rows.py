"""Time experts of few tokens, with and without adapters and by several tiles, against the time to read their matrices.

    python benchmarks/experts_few_rows.py --json benchmarks/results/experts_few_rows_adapters.json
    python benchmarks/experts_few_rows.py --layers gpt-oss-20b --formats mxfp4 --wide    # longer reads of rows beside

Both products of a layer for tokens routed at random, several layers' weights in one program, so that the L2 cache does
not hold them. The limit is the time to read the matrices of the experts that some token chooses, and their adapters,
at the rate of a plain reduction in the same run. `adapters` says what these add to the row before, without them;
`error` is the relative difference from float32 of the first token. Kernels that no GPU has run are taken, too.
"""

import argparse
import math
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_kernels import TURNS, draw, error, looped, read_rate, seconds, taken
from measure import table, write_results

from jaxglue.ops import backend
from jaxglue.ops.moe import FEW_ROWS_EXPERTS, ExpertAdapter, ExpertLora, make_routing, moe_mlp, route
from jaxglue.ops.moe.reference import Activation
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.ops.quant.mxfp4 import quantize_mxfp4
from jaxglue.ops.quant.stack import Stack, hold_matrices


class ExpertsChoice(NamedTuple):
    """Fields of `ExpertsTiles`, whose module needs Triton."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    ahead: int = 0


class Layer(NamedTuple):
    """Experts of a published model."""

    E: int
    k: int
    """Experts of a token."""
    D: int
    F: int
    activation: Activation
    formats: tuple[str, ...]


LAYERS = {
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, "gpt_oss", ("mxfp4", "none")),
    "qwen3-30b-a3b": Layer(128, 8, 2048, 768, "swiglu", ("none", "fp8", "nf4", "int8")),
    "qwen3.5-35b-a3b": Layer(256, 8, 2048, 512, "swiglu", ("fp8", "nf4")),
    "tiny": Layer(4, 2, 128, 64, "swiglu", ("none", "mxfp4", "fp8", "nf4", "int8")),
}
WIDE = {
    "mxfp4": {
        "64/128/4/4": ExpertsChoice(64, 128, 4, 4),
        "64/128/4/4, 512 bytes asked ahead": ExpertsChoice(64, 128, 4, 4, ahead=8),
        "64/128/4/4, 256 bytes asked ahead": ExpertsChoice(64, 128, 4, 4, ahead=4),
        "64/256/4/3": ExpertsChoice(64, 256, 4, 3),
        "64/256/4/4": ExpertsChoice(64, 256, 4, 4),
        "64/512/4/2": ExpertsChoice(64, 512, 4, 2),
        "64/512/4/3": ExpertsChoice(64, 512, 4, 3),
        "128/128/4/4": ExpertsChoice(128, 128, 4, 4),
        "128/256/4/3": ExpertsChoice(128, 256, 4, 3),
        "128/256/4/3, 512 bytes asked ahead": ExpertsChoice(128, 256, 4, 3, ahead=4),
    },
    "nf4": {
        "64/128/4/5": ExpertsChoice(64, 128, 4, 5),
        "128/128/4/4, 512 bytes asked ahead": ExpertsChoice(128, 128, 4, 4, ahead=8),
        "64/128/4/5, 512 bytes asked ahead": ExpertsChoice(64, 128, 4, 5, ahead=8),
        "64/256/4/3": ExpertsChoice(64, 256, 4, 3),
        "128/256/4/3": ExpertsChoice(128, 256, 4, 3),
        "64/512/4/2": ExpertsChoice(64, 512, 4, 2),
    },
    "int8": {
        "64/128/4/5, 512 bytes asked ahead": ExpertsChoice(64, 128, 4, 5, ahead=4),
        "64/256/4/3": ExpertsChoice(64, 256, 4, 3),
    },
    "fp8": {
        "64/128/4/5, 512 bytes asked ahead": ExpertsChoice(64, 128, 4, 5, ahead=4),
        "64/256/4/3": ExpertsChoice(64, 256, 4, 3),
    },
}
"""Tiles (columns, step, warps, stages) whose steps read more of a row than those in use, or ask for it ahead."""
IN_USE = "in use"
COPIES = 2
"""Layers whose weights are read in turn."""


def matrix(layer: Layer, form: str, seed: int, rows: int, columns: int) -> Any:
    """Return random matrices of all experts in a format."""
    values = draw(seed, layer.E, rows, columns, scale=columns**-0.5)
    return quantize_mxfp4(values) if form == "mxfp4" else hold_matrices(FORMATS[form], values)


def adapter(layer: Layer, rank: int, seed: int, rows: int, columns: int) -> ExpertAdapter:
    """Return a random adapter in float32, as models hold it."""
    A, B = draw(seed, layer.E, rank, columns, scale=columns**-0.5), draw(seed + 1, layer.E, rows, rank, scale=0.1)
    return ExpertAdapter(A.astype(jnp.float32), B.astype(jnp.float32))


@lru_cache(maxsize=COPIES)
def weights_of(layer: Layer, form: str, rank: int, copy: int) -> tuple[Any, Any, ExpertLora]:
    """Return gate and up as one, down, and their adapters, of one copy of the layer."""
    up, down = (2 * layer.F, layer.D), (layer.D, layer.F)
    made = partial(adapter, layer, rank)
    lora = ExpertLora(gate_up=made(10 * copy + 3, *up), down=made(10 * copy + 5, *down), scale=2.0)
    of = partial(matrix, layer, form)
    return of(10 * copy + 1, *up), of(10 * copy + 2, *down), lora if rank else ExpertLora()


def chosen_matrices(weight: Any, chosen: jax.Array) -> jax.Array:
    """Return matrices of some experts in float32."""
    if isinstance(weight, Stack):
        return dequantize(weight, jnp.float32)[chosen]
    return (
        dequantize(taken(weight, chosen), jnp.float32) if is_quantized(weight) else weight[chosen].astype(jnp.float32)
    )


def want(layer: Layer, x, logits, weights: tuple[Any, Any, ExpertLora]) -> jax.Array:
    """Return the first token's result in float32."""
    gate_up, down, lora = weights
    with jax.default_matmul_precision("highest"):
        routing = route(logits[:1], layer.k, normalize=True)
        chosen = routing.expert_ids[0]  # the reference multiplies by all experts that it is given
        own = make_routing(jnp.arange(layer.k)[None], routing.weights, layer.k)
        few = jax.tree.map(lambda part: part[chosen], lora)
        dense = [chosen_matrices(weight, chosen) for weight in (gate_up, down)]
        options: dict[str, Any] = {"activation": layer.activation, "transpose_rhs": True, "lora": few}
        return moe_mlp(x[:1].astype(jnp.float32), own, *dense, **options, backend="reference")


def measure(layer: Layer, form: str, tokens: int, rank: int, rate: float, tiles: str = IN_USE) -> dict:
    """Time both products by some tiles of `WIDE`, or those in use, with adapters of this rank, 0 for none."""
    x, logits = draw(1, tokens, layer.D), jax.random.normal(jax.random.key(3), (tokens, layer.E))
    weights = [weights_of(layer, form, rank, copy) for copy in range(COPIES)]

    def chain(x, logits, weights):
        routing = route(logits, layer.k, normalize=True, inference=True)
        options: dict[str, Any] = {"activation": layer.activation, "transpose_rhs": True, "inference": True}
        return [moe_mlp(x, routing, gate_up, down, lora=lora, **options) for gate_up, down, lora in weights]

    touched = len(np.unique(jax.lax.top_k(logits, layer.k)[1])) / layer.E
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(part)) * touched for part in (weights[0][:2], weights[0][2])]
    shown = {"tokens": tokens, "format": form.replace("none", "bf16"), "rank": rank}
    shown["tiles"] = tiles
    try:
        with using(None if tiles == IN_USE else WIDE[form][tiles]):
            program = looped(chain, x, logits, weights)
            difference = error(program(x, logits, weights)[0][:1], want(layer, x, logits, weights[0]))
            spent = seconds(program, x, logits, weights) / (COPIES * TURNS)
    except Exception as failed:  # a tile that takes too many resources is a result, too
        return shown | {"us": math.nan, "limit us": round(sum(sizes) / rate * 1e6, 1), "error": str(failed)[:60]}
    return shown | {
        "us": round(spent * 1e6, 1),
        "limit us": round(sum(sizes) / rate * 1e6, 1),
        "of the limit": f"{sum(sizes) / rate / spent:.0%}",
        "bytes of adapters": f"{sizes[1] / sizes[0]:.1%}",
        "error": f"{difference:.4f}",
    }


def using(tiles: ExpertsChoice | None) -> Any:
    """Let experts take these tiles in a context; None leaves the choice, which is the reference on a CPU."""
    capability = backend.compute_capability()
    if tiles is None or capability is None:
        return jax.default_matmul_precision(None)
    from jaxglue.ops.moe.few_rows import ExpertsTiles, TritonFewRowsExperts

    made = TritonFewRowsExperts.of(capability, tiles=ExpertsTiles(**tiles._asdict()))
    return FEW_ROWS_EXPERTS.using(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    published = [name for name in LAYERS if name != "tiny"]
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=published)
    parser.add_argument("--formats", nargs="+", help="of those that a layer has; by default all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--wide", action="store_true", help="also tiles whose steps read more of a row, without adapters"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backend.UNTRIED.clear()
    rate, results = read_rate(), list[dict]()
    print(f"{jax.devices()[0].device_kind}: reads {rate / 1e12:.2f} TB/s", flush=True)
    for name in args.layers:
        layer = LAYERS[name]
        for form in layer.formats if args.formats is None else [f for f in args.formats if f in layer.formats]:
            rows = list[dict]()
            for tokens in args.tokens:
                rows.append(plain := measure(layer, form, tokens, 0, rate))
                for tiles in WIDE.get(form, ()) if args.wide else ():
                    rows.append(measure(layer, form, tokens, 0, rate, tiles))
                    print(rows[-1], flush=True)
                adapted = measure(layer, form, tokens, args.rank, rate)
                rows.append(adapted | {"adapters": f"{adapted['us'] / plain['us'] - 1:+.1%}"})
                print(rows[-1], flush=True)
            results += [{"layer": name, **row} for row in rows]
            columns = dict.fromkeys(key for row in rows for key in row)
            print(f"\n{name}\n{table([dict.fromkeys(columns, '') | row for row in rows])}", flush=True)
            if args.json:
                write_results(args.json, {"read TB/s": round(rate / 1e12, 3), "rows": results})


if __name__ == "__main__":
    main()
