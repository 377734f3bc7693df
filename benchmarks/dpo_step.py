"""Measure DPO steps on UltraFeedback-like pairs: pairs a second, memory, and the limit of the matmuls.

    python benchmarks/dpo_step.py --shape qwen3-8b --row 16384 --json FILE
    python benchmarks/dpo_step.py --memory-limit 22        # the fastest plan within 22 GiB
    python benchmarks/dpo_step.py --quantize nf4 --remat full --row 8192 --pair-tokens 8192
    python benchmarks/dpo_step.py --pairs-only FILE.npz    # pairs and config.json, for benchmarks/peers/dpo.py

Prompts have 300 ± 200 tokens, answers 350 ± 250, log-normal. The reference is the frozen weights without adapters, run
beside the model's layers; prompts are computed once for both answers, or with --copies once for each. Steps are the
trainer's, executor and AdamW, dispatched one ahead.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from measure import write_results
from peers.host import HostMemory
from step import memory, parameters, workload

from jaxglue.data.answers import select_answers
from jaxglue.data.config import AnswerTask, DataConfig, Source
from jaxglue.data.iterator import BatchIterator
from jaxglue.data.store import TokenStore
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import AUTO, RematPolicy, parse_policies
from jaxglue.engine.residency import DEVICE, is_streamed, parse_weights
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import without_adapters
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.planner.device_memory import take_fitting_blocks
from jaxglue.planner.flops import matmul_parameters
from jaxglue.planner.gpus import GIB, peak_flops
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig

PROMPT, ANSWER = (300, 200), (350, 250)
"""Mean and standard deviation of lengths."""
LONGEST = 2048
SETTINGS = ("shape", "row", "remat", "memory_limit", "copies", "quantize", "pair_tokens")


class Pairs(NamedTuple):
    """Tokens of prompts and answers, concatenated, and their lengths [pairs, 3]: prompt, chosen, rejected."""

    tokens: np.ndarray
    lengths: np.ndarray


def make_pairs(count: int, vocab_size: int, seed: int = 0) -> Pairs:
    """Draw random pairs; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    lengths = np.stack([_log_normal(rng, *size, count) for size in (PROMPT, ANSWER, ANSWER)], axis=1)
    return Pairs(rng.integers(16, vocab_size, int(lengths.sum()), dtype=np.int32), lengths)


def make_long_pairs(count: int, vocab_size: int, tokens: int) -> Pairs:
    """Draw random pairs of `tokens` tokens each: a quarter the prompt's, the rest the answers'."""
    lengths = np.tile(np.array([tokens // 4, 3 * tokens // 8, 3 * tokens // 8]), (count, 1))
    return Pairs(np.random.default_rng(0).integers(16, vocab_size, int(lengths.sum()), dtype=np.int32), lengths)


def _log_normal(rng: np.random.Generator, mean: float, deviation: float, count: int) -> np.ndarray:
    variance = np.log(1 + (deviation / mean) ** 2)
    return np.clip(rng.lognormal(np.log(mean) - variance / 2, variance**0.5, count), 8, LONGEST).astype(np.int64)


def make_batches(pairs: Pairs, row: int, *, shared: bool) -> BatchIterator:
    """Pack the pairs into rows as the trainer does."""
    bounds = np.concatenate([[0], np.cumsum(pairs.lengths.ravel())])
    tokens, mask = [], []
    for pair in range(len(pairs.lengths)):
        prompt, *answers = (pairs.tokens[slice(*bounds[3 * pair + part :][:2])] for part in range(3))
        for answer in answers:
            tokens += [prompt, answer]
            mask += [np.zeros(len(prompt), np.uint8), np.ones(len(answer), np.uint8)]
    sizes = (pairs.lengths[:, :1] + pairs.lengths[:, 1:]).ravel()
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    store = TokenStore(
        tokens=np.concatenate(tokens), mask=np.concatenate(mask), offsets=offsets, info={"digest": "", "max_token": 0}
    )
    config = DataConfig(data=("pairs",), seq_len=row)
    task = AnswerTask(shared_prompt=shared)
    selection = select_answers(store, config, Source(name="pairs"), task)
    return BatchIterator(selection.dataset, seq_len=row, batch_size=1, epochs=None)


def limit_seconds(config: DecoderConfig, pairs: np.ndarray) -> float:
    """Return the seconds in which a GPU's peak does the matmuls of a pair: forward, reference and frozen backward.

    Prompts count once; attention's scores are left out.
    """
    tokens = pairs[:, 0].mean() + pairs[:, 1:].sum(1).mean()
    flops = 6 * matmul_parameters(config) * tokens
    return flops / (peak_flops(jax.devices()[0].device_kind) or np.nan)


def choose_policies(args: argparse.Namespace, work: Workload) -> tuple[Sequence[RematPolicy], tuple[str, ...]]:
    """Return the layers' policies and places of their weights: --remat's, or the fastest plan's within a limit."""
    layers = work.config.num_hidden_layers
    if args.memory_limit is None:
        return parse_policies(args.remat, layers), parse_weights(DEVICE, layers)
    gpu = device_gpu(jax.devices()[0]).limited(args.memory_limit)
    plan = Planner(work, gpu).choose(host_memory=args.pinned_gib * GIB, weights=AUTO)
    print(f"{plan}: planned {plan.seconds * 1e3:.0f} ms, {plan.device_bytes / GIB:.1f} GiB", flush=True)
    return plan.policies, plan.weights


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return pairs a second and memory of the steps after the warm-up."""
    host = HostMemory()
    work = workload(args.shape, args.layers, args.row, "lora", args.quantize)
    pairs = make_pairs(args.pairs, work.config.vocab_size)
    if args.pair_tokens:
        pairs = make_long_pairs(args.steps + args.warm_up + 1, work.config.vocab_size, args.pair_tokens)
    batches = make_batches(pairs, args.row, shared=not args.copies)
    objective = ObjectiveConfig(objective="dpo").make()
    planned = replace(
        work,
        document_lengths=tuple(batches.dataset.document_lengths.tolist()),
        host_embeddings=args.memory_limit is not None and not work.config.tie_word_embeddings,
        objective=objective,
        reference=True,
    )
    policies, weights = choose_policies(args, planned)
    graphdefs, trainable, frozen = parameters(work, weights, "host" if planned.host_embeddings else "device")
    executor = Executor(
        graphdefs,
        work.config,
        policy=policies,
        stream_weights=is_streamed(weights),
        objective=objective,
        reference=[without_adapters(graphdefs.layers[0], trainable["layers"][0], frozen["layers"][0])]
        * len(graphdefs.layers),
    )
    optimizer = AdamWOptimizer(OptimizerConfig(learning_rate=5e-6, schedule="constant", warmup_ratio=0.0), args.steps)
    state, ends, counts, losses, pending = optimizer.init(trainable), [], [], [], None
    for step in range(args.warm_up + args.steps):
        batch = next(batches)
        values, gradients = executor.loss_and_gradients(
            trainable, frozen, jax.device_put(batch.micro_batches), float(batch.targets)
        )
        trainable, state, _ = optimizer.update(trainable, state, gradients, step)
        del gradients
        if pending is not None:
            losses.append(float(pending[0]))
            ends.append(time.perf_counter())
        pending = values
        counts.append(batch.targets)
    seconds = ends[-1] - ends[args.warm_up - 1]
    done = sum(counts[args.warm_up : len(ends)])
    rate, limit = done / seconds, limit_seconds(work.config, pairs.lengths)
    return {
        "engine": "jaxglue",
        "pairs_per_second": rate,
        "of_matmul_limit": rate * limit,
        "ms_per_step": seconds / (len(ends) - args.warm_up) * 1e3,
        "pairs_per_step": done / (len(ends) - args.warm_up),
        "peak_gib": memory(jax.devices()[0], "peak_bytes_in_use"),
        "host_gib": host.added(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    } | {name: getattr(args, name) for name in SETTINGS}


def main() -> None:
    take_fitting_blocks(os.environ)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--row", type=int, default=16384)
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--pair-tokens", type=int, help="all pairs have this many tokens")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--memory-limit", type=float, help="GiB of the GPU, for the fastest plan instead of --remat")
    parser.add_argument("--pinned-gib", type=float, default=48, help="host memory for that plan")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--copies", action="store_true", help="a copy of the prompt for each answer")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--pairs-only", type=Path, help="write the pairs and stop")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.pairs_only:
        from shapes import SHAPES

        shape = SHAPES[args.shape]
        pairs = make_pairs(args.pairs, shape["vocab_size"])
        np.savez(args.pairs_only, tokens=pairs.tokens, lengths=pairs.lengths, config=np.array(json.dumps(shape)))
        return
    result = measure(args)
    print(json.dumps(result))
    if args.json:
        write_results(args.json, result)


if __name__ == "__main__":
    main()
