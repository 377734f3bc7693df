"""Compare exact sampling with training to the bit, from products to answers, and time it beside sampling that is near.

    python benchmarks/exact_sampling.py --json benchmarks/results/exact_sampling.json
    python benchmarks/exact_sampling.py --parts answers --model FOLDER --texts prompts.jsonl    # a trained model

Five parts, from small to large, so that the first one below 100% says which sum has another order:

- `products`: share of bits that products in one order have in common with XLA's of training's rows, and the orders of
  sums, of 16 columns after another in so many parts, that XLA's have; times of tiles.
- `operations`: the same for the operations of a layer (`rl_rounding.py --exact`).
- `answers`: largest difference of log-probabilities of sampling and training, by slots, prompts alike or not, and with
  two adapters of which each answer uses one.
- `prices`: milliseconds of a decode step of exact sampling, and of sampling that is near, in turns.
- `steps`: seconds of a whole step, of both.
"""

import argparse
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rl_rounding
import rl_step
from measure import milliseconds, table, write_results
from shapes import SHAPES

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.models import config_from_hf
from jaxglue.ops.projection import project
from jaxglue.ops.projection.ordered import ORDERED, ordered_products
from jaxglue.rl.pack import Group, TrainedAnswer

PARTS = "products", "operations", "answers", "prices", "steps"
FEW = 1, 16, 64, 256, 512, 2048
SPLITS = 1, 2, 3, 4, 6, 8
"""Parts of a sum, added in their order, with which XLA's is compared."""
TILES = (
    *((32, 64, 128, 4, 4), (32, 64, 128, 4, 7), (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 64, 64, 4, 8)),
    *((32, 64, 256, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 4), (256, 128, 64, 8, 4)),
)
"""Rows of x and of weights, columns in a step, warps and stages."""
RANK = 16
MANY_SLOTS, FEW_TOKENS = 64, 256
"""Slots from which all layers are one program, and tokens of an answer by fewer slots."""


def matrices_of(shape: dict[str, Any]) -> dict[str, tuple[int, int, Any]]:
    """Return (rows, columns, dtype of the product) of a model's matrices, with adapters' first ones side by side."""
    config = config_from_hf(shape)
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, K = config.num_attention_heads, config.layer_kinds[0].shape.kv_heads
    return {
        "q": (N * H, D, jnp.bfloat16),
        "k": (K * H, D, jnp.bfloat16),
        "o": (D, N * H, jnp.bfloat16),
        "gate": (F, D, jnp.bfloat16),
        "down": (D, F, jnp.bfloat16),
        "ranks of q, k, v": (3 * RANK, D, jnp.bfloat16),
        "ranks of gate, up": (2 * RANK, D, jnp.bfloat16),
        "ranks of o": (RANK, N * H, jnp.bfloat16),
        "ranks of down": (RANK, F, jnp.bfloat16),
        "head": (config.vocab_size, D, jnp.float32),
    }


def equal(own: jax.Array, other: jax.Array) -> str:
    """Return the share of equal values."""
    return f"{(np.asarray(own, np.float32) == np.asarray(other, np.float32)).mean():.4%}"


def in_parts(x: jax.Array, weight: jax.Array, dtype, splits: int) -> jax.Array:
    """Return x·Wᵀ of so many parts of the columns, added in float32."""
    size = -(-x.shape[1] // splits // 64) * 64
    parts = [slice(start, start + size) for start in range(0, x.shape[1], size)]
    total = sum(ordered_products(x[:, part], [weight[:, part]], jnp.float32)[0] for part in parts)
    return total.astype(dtype)


def products(args: Namespace) -> Iterator[dict[str, Any]]:
    """Compare the products with each matrix, and time them."""
    options = STEP_OPTIONS | {"xla_allow_excess_precision": False} if jax.default_backend() == "gpu" else None
    for name, (N, K, dtype) in matrices_of(SHAPES[args.shape]).items():
        many = args.row // (16 if name == "head" else 1)
        x = jax.random.normal(jax.random.key(1), (many, K), jnp.bfloat16)
        weight = (jax.random.normal(jax.random.key(2), (N, K)) * K**-0.5).astype(jnp.bfloat16)
        multiply = jax.jit(lambda x, weight, dtype=dtype: project(x, weight, dtype))
        trained = multiply.lower(x, weight).compile(compiler_options=options)(x, weight)
        row: dict[str, Any] = {"matrix": name, "training's rows": many}
        for splits in SPLITS:
            few = x[: min(256, many)]
            row[f"{splits} parts"] = equal(in_parts(few, weight, dtype, splits), trained[: len(few)])
        for rows in (rows for rows in FEW if rows <= many):
            (own,) = jax.jit(lambda x, w, dtype=dtype: ordered_products(x, [w], dtype))(x[:rows], weight)
            row[f"{rows} rows"] = equal(own, trained[:rows])
            if rows in args.slots:
                row |= times(x[:rows], weight, dtype, multiply)
        yield row


def times(x: jax.Array, weight: jax.Array, dtype, multiply: Callable) -> dict[str, float]:
    """Return the microseconds of XLA's product of some rows, and of those in one order by tiles."""
    found = {f"{len(x)} rows, XLA, us": milliseconds(multiply, x, weight)}
    if jax.default_backend() != "gpu":
        return found
    from jaxglue.ops.projection.ordered_triton import OrderedTiles, TritonOrdered

    names = "block_m", "block_n", "block_k", "num_warps", "num_stages"
    for sizes in TILES:
        kernels = TritonOrdered.of((9, 0), tiles=OrderedTiles(**dict(zip(names, sizes, strict=True))))
        with ORDERED.using(kernels):
            call = jax.jit(lambda x, w: ordered_products(x, [w], dtype))
            found[f"{len(x)} rows, {'×'.join(map(str, sizes))}, us"] = milliseconds(call, x, weight)
    return {name: round(1e3 * taken, 1) for name, taken in found.items()}


def operations(args: Namespace) -> Iterator[dict[str, Any]]:
    """Compare a layer's operations on the last tokens of documents."""
    options = {"xla_allow_excess_precision": False}
    layer = rl_rounding.Layer(SHAPES[args.shape], args.documents, args.tokens, "none", options, exact=True)
    many = rl_rounding.training_values(layer, args.documents)
    last = np.arange(args.documents) * args.tokens + args.tokens - 1
    for name, values in rl_rounding.sampling_values(layer, many, args.documents).items():
        share, difference = rl_rounding.compare(values, rl_rounding.tokens_of(many[name], last))
        yield {"operation": name, "equal": share, "difference": difference}


class Both:
    """A model with adapters, sampled exactly and near, and trained."""

    def __init__(self, args: Namespace, folder: Path):
        names = {"shape": args.shape, "layers": args.layers, "row": args.row, "dtype": args.dtype}
        given = {"prompts": args.prompts, "answers": args.answers, "longest": args.longest}
        flags = [f"--{name}={value}" for name, value in (names | given).items() if value is not None]
        flags += [f"--{name}={value}" for name in ("model", "texts") if (value := getattr(args, name))]
        self.flags = rl_step.read_flags([*flags, "--exact"])
        self.bench = rl_step.Benchmark(self.flags, folder)
        self.trees = self.bench.state.trainable, self.bench.state.frozen
        run, parts = self.bench.run, self.bench.parts
        options: dict[str, Any] = {"dtype": run.dtype, "as_written": True}
        self.engines = {
            name: Engine(parts.graphdefs, run.model, **options, exact=name == "exact") for name in ("exact", "near")
        }

    def sample(self, engine: str, prompts: list[list[int]], count: int, tokens: int, trees=None, **options):
        """Return groups of answers, all by so many slots, and the seconds that they took."""
        sampling = SamplingConfig(max_tokens=tokens, temperature=1.0, top_p=1.0)
        ranks = options.pop("ranks", [None] * len(prompts))
        asked = [
            Request(prompt, sampling, index, n=count, ranks=own)
            for index, (prompt, own) in enumerate(zip(prompts, ranks, strict=True))
        ]
        groups: list[list[Any]] = [[None] * count for _ in prompts]
        begun = time.perf_counter()
        options["whole"] = options["slots"] >= MANY_SLOTS
        for done in self.engines[engine].generate(*(trees or self.trees), asked, **options):
            own = TrainedAnswer(
                tokens=done.tokens, log_probs=done.log_probs, counted=np.ones(len(done.tokens), bool), advantage=1.0
            )
            groups[done.number][done.answer] = own
        taken = time.perf_counter() - begun
        return [Group(prompt, group) for prompt, group in zip(prompts, groups, strict=True)], taken

    def compare(self, groups: list[Group], trainable: Any = None) -> dict[str, Any]:
        """Return how far log-probabilities of sampling are from those of training."""
        self.bench.pack(groups)
        found = self.bench.against_training(trainable)
        return {name: found[name] for name in ("tokens", "equal", "largest", "places")}


def answers(args: Namespace) -> Iterator[dict[str, Any]]:
    """Compare answers by slots, with prompts alike and not, and with two adapters."""
    with tempfile.TemporaryDirectory() as folder:
        both = Both(args, Path(folder))
        prompts, count = both.bench.prompts, args.answers
        for slots in args.slots:
            tokens = args.longest if slots >= MANY_SLOTS else min(args.longest, FEW_TOKENS)
            few = prompts[: -(-2 * slots // count)]  # each slot has two answers, one after another
            for shared in (True, False):
                some = few if shared else [prompt[i:] for prompt in few for i in range(count)]
                groups, _ = both.sample("exact", some, count if shared else 1, tokens, slots=slots)
                yield {"slots": slots, "prompts shared": shared, "adapters": 1} | both.compare(groups)
        groups, _ = both.sample("near", prompts, count, args.longest, slots=max(args.slots))
        yield {"slots": max(args.slots), "prompts shared": True, "adapters": 1, "near": True} | both.compare(groups)
        yield from two_adapters(args, both)


def two_adapters(args: Namespace, both: Both) -> Iterator[dict[str, Any]]:
    """Compare answers of which each uses half of the ranks."""
    half = np.arange(RANK) < RANK // 2
    used = [half if index % 2 else ~half for index in range(len(both.bench.prompts))]
    groups, _ = both.sample("exact", both.bench.prompts, args.answers, args.longest, ranks=used, slots=max(args.slots))
    for number, ranks in enumerate((~half, half)):
        alone = jax.tree_util.tree_map_with_path(
            lambda path, x, ranks=ranks: x * ranks[:, None] if "lora_A" in str(path) else x, both.trees[0]
        )
        yield {"slots": max(args.slots), "prompts shared": True, "adapters": f"{number + 1} of 2"} | both.compare(
            groups[number::2], alone
        )


def prices(args: Namespace) -> Iterator[dict[str, Any]]:
    """Time decode steps of exact and of near sampling in turns, and then whole steps."""
    with tempfile.TemporaryDirectory() as folder:
        both = Both(args, Path(folder))
        for slots in args.slots:
            prompts = [both.bench.prompts[i % len(both.bench.prompts)] for i in range(-(-slots // args.answers))]
            each = min(args.answers, slots)
            milliseconds_of = {"exact": list[float](), "near": list[float]()}
            for turn in range(args.turns + 1):
                for name, found in milliseconds_of.items():
                    (_, short), (_, long) = (
                        both.sample(name, prompts, each, tokens, slots=slots) for tokens in (9, 9 + args.decoded)
                    )
                    both.engines[name].wait()
                    if turn:  # the first one compiles
                        found.append((long - short) / args.decoded * 1e3)
            medians = {name: float(np.median(found)) for name, found in milliseconds_of.items()}
            rounded = {f"{name}, ms a step": round(taken, 3) for name, taken in medians.items()}
            yield {"streams": slots, **rounded, "ratio": round(medians["exact"] / medians["near"], 3)}


def steps(args: Namespace) -> Iterator[dict[str, Any]]:
    """Time sampling and training of a step, exact and near, of answers of the same forced lengths."""
    seconds: dict[str, dict[str, float]] = {}
    for name in ("near", "exact"):
        with tempfile.TemporaryDirectory() as folder:
            bench = Both(args, Path(folder)).bench if name == "exact" else near_bench(args, Path(folder))
            bench.compile_sampling()
            groups = rl_step.timed(seconds.setdefault(name, {}), "sampling", bench.sample)
            step = bench.pack(groups)
            rl_step.time_training(bench.args, bench, step, seconds[name])
            del bench
    total = {name: found["sampling"] + found["training"] for name, found in seconds.items()}
    for name, found in seconds.items():
        phases = {f"{phase}, s": found[phase] for phase in ("sampling", "training")}
        yield {"sampling": name, **phases, "ratio": round(total[name] / total["near"], 3)}


def near_bench(args: Namespace, folder: Path) -> rl_step.Benchmark:
    """Return the model with sampling that is near."""
    names = ("shape", "layers", "row", "dtype", "prompts", "answers", "longest", "model", "texts")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return rl_step.Benchmark(rl_step.read_flags([f"--{name}={value}" for name, value in given.items()]), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 64, 256, 512])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--row", type=int, default=16384)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--decoded", type=int, default=64, help="tokens of each stream by which a step is timed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--model", type=Path, help="folder of a trained model, in place of random weights")
    parser.add_argument("--texts", type=Path, help="rows of text whose beginnings are the prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = dict(zip(PARTS, (products, operations, answers, prices, steps), strict=True))
    results: dict[str, list[dict[str, Any]]] = {}
    for name in args.parts:
        rows = results.setdefault(name, [])
        try:
            for row in parts[name](args):
                rows.append(row)
                print(row, flush=True)
                if args.json:
                    write_results(args.json, results)
        except Exception as error:  # the other parts still say something
            print(f"{name} FAILED: {type(error).__name__}: {str(error)[:1000]}", flush=True)
        same = [row for row in rows if row.keys() == rows[0].keys()]
        print(table(same) if same else f"{name}: nothing", flush=True)


if __name__ == "__main__":
    main()
