"""Decode with drafts on random weights of a published shape, each draft accepted with a given probability.

    python benchmarks/drafts.py --shape qwen3.5-9b --streams 1 16 64 256 --json benchmarks/results/drafts.json

Weights decide nothing about a draft here: whether one is accepted is drawn, from a hash of position and token, after
the model has verified it. A run's tokens per second are those of the difference of two lengths of answers, so they
exclude prompts. `predicted` is the speed that `auto` expects of a row, in that of no drafts, whose choice `auto` rows
follow. Rows that would probably end after --seconds are left out. With --profile a row has the longest kernels of a
step, from a trace of the prompts and the shorter answers.
"""

import argparse
import os
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from kernel_profile import kernel_times, profile_rows
from measure import table, write_results
from shapes import SHAPES

from jaxglue.generation.config import Drafts, SamplingConfig
from jaxglue.generation.draft_rule import StepBytes
from jaxglue.generation.drafts import HEAD, WORDS, LoadedHead, make_drafting, words_of
from jaxglue.generation.engine import Engine
from jaxglue.generation.pages import CachePlan
from jaxglue.generation.programs import EnginePrograms
from jaxglue.generation.scheduler import Request
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.draft import build_draft
from jaxglue.models.parameters import split_model
from jaxglue.ops import backend
from jaxglue.planner.device_memory import take_fitting_blocks

CONTEXT = 388
"""Tokens of a prompt."""


def accept_drawn(probability: float) -> None:
    """Let programs accept drafts with a probability."""

    def matches(chosen, drafts, positions):
        mixed = (positions * 7919 + chosen * 104729).astype(jnp.uint32) * np.uint32(2654435761)
        return (mixed >> 8).astype(jnp.float32) / 2**24 < probability

    EnginePrograms.matches = staticmethod(matches)  # type: ignore[method-assign]


def requests(count: int, new: int, vocabulary: int) -> list[Request]:
    """Return prompts of random tokens with answers of so many."""
    rng, sampling = np.random.default_rng(0), SamplingConfig(max_tokens=new, temperature=1.0)
    return [Request(rng.integers(0, vocabulary, CONTEXT).tolist(), sampling, index) for index in range(count)]


def rate(engine: Engine, trees: Any, streams: int, lengths: tuple[int, int], repeats: int, plan: CachePlan) -> float:
    """Return the tokens per second of all streams together."""
    asked, spent = [requests(streams, new, engine.config.vocab_size) for new in lengths], []
    for each in [asked[0], *asked * repeats]:  # the first time compiles
        begun = time.perf_counter()
        tokens = sum(len(done.tokens) for done in engine.generate(*trees, each, plan=plan, whole=True))
        spent.append((time.perf_counter() - begun, tokens))
    short, long = (min(spent[start::2]) for start in (1, 2))
    return (long[1] - short[1]) / (long[0] - short[0])


def profile(engine: Engine, trees: Any, streams: int, new: int, plan: CachePlan) -> list[dict]:
    """Return the longest kernels of answers of so many tokens."""
    asked = requests(streams, new, engine.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            list(engine.generate(*trees, asked, plan=plan, whole=True))
        return profile_rows(kernel_times(Path(folder)), top=40)


def predicted(step: StepBytes, streams: int, drafts: str, probability: float) -> float:
    """Return the speed of so many drafts by the rule of `auto`, in that of none."""
    tokens = sum(probability**index for index in range(int(drafts) + 1))
    bytes_of = [step.of_step(streams, count, CONTEXT + 100) for count in (0, int(drafts))]
    return round(tokens * bytes_of[0] / bytes_of[1], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3.5-9b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--drafts", nargs="+", choices=get_args(Drafts), default=["off", "1", "2", "auto"])
    parser.add_argument("--probability", type=float, default=0.7)
    parser.add_argument("--lengths", type=int, nargs=2, default=[32, 160])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--words", type=int, default=32768, help="tokens that drafts are chosen among; 0: all")
    parser.add_argument("--seconds", type=float, default=540.0, help="in which rows begin")
    parser.add_argument("--untried", action="store_true", help="take kernels that no GPU has run, too")
    parser.add_argument("--profile", action="store_true", help="add the longest kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begun, last = time.perf_counter(), 0.0
    accept_drawn(args.probability)
    if args.untried:
        backend.UNTRIED.clear()
    take_fitting_blocks(os.environ)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    config = config_from_hf(SHAPES[args.shape])
    graphdefs, trainable, frozen = split_model(random_model(config, dtype=dtype), nnx.LoRAParam)
    head, state = nnx.split(build_draft(config, dtype=dtype, rngs=nnx.Rngs(0)))
    weights = {HEAD: nnx.to_pure_dict(state)}
    if 0 < args.words < config.vocab_size:
        weights[WORDS] = words_of(graphdefs, (trainable, frozen), list(range(args.words)))
    drafted = LoadedHead(make_drafting(head, "auto"), weights).beside((trainable, frozen))
    step = StepBytes.of(config, drafted, graphdefs.output_name, dtype)
    results: list[dict] = []
    for streams, drafts in product(args.streams, args.drafts):
        row_begun = time.perf_counter()
        if row_begun - begun + last > args.seconds:
            print(f"{streams} streams, {drafts} drafts: left out after {row_begun - begun:.0f} s", flush=True)
            continue
        drafting = None if drafts == "off" else make_drafting(head, drafts)
        engine = Engine(graphdefs, config, dtype=dtype, drafting=drafting)
        trees = drafted if drafting else (trainable, frozen)
        plan = engine.plan(requests(streams, args.lengths[1], config.vocab_size), slots=streams)
        speed = rate(engine, trees, streams, tuple(args.lengths), args.repeats, plan)
        plain = next((row["tokens/s"] for row in results if row["streams"] == streams), speed)
        made = engine.drafts
        row = {"streams": streams, "drafts": drafts, "tokens/s": round(speed, 1), "times": round(speed / plain, 3)}
        row["accepted"] = round(made.accepted / made.made, 3) if made.made else None
        row["predicted"] = predicted(step, streams, drafts, args.probability) if drafts.isdigit() else None
        last = time.perf_counter() - row_begun
        results.append(row | {"seconds": round(last, 1)})
        print(results[-1], flush=True)
        if args.profile:
            results[-1]["profile"] = profile(engine, trees, streams, args.lengths[0], plan)
            print(table(results[-1]["profile"]), flush=True)
        if args.json:
            write_results(args.json, results)
    print(table([{name: value for name, value in row.items() if name != "profile"} for row in results]))


if __name__ == "__main__":
    main()
