"""Measure models that answer in one pass beside plain rows of as many tokens, and the two passes of embeddings.

    python benchmarks/onepass.py --json FILE
    python benchmarks/onepass.py --cases decide rerank --seconds 60
    python benchmarks/onepass.py --cases embed --pairs 4096 --texts-only FILE.npz     # for benchmarks/peers/embed.py

decide, rerank: rows of units (a state of 1,000 tokens and 10 questions of 30; a query of 100 and 32 documents of 200),
forward and training of all weights, against documents as long as the units. embed: a step of pairs of 64 to 512 tokens
by two passes. negatives: 65,536 pairs of texts of 64 tokens: the loss of all beside its two passes, whose time is that
of a micro-batch; and its gradient at 512 pairs against the loss as one matrix. alone: the largest difference between
probabilities of a question among 20 about a state and alone, over states in rows of their own and packed ones, in
bfloat16 and float32. Bfloat16 but for that, random weights.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import write_results
from step import parameters, random_batch, workload

from jaxglue.data.config import DataConfig, Source
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.questions import Labels
from jaxglue.data.reads import ReadDataset, ReadTask, select_reads
from jaxglue.data.store import TokenStore
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.objectives.calibration import log_softmax
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.contrastive import ANCHOR, POSITIVE, Contrast, Sizes, Texts, text_losses
from jaxglue.objectives.decide import gold_outputs
from jaxglue.objectives.objective import Objective
from jaxglue.objectives.reading import part_outputs

SHAPES = {"decide": (1000, 10, 30), "rerank": (100, 32, 200)}
"""Tokens of a beginning, parts after it, and tokens of each."""
LABELS = Labels(
    {kind: ("",) * count for kind, count in (("noul", 2), ("choice", 26), ("score", 10))},
    {"noul": ((1,), (2,)), "choice": tuple((20 + i,) for i in range(26)), "score": tuple((5 + i,) for i in range(10))},
)


def unit_store(lengths: Sequence[tuple[int, Sequence[int]]], vocabulary: int, *, texts: bool = False) -> TokenStore:
    """Return units of random tokens: a beginning and parts; of texts, the first part is an anchor."""
    sizes = [[prefix, *parts] for prefix, parts in lengths]
    parts = [part for _, each in lengths for part in each]
    counts = [len(each) for _, each in lengths]
    kinds = [min(index, POSITIVE) if texts else index % 2 for count in counts for index in range(count)]
    total = sum(map(sum, sizes))
    ones, zeros = np.ones(len(parts)), np.zeros(len(parts))
    columns = {"prefix": [prefix for prefix, _ in lengths], "parts": counts, "cut": np.zeros(len(counts))}
    columns |= {"kind": kinds, "size": parts, "intro": zeros, "options": ones if texts else 2 * ones}
    options = int(columns["options"].sum())
    columns |= {"gold": np.full(options, 0.5), "label_size": np.zeros(options), "text_size": np.zeros(options)}
    return TokenStore(
        tokens=np.random.default_rng(0).integers(100, vocabulary, total, dtype=np.int32),
        mask=np.zeros(total, np.uint8),
        offsets=np.cumsum([0, *map(sum, sizes)]),
        columns={name: np.asarray(values, np.float32) for name, values in columns.items()},
        info={"digest": "", "max_token": 0},
    )


def dataset_of(store: TokenStore, task: ReadTask, row: int) -> ReadDataset:
    """Return the units that fit into rows."""
    return select_reads(store, DataConfig(data=("x",), seq_len=row), Source(name="x"), task, LABELS).dataset


def seconds_of(call: Callable[[], Any], budget: float) -> float:
    """Return the least seconds of a call within a budget, after a warm-up."""
    jax.block_until_ready(call())
    times, begin = [], time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < budget and len(times) < 30):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def make_executor(work: Any, weights: Any, objective: Objective, policy: str) -> Executor:
    """Return an executor of a shape's model."""
    return Executor(weights[0], work.config, policy=PRESETS[policy], objective=objective)


def shared_rows(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a row of units against one of documents as long."""
    prefix, count, size = SHAPES[case]
    unit = prefix + count * size
    work = workload(args.shape, args.layers, args.row, "full")
    weights = parameters(work)
    settings = ObjectiveConfig(objective=case)
    store = unit_store([(prefix, [size] * count)] * (args.row // unit), work.config.vocab_size)
    dataset = dataset_of(store, settings.task(shared_prompt=True), args.row)
    units = next(BatchIterator(dataset, seq_len=args.row, batch_size=1)).micro_batches[0]
    plain = random_batch(args.row, work.config.vocab_size, [unit] * (args.row // unit))
    found: dict[str, Any] = {"case": case, "units_in_row": args.row // unit, "tokens_of_unit": unit}
    for name, objective, batch in (("plain", ObjectiveConfig().make(), plain), ("units", settings.make(), units)):
        executor, batch = make_executor(work, weights, objective, args.remat), jax.device_put(batch)
        _, trainable, frozen = weights
        train = partial(executor.loss_and_gradients, trainable, frozen, [batch], 1.0)
        forward = partial(executor.loss if name == "plain" else executor.read, trainable, frozen, batch)
        found[f"{name}_forward_ms"] = 1e3 * seconds_of(forward, args.seconds / 8)
        found[f"{name}_training_ms"] = 1e3 * seconds_of(train, args.seconds / 4)
        del executor
    for kind in ("forward", "training"):
        found[f"{kind}_ratio"] = found[f"units_{kind}_ms"] / found[f"plain_{kind}_ms"]
    return found


def text_lengths(pairs: int, low: int, high: int) -> list[tuple[int, list[int]]]:
    """Draw the tokens of pairs of texts."""
    rng = np.random.default_rng(1)
    return [(0, rng.integers(low, high + 1, 2).tolist()) for _ in range(pairs)]


class TwoPasses:
    """The two passes of a step of pairs, one after the other."""

    def __init__(self, args: argparse.Namespace, pairs: int, low: int, high: int, micro_batches: int | None = None):
        self.work = workload(args.shape, args.layers, args.row, "full")
        self.graphdefs, self.trainable, self.frozen = weights = parameters(self.work)
        self.objective = ObjectiveConfig(objective="embed").make()
        self.executor = make_executor(self.work, weights, self.objective, args.remat)
        store = unit_store(text_lengths(pairs, low, high), self.work.config.vocab_size, texts=True)
        dataset = dataset_of(store, self.objective.task(shared_prompt=False), args.row)
        step = next(BatchIterator(dataset, seq_len=args.row, batch_size=1, documents_per_step=pairs))
        self.tokens, self.pairs, self.rows = step.tokens, pairs, len(step.micro_batches)
        self.batches = jax.device_put(step.micro_batches[:micro_batches])
        self.sizes = self.objective.step_sizes(dataset, pairs)
        self._contrast = jax.jit(self.objective.gradients, static_argnums=(0, 3))

    def embed(self) -> list[Any]:
        """Run the first pass."""
        return [self.executor.read(self.trainable, self.frozen, batch) for batch in self.batches]

    def contrast(self, outputs: list[Any]) -> list[dict[str, Any]]:
        """Return the loss's gradients to all embeddings."""
        return self._contrast(self.sizes, outputs, [batch.reads for batch in self.batches], lambda x: x)

    def train(self, found: list[dict[str, Any]]) -> Any:
        """Run the second pass."""
        changed = [
            replace(batch, reads=replace(batch.reads, values=batch.reads.values | values))
            for batch, values in zip(self.batches, found, strict=True)
        ]
        return self.executor.loss_and_gradients(self.trainable, self.frozen, changed, float(self.pairs))

    def step(self) -> Any:
        """Run all."""
        return self.train(self.contrast(self.embed()))


def embed_step(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a step of pairs of 64 to 512 tokens."""
    passes = TwoPasses(args, args.pairs, 64, 512)
    few = passes.batches[:2]
    whole, passes.batches = passes.batches, few  # compiles what a micro-batch needs
    jax.block_until_ready(passes.step())
    passes.batches = whole
    outputs = passes.embed()
    jax.block_until_ready(passes.contrast(outputs))
    begin = time.perf_counter()
    jax.block_until_ready(passes.step())
    seconds = time.perf_counter() - begin
    return {
        "case": "embed",
        "pairs": args.pairs,
        "tokens": passes.tokens,
        "micro_batches": passes.rows,
        "step_s": seconds,
        "tokens_per_s": passes.tokens / seconds,
        "pairs_per_s": args.pairs / seconds,
    }


def negatives(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the loss of 65,536 pairs beside two passes over them, and check its gradient at 512."""
    count, tokens = args.negatives, 64
    passes = TwoPasses(args, min(4096, count), tokens, tokens, micro_batches=4)
    rows = 2 * count * tokens / args.row
    width = passes.work.config.hidden_size
    outputs = passes.embed()
    zero = [
        {"gradient": jnp.zeros_like(each), "losses": jnp.zeros(each.shape[:2]), "hits": jnp.zeros(each.shape[:2])}
        for each in outputs
    ]
    both = seconds_of(lambda: (passes.embed(), passes.train(zero)), args.seconds / 4) / len(passes.batches) * rows
    kinds = jnp.tile(jnp.array([ANCHOR, POSITIVE]), count)
    texts = Texts(kinds, jnp.arange(2 * count), jnp.zeros(2 * count))
    embeddings = jax.random.normal(jax.random.key(0), (2 * count, width))

    def loss(x: Any, texts: Texts, pairs: int) -> Any:
        return text_losses(Contrast(), Sizes(pairs, 0), x, texts)[0]

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    contrast = seconds_of(lambda: gradient(embeddings, texts, count), args.seconds / 4)

    def plain(x: Any) -> Any:
        unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        logits = 20 * jnp.matmul(unit[::2], unit[1::2].T, precision="highest")
        return -jnp.diag(jax.nn.log_softmax(logits)).sum()

    near = jnp.repeat(jax.random.normal(jax.random.key(1), (512, width)), 2, axis=0)
    few = embeddings[:1024] + 3 * near
    wanted = jax.grad(plain)(few)
    found = gradient(few, jax.tree.map(lambda x: x[:1024], texts), 512)
    return {
        "case": "negatives",
        "pairs": count,
        "two_passes_s": both,
        "loss_s": contrast,
        "ratio": (both + contrast) / both,
        "gradient_error_at_512": float(jnp.abs(found - wanted).max() / jnp.abs(wanted).max()),
    }


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """Compare probabilities of questions alone with those among 20, and among the questions of other states."""
    work = workload(args.shape, args.layers, args.row, "full")
    weights = parameters(work)
    settings, rng = ObjectiveConfig(objective="decide"), np.random.default_rng(0)
    task = settings.task(shared_prompt=True, copies=work.config.recurrent is not None)
    sizes = [(int(rng.integers(200, 600)), rng.integers(15, 45, 20).tolist()) for _ in range(args.states)]
    together = unit_store(sizes, work.config.vocab_size)
    found: dict[str, Any] = {"case": "alone", "states": args.states, "questions": 20}
    for dtype in (jnp.bfloat16, jnp.float32):
        options = {"policy": PRESETS["full"], "objective": settings.make(), "dtype": dtype}
        executor = Executor(weights[0], work.config, **options)

        def read(store: TokenStore, row: int, executor: Executor = executor) -> np.ndarray:
            batches = EvalBatches(dataset_of(store, task, row), seq_len=row, batch_size=1)
            read_of = (jax.device_get((b.reads, executor.read(*weights[1:], jax.device_put(b)))) for b in batches)
            logits, _, _ = gold_outputs(part_outputs(read_of))
            return np.exp(log_softmax(logits))

        packed, own = read(together, args.row), read(together, 2048)
        first = np.concatenate([read(only_part(together, sizes, part), 1024) for part in range(args.parts)])
        asked = np.concatenate([packed[part::20] for part in range(args.parts)])
        name = jnp.dtype(dtype).name
        found[f"{name}_alone"] = float(np.abs(first - asked).max())
        found[f"{name}_alone_mean"] = float(np.abs(first - asked).max(-1).mean())
        found[f"{name}_packed"] = float(np.abs(own - packed).max())
        found[f"{name}_flips"] = float((first.argmax(-1) != asked.argmax(-1)).mean())
    return found


def only_part(store: TokenStore, sizes: list[tuple[int, list[int]]], part: int) -> TokenStore:
    """Return units with one of their parts each."""
    tokens, before = [], np.cumsum([0, *(prefix + sum(parts) for prefix, parts in sizes)])
    for at, (prefix, parts) in zip(before[:-1], sizes, strict=True):
        begin = at + prefix + sum(parts[:part])
        tokens += [store.tokens[at : at + prefix], store.tokens[begin : begin + parts[part]]]
    lengths = [(prefix, [parts[part]]) for prefix, parts in sizes]
    alone = unit_store(lengths, 1000)
    kinds = np.full(len(sizes), part % 2, np.float32)
    return replace(alone, tokens=np.concatenate(tokens), columns={**alone.columns, "kind": kinds})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["decide", "rerank", "negatives", "embed"])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--row", type=int, default=16_384, help="tokens of a row")
    parser.add_argument("--pairs", type=int, default=4096)
    parser.add_argument("--negatives", type=int, default=65_536, help="pairs of that case")
    parser.add_argument("--states", type=int, default=32, help="of the case alone")
    parser.add_argument("--parts", type=int, default=20, help="questions of 20 that are asked alone")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--seconds", type=float, default=30, help="of a case, about, beside compilation")
    parser.add_argument("--texts-only", type=Path, help="write the lengths of the embed case's texts and stop")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.texts_only:
        np.savez(args.texts_only, lengths=np.array([each for _, each in text_lengths(args.pairs, 64, 512)]))
        return
    cases = {"negatives": negatives, "embed": embed_step, "alone": alone}
    results = []
    for case in args.cases:
        results.append(cases[case](args) if case in cases else shared_rows(case, args))
        print(json.dumps({"shape": args.shape, **results[-1]}), flush=True)
        if args.json:
            write_results(args.json, [{"shape": args.shape, **each} for each in results])


if __name__ == "__main__":
    main()
