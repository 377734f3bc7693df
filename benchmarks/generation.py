"""Time generation: one prompt at a time against many decoded together, on random weights of a published shape.

    python benchmarks/generation.py --shape qwen3-8b --prompts 64 --json benchmarks/results/generation.json

Prompts have 20 to 500 tokens and 128 new ones each. Tokens/s include the prompts' forward passes; a decode step's time
excludes them. Its limit is the time to read the weights and the visible keys and values from memory. Answers are
compared with those one by one: in float32 on a few layers of the shape, and in bfloat16 up to their first difference.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from inputs import SHAPES
from measure import table, write_results

from jaxglue.generation.cache import CachePlan, token_bytes
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.generator import Generator, Request
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import split_model
from jaxglue.planner.gpus import lookup_gpu

SHORTEST, LONGEST, NEW = 20, 500, 128


class Model:
    """A generator with its weights."""

    def __init__(self, config: DecoderConfig, dtype):
        model = random_model(config, dtype=dtype)
        graphdefs, *self.trees = split_model(model, nnx.LoRAParam)
        self.config, self.dtype, self.generator = config, dtype, Generator(graphdefs, config, dtype=dtype)
        embedding = 0 if graphdefs.lm_head is None else model.embed_tokens.weight[...].nbytes
        self.read_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.trees)) - embedding

    def one_by_one(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the answers, each decoded alone, as in a chat."""
        return [list(self.generator.stream(*self.trees, r.prompt, r.sampling, index=r.index)) for r in requests]

    def together(self, requests: Sequence[Request], plan: CachePlan, whole: bool) -> list[list[int]]:
        """Return the answers decoded together."""
        found = dict(self.generator.answers(*self.trees, requests, plan=plan, whole=whole))
        return [found[number] for number in range(len(requests))]


def draw_requests(count: int, vocabulary: int, new: int) -> list[Request]:
    """Return prompts of random tokens and uneven lengths."""
    rng = np.random.default_rng(0)
    sampling = SamplingConfig(temperature=0.0, max_tokens=new)
    lengths = rng.integers(SHORTEST, LONGEST + 1, count)
    return [Request(rng.integers(0, vocabulary, n).tolist(), sampling, i) for i, n in enumerate(lengths)]


def seconds(function: Callable, *arguments) -> tuple[float, float, list[list[int]]]:
    """Return the time of a first call, of a second one, and the result."""
    begun = time.perf_counter()
    function(*arguments)
    compiled = time.perf_counter()
    result = function(*arguments)
    return compiled - begun, time.perf_counter() - compiled, result


def with_limit(requests: Sequence[Request], new: int) -> list[Request]:
    return [replace(r, sampling=replace(r.sampling, max_tokens=new)) for r in requests]


def time_alone(model: Model, requests: Sequence[Request]) -> tuple[dict, list[list[int]]]:
    """Time a few prompts one after another."""
    first, whole, answers = seconds(model.one_by_one, requests)
    prefill = seconds(model.one_by_one, with_limit(requests, 1))[1]
    step = (whole - prefill) / sum(len(answer) - 1 for answer in answers)
    return row(model, "one at a time", requests, (first, whole, step), answers, 1), answers


def time_together(model: Model, requests: Sequence[Request], whole: bool) -> tuple[dict, list[list[int]]]:
    """Time all prompts decoded together."""
    plan = model.generator.plan(requests)
    print(f"{len(requests)} prompts, {plan}", flush=True)
    first, spent, answers = seconds(model.together, requests, plan, whole)
    prefill = seconds(model.together, with_limit(requests, 1), plan, whole)[1]
    step = (spent - prefill) / (NEW - 1)
    name = f"{len(requests)} together, {'one program' if whole else 'layer by layer'}"
    return row(model, name, requests, (first, spent, step), answers, len(requests)), answers


def row(model: Model, name: str, requests, times: tuple[float, float, float], answers, at_once: int) -> dict:
    """Return a line of the table."""
    (first, spent, step), gpu = times, lookup_gpu(jax.devices()[0].device_kind)
    visible = float(np.mean([len(r.prompt) + NEW / 2 for r in requests])) * at_once
    bytes_read = model.read_bytes + visible * token_bytes(model.config, model.dtype)
    limit = bytes_read / gpu.copy * 1e3 if gpu else float("nan")
    return {
        "": name,
        "prompts": len(requests),
        "tokens/s": round(sum(map(len, answers)) / spent),
        "ms a decode step": round(step * 1e3, 2),
        "limit ms": round(limit, 2),
        "first call s": round(first, 1),
    }


def agreement(alone: Sequence[list[int]], together: Sequence[list[int]]) -> str:
    """Return how many answers are equal, and how many tokens are up to the first difference."""
    pairs = list(zip(alone, together, strict=False))
    equal = sum(a == b for a, b in pairs)
    before = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
    share = sum(before) / sum(len(a) for a, _ in pairs)
    return f"{equal} of {len(pairs)} answers equal, {share:.0%} of tokens before a difference"


def compare_in_float32(config: DecoderConfig, layers: int, count: int) -> str:
    """Compare greedy answers of a few layers of the shape in float32."""
    with jax.default_matmul_precision("highest"):
        model = Model(config.with_layers(range(min(layers, config.num_hidden_layers))), jnp.float32)
        requests = draw_requests(count, config.vocab_size, 32)
        return agreement(model.one_by_one(requests), model.together(requests, model.generator.plan(requests, 4), False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--alone", type=int, default=4, help="prompts to answer one by one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = config_from_hf(SHAPES[args.shape])
    model = Model(config, jnp.bfloat16)
    requests = draw_requests(args.prompts, config.vocab_size, NEW)
    line, alone = time_alone(model, requests[: args.alone])
    rows, notes = [line], {}
    for whole in (False, True):
        line, answers = time_together(model, requests, whole)
        rows.append(line | {"× one at a time": round(line["tokens/s"] / rows[0]["tokens/s"], 1)})
        notes["bfloat16"] = agreement(alone, answers)
        print(rows[-1], notes["bfloat16"], flush=True)
    rows[0]["× one at a time"] = 1.0
    print(table(rows), flush=True)
    if args.json:
        write_results(args.json, {"shape": args.shape, "times": rows, "agreement": notes})
    del model
    notes["float32, 4 layers"] = compare_in_float32(config, 4, 12)
    print(notes)
    if args.json:
        write_results(args.json, {"shape": args.shape, "times": rows, "agreement": notes})


if __name__ == "__main__":
    main()
