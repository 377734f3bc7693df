"""Time experts of few tokens, with and without adapters and by several tiles, against the time to read their matrices.

    python benchmarks/experts_few_rows.py --json benchmarks/results/experts_few_rows_adapters.json
    python benchmarks/experts_few_rows.py --layers gpt-oss-20b --formats mxfp4 --variants    # other tiles beside

Both products of a layer for tokens routed at random, several layers' weights in one program, so that the L2 cache does
not hold them. The limit is the time to read the matrices of the experts that some token chooses, and their adapters,
at the rate of a plain reduction in the same run. `adapters` says what these add to the row before, without them;
`error` is the relative difference from float32 of the first token. Kernels that no GPU has run are taken, too.
`--once` runs each program once, for a profiler.
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
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
from jaxglue.ops.moe.few_rows import RingTiles
from jaxglue.ops.moe.reference import Activation
from jaxglue.ops.moe.routing import few_rows_tile
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.ops.quant.mxfp4 import quantize_mxfp4
from jaxglue.ops.quant.stack import Stack, hold_matrices


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
    "granite-4-h-small": Layer(72, 10, 4096, 768, "swiglu", ("fp8",)),
    "tiny": Layer(4, 2, 128, 64, "swiglu", ("none", "mxfp4", "fp8", "nf4", "int8")),
}
IN_USE = "in use"
FORMER: dict[str, Any] = {"shrink_k": None, "half": False, "ring": None}
WIDE: dict[str, Any] = {"block_n": 64, "block_k": 256, "num_stages": 3, "registers": None}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "mxfp4": {
        "ring 3/4/2": {"ring": RingTiles(groups=3, stages=4, programs=2)},
        "ring 2/4/2": {"ring": RingTiles(groups=2, stages=4, programs=2)},
        "ring 3/6/1": {"ring": RingTiles(groups=3, stages=6, programs=1)},
        "128/128/4/4": WIDE | {"block_n": 128, "block_k": 128, "num_stages": 4, "ring": None},
    },
    "nf4": {"64/256/4/3": WIDE, "64/128/4/5": WIDE | {"block_k": 128, "num_stages": 5}},
    "int8": {"64/256/4/3": WIDE},
    "fp8": {
        "64/256/4/3": WIDE,
        "64/128/4/4": WIDE | {"block_k": 128, "num_stages": 4},
        "128/128/4/4": WIDE | {"block_n": 128, "block_k": 128, "num_stages": 4},
        "128/128/8/4": WIDE | {"block_n": 128, "block_k": 128, "num_stages": 4, "num_warps": 8},
    },
}
"""Changes of the tiles in use by format: columns, step, warps, stages; of rings warpgroups, places, programs."""
ADAPTED: dict[str, dict[str, Any]] = {
    "former": FORMER,
    "low ranks by one program": {"shrink_k": None},
    "without a ring": {"ring": None},
    "low ranks of 1024 columns": {"shrink_k": 1024},
    "in bfloat16": {"half": False},
    "64/128/4/5": {},
    "128/128/4/4": {"block_n": 128, "num_stages": 4},
    "128/128/4/4, low ranks by one program": {"block_n": 128, "num_stages": 4, "shrink_k": None},
    "128/128/4/5": {"block_n": 128},
    "128/128/8/5": {"block_n": 128, "num_warps": 8},
    "128/256/4/3": {"block_n": 128, "block_k": 256, "num_stages": 3},
    "64/256/4/4": {"block_k": 256, "num_stages": 4},
}
"""Changes with adapters."""
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
def matrices_of(layer: Layer, form: str, copy: int) -> tuple[Any, Any]:
    """Return gate and up as one, and down, of one copy of the layer."""
    of = partial(matrix, layer, form)
    return of(10 * copy + 1, 2 * layer.F, layer.D), of(10 * copy + 2, layer.D, layer.F)


@lru_cache(maxsize=COPIES)
def lora_of(layer: Layer, rank: int, copy: int) -> ExpertLora:
    """Return the adapters of one copy of the layer; none of rank 0."""
    if not rank:
        return ExpertLora()
    made = partial(adapter, layer, rank)
    gate_up = made(10 * copy + 3, 2 * layer.F, layer.D)
    return ExpertLora(gate_up=gate_up, down=made(10 * copy + 5, layer.D, layer.F), scales=(2.0, 2.0))


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


class Case(NamedTuple):
    """A layer's experts at some tokens, with adapters of this rank, 0 for none, by some tiles."""

    layer: Layer
    form: str
    tokens: int
    rank: int
    tiles: str = IN_USE

    @property
    def change(self) -> dict[str, Any] | None:
        """Return the fields in which tiles differ from those in use; None for these."""
        if self.tiles == IN_USE:
            return None
        return ADAPTED[self.tiles] if self.tiles in ADAPTED else VARIANTS[self.form][self.tiles]

    def inputs(self) -> tuple[jax.Array, jax.Array, list[tuple[Any, Any, ExpertLora]]]:
        """Return tokens, routers' logits, and weights."""
        x, layer = draw(1, self.tokens, self.layer.D), self.layer
        logits = jax.random.normal(jax.random.key(3), (self.tokens, layer.E))
        copies = range(COPIES)
        return x, logits, [(*matrices_of(layer, self.form, copy), lora_of(layer, self.rank, copy)) for copy in copies]

    def compile(self) -> Any:
        """Return the program; an exception for tiles that take too many resources, a result, too."""
        layer = self.layer

        def chain(x, logits, weights):
            routing = route(logits, layer.k, normalize=True, inference=True)
            options: dict[str, Any] = {"activation": layer.activation, "transpose_rhs": True, "inference": True}
            return [moe_mlp(x, routing, gate_up, down, lora=lora, **options) for gate_up, down, lora in weights]

        try:
            with using(self):
                return looped(chain, *self.inputs()).lower(*self.inputs()).compile()
        except Exception as failed:
            return failed

    def measure(self, program: Any, rate: float) -> dict:
        """Time the program."""
        x, logits, weights = inputs = self.inputs()
        touched = len(np.unique(jax.lax.top_k(logits, self.layer.k)[1])) / self.layer.E
        parts = weights[0][:2], weights[0][2]
        sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(part)) * touched for part in parts]
        shown = {"tokens": self.tokens, "format": self.form.replace("none", "bf16"), "rank": self.rank}
        shown["tiles"] = self.tiles
        try:
            if isinstance(program, Exception):
                raise program
            difference = error(program(*inputs)[0][:1], want(self.layer, x, logits, weights[0]))
            spent = seconds(program, *inputs) / (COPIES * TURNS)
        except Exception as failed:
            return shown | {"us": math.nan, "limit us": round(sum(sizes) / rate * 1e6, 1), "error": str(failed)[:60]}
        return shown | {
            "us": round(spent * 1e6, 1),
            "limit us": round(sum(sizes) / rate * 1e6, 1),
            "of the limit": f"{sum(sizes) / rate / spent:.0%}",
            "bytes of adapters": f"{sizes[1] / sizes[0]:.1%}",
            "error": f"{difference:.4f}",
        }


def using(case: Case) -> Any:
    """Let experts take a case's tiles in a context."""
    if case.change is None:
        return nullcontext()
    from jaxglue.ops.moe.few_rows import TritonFewRowsExperts, fitting_tiles

    rows = few_rows_tile(case.tokens * case.layer.k // case.layer.E)
    kind = {"none": "plain", "fp8": "bytes", "int8": "bytes"}.get(case.form, case.form)
    tiles = replace(fitting_tiles(kind, rows), **case.change)
    return FEW_ROWS_EXPERTS.using(TritonFewRowsExperts.of(backend.HOPPER, tiles=tiles))


def cases_of(layer: Layer, form: str, tokens: int, rank: int, *, variants: bool) -> list[Case]:
    """Return a layer's cases at some tokens, those with adapters last; on a CPU the reference has no tiles."""
    tiled = backend.compute_capability() is not None
    plain = Case(layer, form, tokens, 0)
    others = ("former", *(VARIANTS.get(form, ()) if variants else ())) if tiled else ()
    cases = [plain, *(plain._replace(tiles=tiles) for tiles in others)]
    rings = [tiles for tiles in others if tiles.startswith("ring")]
    adapted = (IN_USE, *ADAPTED, *rings) if tiled else (IN_USE,)
    return cases + [plain._replace(rank=rank, tiles=tiles) for tiles in adapted if rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    published = [name for name in LAYERS if name != "tiny"]
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=published)
    parser.add_argument("--formats", nargs="+", help="of those that a layer has; by default all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rank", type=int, default=16, help="of adapters; 0 leaves them out")
    parser.add_argument("--variants", action="store_true", help="also other tiles, without adapters")
    parser.add_argument("--tiles", nargs="+", help="of the cases, only those of these tiles")
    parser.add_argument("--once", action="store_true", help="run each program once, and time none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    backend.UNTRIED.clear()
    rate, results = math.nan if args.once else read_rate(), list[dict]()
    print(f"{jax.devices()[0].device_kind}: reads {rate / 1e12:.2f} TB/s", flush=True)
    for name in args.layers:
        layer = LAYERS[name]
        for form in layer.formats if args.formats is None else [f for f in args.formats if f in layer.formats]:
            cases = [c for n in args.tokens for c in cases_of(layer, form, n, args.rank, variants=args.variants)]
            cases = [case for case in cases if args.tiles is None or case.tiles in args.tiles]
            for case in cases[:: len(cases) - 1 or 1]:
                case.inputs()  # made once, before threads ask for them
            with ThreadPoolExecutor(8) as pool:
                programs = list(pool.map(Case.compile, cases))
            if args.once:
                for case, program in zip(cases, programs, strict=True):
                    jax.block_until_ready(program(*case.inputs()))
                continue
            rows, plain = list[dict](), dict[str, Any]()
            for case, program in zip(cases, programs, strict=True):
                row = case.measure(program, rate)
                if not case.rank and case.tiles in (IN_USE, *(args.tiles or ())[:1]):
                    plain = row
                adapters = {"adapters": f"{row['us'] / plain['us'] - 1:+.1%}"} if case.rank and plain else {}
                rows.append(row | adapters)
                print(rows[-1], flush=True)
            results += [{"layer": name, **row} for row in rows]
            columns = dict.fromkeys(key for row in rows for key in row)
            print(f"\n{name}\n{table([dict.fromkeys(columns, '') | row for row in rows])}", flush=True)
            if args.json:
                write_results(args.json, {"read TB/s": round(rate / 1e12, 3), "rows": results})


if __name__ == "__main__":
    main()
