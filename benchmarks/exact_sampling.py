"""Compare exact sampling with training to the bit, from products to answers, and time it beside sampling that is near.

    python benchmarks/exact_sampling.py --json benchmarks/results/exact_sampling.json
    python benchmarks/exact_sampling.py --parts answers --model FOLDER --texts prompts.jsonl    # a trained model

Parts, from small to large, so that the first one below 100% says which sum has another order; those of one call share
weights and programs, and each row is written as it comes:

- `products`: share of bits that products in one order have in common with XLA's of training's rows, and, if some
  differ, with orders of sums in so many parts.
- `operations`: the same for the operations of a layer (`rl_rounding.py --exact`).
- `launches`: microseconds of a layer's products in one order with their adapters, by tiles.
- `prices`: milliseconds of a decode step of exact sampling, and of sampling that is near, in turns.
- `profile`: microseconds of each kernel of a layer in decode steps of both.
- `answers`: largest difference of log-probabilities of sampling and training, by slots, prompts alike or not, and with
  two adapters of which each answer uses one.
- `steps`: seconds of a whole step, of both.
"""

import argparse
import os
import re
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import rl_rounding
import rl_step
from measure import device_events, table, take_untried, write_results
from shapes import SHAPES
from traces import gpu_events

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.generation import window_sizes
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import STEPS, Engine
from jaxglue.generation.scheduler import Request
from jaxglue.models import config_from_hf
from jaxglue.ops.projection import project
from jaxglue.ops.projection.ordered import ordered_product, ordered_products
from jaxglue.planner.device_memory import take_fitting_blocks
from jaxglue.rl.pack import Group, TrainedAnswer

PARTS = "products", "operations", "launches", "prices", "profile", "answers", "steps"
FEW = 1, 16, 64, 256, 512, 2048
SPLITS = 1, 2, 3, 4, 6, 8
"""Parts of a sum, added in their order, with which XLA's is compared."""
TILES = (
    *((64, 64, 128, 4, 4), (64, 64, 64, 4, 4), (64, 64, 64, 4, 6), (64, 64, 256, 4, 3), (64, 64, 128, 8, 4)),
    *((64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (32, 64, 128, 4, 4), (32, 64, 256, 4, 4), (32, 64, 128, 8, 4)),
    *((32, 64, 64, 4, 6), (16, 64, 256, 4, 4)),
)
MANY_TILES = (
    *((128, 64, 64, 4, 4), (128, 64, 64, 8, 3), (128, 64, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3)),
    *((128, 128, 64, 8, 6), (256, 64, 64, 8, 2), (256, 64, 64, 8, 4), (256, 128, 64, 8, 4)),
)
"""Rows of x and of weights, columns in a step, warps and stages; those of more than 64 rows."""
RANK = 16
MANY_SLOTS, FEW_TOKENS = 64, 256
"""Slots from which all layers are one program, and tokens of an answer by fewer slots."""
ATTENTION = re.compile("attend|tiled_kernel|paged_kernel|latent_kernel")
"""Kernels that a layer has one of."""
WIDE = 256
"""Slots beyond which one engine's cache is in memory at a time."""
COPIES = 4
"""Weights of a launch that is timed, one after another, so that the L2 cache holds none of them."""


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


def products(args: Namespace, bench: "Bench") -> Iterator[dict[str, Any]]:
    """Compare the products with each matrix."""
    options = STEP_OPTIONS | {"xla_allow_excess_precision": False} if jax.default_backend() == "gpu" else None
    for name, (N, K, dtype) in matrices_of(SHAPES[args.shape]).items():
        many = args.row // (16 if name == "head" else 1)
        x = jax.random.normal(jax.random.key(1), (many, K), jnp.bfloat16)
        weight = (jax.random.normal(jax.random.key(2), (N, K)) * K**-0.5).astype(jnp.bfloat16)
        own = project if jax.default_backend() == "gpu" else ordered_product
        multiply = jax.jit(lambda x, weight, dtype=dtype, own=own: own(x, weight, dtype))
        trained = multiply.lower(x, weight).compile(compiler_options=options)(x, weight)
        row: dict[str, Any] = {"matrix": name, "training's rows": many}
        for rows in (rows for rows in FEW if rows <= many):
            (own,) = jax.jit(lambda x, w, dtype=dtype: ordered_products(x, [w], dtype))(x[:rows], weight)
            row[f"{rows} rows"] = equal(own, trained[:rows])
        if {*row.values()} - {name, many, "100.0000%"}:
            few = x[: min(256, many)]
            row["by parts"] = {n: equal(in_parts(few, weight, dtype, n), trained[: len(few)]) for n in SPLITS}
        yield row


def launches(args: Namespace, bench: "Bench") -> Iterator[dict[str, Any]]:
    """Time the launches of a layer's products with their adapters by tiles, and the head's."""
    if jax.default_backend() != "gpu":
        return
    sizes = matrices_of(SHAPES[args.shape])
    named = {"q·k·v": ("q", "k", "k"), "o": ("o",), "gate·up": ("gate", "gate"), "down": ("down",), "head": ("head",)}
    draw = lambda key, *shape: jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)  # noqa: E731
    for rows in (rows for rows in args.slots if rows >= MANY_SLOTS):
        for name, matrices in named.items():
            shapes, rank = [sizes[matrix][:2] for matrix in matrices], 0 if name == "head" else RANK
            copies = [
                [
                    (draw(i, *s), draw(9, rank, s[1]), draw(8, s[0], rank).astype(jnp.float32))
                    for i, s in enumerate(shapes)
                ]
                for _ in range(1 if name == "head" else COPIES)
            ]
            megabytes = sum(own[0].nbytes for own in copies[0]) / 1e6
            x, stream = draw(3, rows, shapes[0][1]), draw(4, rows, shapes[0][0])
            yield {"launch": name, "rows": rows, "MB": round(megabytes, 1)} | times_by_tiles(name, copies, x, stream)


def times_by_tiles(name: str, copies: list[list[tuple[Any, Any, Any]]], x, stream) -> dict[str, Any]:
    """Return the microseconds of a launch of some rows by tiles, from profiles."""
    from jaxglue.ops.projection.ordered_triton import OrderedTiles, TritonOrdered

    fields = "block_m", "block_n", "block_k", "num_warps", "num_stages"
    options: dict[str, Any] = {"used": None, "part": 1024 if name == "down" else None}
    options["activation"] = "silu" if name == "gate·up" else None

    def multiply(tiles: tuple[int, ...] | None, x, stream, copies) -> list[Any]:
        named = tiles and OrderedTiles(**dict(zip(fields, tiles, strict=True)))
        kernels, outs = TritonOrdered.of((9, 0), tiles=named), []
        for weights, downs, matrices in (zip(*own, strict=True) for own in copies):
            if name == "head":
                outs.append(kernels.multiply(x, weights, jnp.float32))
            else:
                added = stream if name in ("o", "down") else None
                factors = [2.0] * len(weights)
                outs.append(kernels.adapt(x, weights, downs, matrices, factors, stream=added, **options))
        return outs

    found: dict[str, float | str] = {}
    for tiles in (None, *(TILES if len(x) <= 64 else MANY_TILES)):
        label = "default" if tiles is None else "×".join(map(str, tiles))
        try:
            call = jax.jit(partial(multiply, tiles)).lower(x, stream, copies).compile()
            taken = device_events(partial(call, x, stream, copies), calls=3)
            longest = sorted(taken)[-3 * len(copies) :]  # without the fills of counters
            found[label] = round(1e3 * float(np.median(longest)), 1)
        except Exception as error:  # such as too little shared memory
            found[label] = f"{type(error).__name__}: {str(error)[:60]}"
    return found


def operations(args: Namespace, bench: "Bench") -> Iterator[dict[str, Any]]:
    """Compare a layer's operations on the last tokens of documents."""
    options = {"xla_allow_excess_precision": False}
    layer = rl_rounding.Layer(SHAPES[args.shape], args.documents, args.tokens, "none", options, exact=True)
    many = rl_rounding.training_values(layer, args.documents)
    last = np.arange(args.documents) * args.tokens + args.tokens - 1
    for name, values in rl_rounding.sampling_values(layer, many, args.documents).items():
        share, difference = rl_rounding.compare(values, rl_rounding.tokens_of(many[name], last))
        yield {"operation": name, "equal": share, "difference": difference}


class Bench:
    """A model with adapters, sampled exactly and near, and trained; made by the first part that needs it."""

    def __init__(self, args: Namespace, stack: ExitStack):
        self._args, self._stack, self._both = args, stack, None

    @property
    def both(self) -> "Both":
        """Return it, with programs compiled."""
        if self._both is None:
            begun = time.perf_counter()
            self._both = Both(self._args, Path(self._stack.enter_context(tempfile.TemporaryDirectory())))
            print(f"weights after {time.perf_counter() - begun:.1f} s", flush=True)
        return self._both


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
        self.layers, self._longest = run.model.num_hidden_layers, args.longest
        self._compiled, self._plans = set[tuple[str, int]](), dict[tuple[str, int], Any]()
        options: dict[str, Any] = {"dtype": run.dtype, "as_written": True}
        self.engines = {
            name: Engine(parts.graphdefs, run.model, **options, exact=name == "exact") for name in ("exact", "near")
        }

    def compile(self, slots: Sequence[int], engines: Sequence[str]) -> None:
        """Compile the programs of so many slots, those of both engines at a time."""
        missing = [(name, n) for n in slots for name in engines if (name, n) not in self._compiled]
        self._compiled |= {*missing}

        def compile_one(engine: str, number: int) -> None:
            begun = time.perf_counter()
            self.sample(engine, self.prompts(number), self._each(number), 9, slots=number)
            print(f"{engine}, {number} slots: first tokens after {time.perf_counter() - begun:.1f} s", flush=True)

        # The caches of two engines with most slots would not fit beside each other.
        for together, wide in ((2, False), (1, True)):
            with ThreadPoolExecutor(together) as pool:
                list(pool.map(lambda of: compile_one(*of), [of for of in missing if (of[1] > WIDE) == wide]))

    def _each(self, slots: int) -> int:
        return min(self.flags.answers, slots)

    def prompts(self, slots: int) -> list[list[int]]:
        """Return prompts that have an answer for each slot."""
        count = -(-slots // self._each(slots))
        return [self.bench.prompts[i % len(self.bench.prompts)] for i in range(count)]

    def pieces(self, engine: str, slots: int, tokens: int) -> Iterator[Any]:
        """Return the pieces of an answer for each slot, of so many tokens each."""
        sampling = SamplingConfig(max_tokens=tokens, temperature=1.0, top_p=1.0)
        asked = [Request(p, sampling, i, n=self._each(slots)) for i, p in enumerate(self.prompts(slots))]
        plan = self._plan(engine, slots)
        return self.engines[engine].pieces(*self.trees, asked, plan=plan, whole=slots >= MANY_SLOTS)

    def _plan(self, engine: str, slots: int) -> Any:
        """Return the one plan for so many slots, so that their programs are compiled once."""
        if (engine, slots) not in self._plans:
            longest = max(len(prompt) for prompt in self.bench.prompts) + self._longest
            lengths = [(longest - self._longest, longest)] * slots
            self._plans[engine, slots] = self.engines[engine].plan_lengths(lengths, batch_size=slots)
        return self._plans[engine, slots]

    def sample(self, engine: str, prompts: list[list[int]], count: int, tokens: int | list[int], trees=None, **options):
        """Return groups of answers, all by so many slots, and the seconds that they took."""
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        ranks = options.pop("ranks", [None] * len(prompts))
        asked = [
            Request(prompt, SamplingConfig(max_tokens=most, temperature=1.0, top_p=1.0), index, n=count, ranks=own)
            for index, (prompt, own, most) in enumerate(zip(prompts, ranks, lengths, strict=True))
        ]
        groups: list[list[Any]] = [[None] * count for _ in prompts]
        begun, slots = time.perf_counter(), options.pop("slots")
        given = {"plan": self._plan(engine, slots), "whole": slots >= MANY_SLOTS}
        for done in self.engines[engine].generate(*(trees or self.trees), asked, **given, **options):
            own = TrainedAnswer(
                tokens=done.tokens, log_probs=done.log_probs, counted=np.ones(len(done.tokens), bool), advantage=1.0
            )
            groups[done.number][done.answer] = own
        taken = time.perf_counter() - begun
        return [Group(prompt, group) for prompt, group in zip(prompts, groups, strict=True)], taken

    def compare(self, groups: list[Group], trainable: Any = None) -> dict[str, Any]:
        """Return how far log-probabilities of sampling are from those of training, and the seconds of these."""
        begun = time.perf_counter()
        self.bench.pack(groups)
        found = self.bench.against_training(trainable)
        kept = {name: found[name] for name in ("tokens", "equal", "largest", "places")}
        return kept | {"training, s": round(time.perf_counter() - begun, 1)}


def answers(args: Namespace, bench: Bench) -> Iterator[dict[str, Any]]:
    """Compare answers by slots, with prompts alike and not, and with two adapters."""
    both, count = bench.both, args.answers
    both.compile([n for n in args.slots if n >= MANY_SLOTS], ["exact"])
    for slots in args.slots:
        tokens = args.longest if slots >= MANY_SLOTS else min(args.longest, FEW_TOKENS)
        # Each slot has an answer, and some have a shorter one after it.
        behind = slots if slots < MANY_SLOTS else max(slots // 8, count)
        first, groups = -(-slots // count), -(-(slots + behind) // count)
        few = [both.bench.prompts[i % len(both.bench.prompts)][i // len(both.bench.prompts) :] for i in range(groups)]
        lengths = [tokens if i < first else max(1, tokens // 4) for i in range(groups)]
        for shared in (True, False):
            some = few if shared else [prompt[i:] for prompt in few for i in range(count)]
            each = lengths if shared else [length for length in lengths for _ in range(count)]
            sampled, taken = both.sample("exact", some, count if shared else 1, each, slots=slots)
            row = {"slots": slots, "prompts shared": shared, "adapters": 1, "sampling, s": round(taken, 1)}
            yield row | both.compare(sampled)
    yield from two_adapters(args, both)
    some = both.prompts(min(args.slots[-1], MANY_SLOTS))
    sampled, _ = both.sample("near", some, count, args.longest, slots=min(args.slots[-1], MANY_SLOTS))
    yield {"slots": MANY_SLOTS, "prompts shared": True, "adapters": 1, "near": True} | both.compare(sampled)


def two_adapters(args: Namespace, both: Both) -> Iterator[dict[str, Any]]:
    """Compare answers of which each uses half of the ranks."""
    half, slots = np.arange(RANK) < RANK // 2, args.slots[len(args.slots) // 2]
    prompts = both.bench.prompts[: max(2, -(-slots // args.answers))]
    used = [half if index % 2 else ~half for index in range(len(prompts))]
    sampled, taken = both.sample("exact", prompts, args.answers, args.longest, ranks=used, slots=slots)
    for number, ranks in enumerate((~half, half)):
        alone = jax.tree_util.tree_map_with_path(
            lambda path, x, ranks=ranks: x * ranks[:, None] if "lora_A" in str(path) else x, both.trees[0]
        )
        row = {"slots": slots, "prompts shared": True, "adapters": f"{number + 1} of 2", "sampling, s": round(taken, 1)}
        yield row | both.compare(sampled[number::2], alone)


def prices(args: Namespace, bench: Bench) -> Iterator[dict[str, Any]]:
    """Time decode steps of exact and of near sampling in turns."""
    both, slots_of = bench.both, [n for n in args.slots if n >= MANY_SLOTS] or args.slots[-1:]
    both.compile(slots_of, ["exact", "near"])
    for slots in slots_of:
        found = {"exact": list[float](), "near": list[float]()}
        for _ in range(args.turns):
            for name, taken in found.items():
                taken += window_milliseconds(both, name, slots, args.decoded)
        medians = {name: float(np.median(taken)) / STEPS for name, taken in found.items()}
        added = 1e3 * (medians["exact"] - medians["near"]) / both.layers
        yield {
            "streams": slots,
            **{f"{name}, ms a step": round(taken, 3) for name, taken in medians.items()},
            "ratio": round(medians["exact"] / medians["near"], 3),
            "added, us a layer": round(added, 1),
        }


def window_milliseconds(both: Both, engine: str, slots: int, tokens: int) -> list[float]:
    """Return the milliseconds of windows of so many tokens of each slot, but for the first and last ones."""
    times = [time.perf_counter() for _ in islice(both.pieces(engine, slots, tokens + 1), slots - 1, None, slots)]
    return [1e3 * (after - before) for before, after in pairwise(times[2:-1])] or [1e3 * (times[-1] - times[0])]


def profile(args: Namespace, bench: Bench) -> Iterator[dict[str, Any]]:
    """Time each kernel of a layer in decode steps of exact and of near sampling, in their order."""
    both, slots_of = bench.both, [n for n in args.slots if n >= MANY_SLOTS] or args.slots[-1:]
    both.compile(slots_of, ["exact", "near"])
    for slots in slots_of:
        for name in ("exact", "near"):
            pieces, windows = both.pieces(name, slots, 8 * STEPS), 2
            with tempfile.TemporaryDirectory() as folder:
                for _ in islice(pieces, 3 * slots):
                    pass
                with jax.profiler.trace(folder) if jax.default_backend() == "gpu" else nullcontext():
                    for _ in islice(pieces, windows * slots):
                        pass
                pieces.close()
                events = gpu_events(folder)[0] if jax.default_backend() == "gpu" else []
            yield from layer_rows(events, both.layers, {"sampling": name, "streams": slots})


def layer_rows(
    events: Sequence[tuple[str, tuple[float, float]]], layers: int, row: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield kernels of a layer by name and order, with microseconds, and those before each that nothing ran in.

    Attention has one in each layer.
    """
    events = sorted(events, key=lambda event: event[1])
    names = [re.sub(r"[_.]?\d+(?=$|_)", "", name) for name, _ in events]
    counts, seen = Counter(names), Counter[str]()
    steps = max(1, sum(n for name, n in counts.items() if ATTENTION.search(name)) // layers)
    spent, idle = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    end = events[0][1][0] if events else 0.0
    for name, (_, (begun, ended)) in zip(names, events, strict=True):
        each = round(counts[name] / steps)  # launches of a step, those of a layer and then those behind the last layer
        of_layer, place = max(1, each // layers), seen[name] % max(1, each)
        seen[name] += 1
        key = f"{name} · {place % of_layer + 1}" if of_layer > 1 else name
        key += " behind the layers" if layers * of_layer <= place < each else ""
        spent[key].append(1e3 * (ended - begun))
        idle[key].append(1e3 * max(0.0, begun - end))
        end = max(end, ended)
    for key, times in spent.items():
        yield row | {
            "kernel": key,
            "launches": len(times),
            "median us": round(float(np.median(times)), 2),
            "median us before": round(float(np.median(idle[key])), 2),
            "ms of all": round(sum(times) / 1e3, 3),
        }


def steps(args: Namespace, bench: Bench) -> Iterator[dict[str, Any]]:
    """Time sampling and training of a step, exact and near, of answers of the same forced lengths."""
    seconds: dict[str, dict[str, float]] = {}
    for name in ("near", "exact"):
        with tempfile.TemporaryDirectory() as folder:
            own = step_bench(args, Path(folder), exact=name == "exact")
            own.compile_sampling()
            groups = rl_step.timed(seconds.setdefault(name, {}), "sampling", own.sample)
            rl_step.time_training(own.args, own, own.pack(groups), seconds[name])
            del own
    total = {name: found["sampling"] + found["training"] for name, found in seconds.items()}
    for name, found in seconds.items():
        phases = {f"{phase}, s": found[phase] for phase in ("sampling", "training")}
        yield {"sampling": name, **phases, "ratio": round(total[name] / total["near"], 3)}


def step_bench(args: Namespace, folder: Path, *, exact: bool) -> rl_step.Benchmark:
    """Return a model whose whole step is timed."""
    names = ("shape", "layers", "row", "dtype", "prompts", "answers", "longest", "model", "texts")
    given = [f"--{name}={value}" for name in names if (value := getattr(args, name)) is not None]
    return rl_step.Benchmark(rl_step.read_flags([*given, *(["--exact"] if exact else [])]), folder)


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
    parser.add_argument("--decoded", type=int, default=128, help="tokens of each stream by which a step is timed")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--untried", nargs="*", help="take these kernels that no GPU has run, too; none named: all")
    parser.add_argument("--model", type=Path, help="folder of a trained model, in place of random weights")
    parser.add_argument("--texts", type=Path, help="rows of text whose beginnings are the prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    take_untried(args.untried)
    take_fitting_blocks(os.environ)
    functions = products, operations, launches, prices, profile, answers, steps
    parts = dict(zip(PARTS, functions, strict=True))
    results: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        bench = Bench(args, stack)
        for name in args.parts:
            rows, begun = results.setdefault(name, []), time.perf_counter()
            # Programs for fewer answers, which threads compile beside, would be waited for.
            whole = patch.object(window_sizes, "_fewer", lambda slots: []) if name != "steps" else nullcontext()
            try:
                with whole:
                    for row in parts[name](args, bench):
                        rows.append(row)
                        print(row, flush=True)
                        if args.json:
                            write_results(args.json, results)
            except Exception as error:  # the other parts still say something
                print(f"{name} FAILED: {type(error).__name__}: {str(error)[:1000]}", flush=True)
            same = [row for row in rows if row.keys() == rows[0].keys()]
            print(table(same) if same else f"{name}: nothing", flush=True)
            print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
