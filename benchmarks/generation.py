"""Time generation on random weights of a published shape: decode steps of some streams, and a batch of uneven answers.

    python benchmarks/generation.py --rows all --json benchmarks/results/generation.json
    python benchmarks/generation.py --shape qwen3-0.6b --streams 1 64 --requests 0
    python benchmarks/generation.py --rows "gpt-oss-20b" --compare NAME    # beside others

`--rows` names settings of the table in docs/generation.md; other flags describe one setting.

A decode step's time is the difference of two runs, so it excludes prompts. Its limit is the time to read the weights
and the visible keys and values at this GPU's rate of reading, measured in the same process, and to read and write the
states of recurrent layers; of experts those that as many random tokens choose. The batch has prompts of
200 tokens and answers of forced, log-normal lengths (mean 512, σ 0.7, at most 1,024). Its limit adds to each step of an
ideal schedule, all answers at once, the prompts' matmuls at the measured rate; a step takes the longer of reading the
weights and multiplying them. Prompts are compared with the layers' forward pass of training. `--profile` adds the time
of each kernel in some windows.
"""

import argparse
import math
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from measure import milliseconds, table, take_untried, write_results
from shapes import SHAPES
from traces import gpu_events

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Completion, Engine
from jaxglue.generation.pages import PAGE, CachePlan, state_bytes, token_bytes
from jaxglue.generation.scheduler import Request
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.decoder import CausalLM, packed_context
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import abstract_parameters, merge_module, split_model
from jaxglue.ops import backend
from jaxglue.ops.choices import KVCache
from jaxglue.ops.moe import Routing
from jaxglue.ops.segments import PackedSegments, pack_segments
from jaxglue.planner.device_memory import take_fitting_blocks

PROMPT, MEAN, SIGMA, LONGEST = 200, 512, 0.7, 1024
STEPS = 128
"""Decode steps that are timed."""
CONTEXT, LONG_CONTEXT = 388, 1000
"""Mean tokens that a stream sees."""
ATTENTION = "paged_kernel", "append_attend_kernel", "latent_kernel"
"""Kernels that run once for each layer and step."""
ROW = 4096
"""Tokens of a row of prompts."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row of the table, or the flags' shape."""

    shape: str
    quantize: str = "none"
    """Format of the decoder layers' linear layers."""
    kv_cache: KVCache = "auto"
    streams: tuple[int, ...] = ()
    context: int = CONTEXT
    requests: int = 0
    """Uneven answers."""
    prompts: int = 0
    """Prompts of 500 tokens."""
    lora: int = 0
    """Rank of a live adapter on all linear layers, with which the steps run once more."""
    adapters: int = 0
    """Adapters of that rank, in turn those of the streams, with which the steps run once more."""


ROWS = {
    "qwen3-8b": Setting(shape="qwen3-8b", streams=(1, 64, 256), requests=512, prompts=256, lora=16, adapters=4),
    "qwen3-8b fp8": Setting(
        shape="qwen3-8b", quantize="fp8", kv_cache="fp8", streams=(64, 256), context=LONG_CONTEXT, requests=512
    ),
    "qwen3-8b nf4": Setting(shape="qwen3-8b", quantize="nf4", streams=(1, 64)),
    "qwen3-8b int8": Setting(shape="qwen3-8b", quantize="int8", streams=(1, 64)),
    "qwen3-30b-a3b": Setting(shape="qwen3-30b-a3b", streams=(64, 256), lora=16),
    "qwen3-30b-a3b fp8": Setting(shape="qwen3-30b-a3b", quantize="fp8", streams=(64, 256), lora=16),
    "qwen3-30b-a3b nf4": Setting(shape="qwen3-30b-a3b", quantize="nf4", streams=(64, 256), lora=16),
    "qwen3.5-35b-a3b fp8": Setting(shape="qwen3.5-35b-a3b", quantize="fp8", streams=(64, 256), lora=16),
    "gpt-oss-20b": Setting(shape="gpt-oss-20b", streams=(64, 256), lora=16, adapters=4),
    "nemotron-3-nano": Setting(shape="nemotron-3-nano", streams=(64, 256)),
    "granite-4-h-small fp8": Setting(shape="granite-4-h-small", quantize="fp8", streams=(64, 256)),
    "tiny Nemotron": Setting(shape="tiny-nemotron", streams=(2,)),
    "tiny Granite 4 fp8": Setting(shape="tiny-granite-4", quantize="fp8", streams=(2,)),
}


class Model:
    """An engine with its weights."""

    def __init__(self, config: DecoderConfig, dtype, kv_cache: KVCache = "auto", model: CausalLM | None = None, rank=0):
        self.model = _unlike(random_model(config, dtype=dtype)) if model is None else model
        graphdefs, *self.trees = split_model(self.model, nnx.LoRAParam)
        self.config, self.dtype, self.kv_cache, self.rank = config, dtype, kv_cache, rank
        self.engine = Engine(graphdefs, config, dtype=dtype, kv_cache=kv_cache)
        embedding = 0 if graphdefs.lm_head is None else self.model.embed_tokens.weight[...].nbytes
        self.read_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.trees)) - embedding
        shapes = abstract_parameters(self.model)
        self.parameters = (
            sum(math.prod(spec.shape) for spec in shapes.values()) - config.vocab_size * config.hidden_size
        )
        self.token_bytes = token_bytes(config, self.engine.cache_dtype)
        self.state_bytes = state_bytes(config, dtype)
        named = jax.tree_util.tree_leaves_with_path(self.trees)
        self.expert_bytes = sum(leaf.nbytes for path, leaf in named if "experts" in jax.tree_util.keystr(path))

    def bytes_read(self, streams: int) -> float:
        """Return the bytes of weights that a step of so many streams reads."""
        return self.read_bytes - self.expert_bytes * (1 - self._experts_chosen(streams))

    def _experts_chosen(self, tokens: int) -> float:
        """Return the mean share of a layer's experts that so many random tokens, each after others, choose."""
        if not self.config.moe:
            return 1.0
        length, chosen = 8, []
        ids = jax.random.randint(jax.random.key(9), (1, tokens * length), 0, self.config.vocab_size)
        segments = pack_segments([[length] * tokens], seq_len=tokens * length)
        for expert_ids in self.forward(ids, segments)[1]:
            last = np.asarray(expert_ids).reshape(tokens, length, -1)[:, -1]
            chosen.append(len(np.unique(last)) / self.config.moe.num_experts)
        return float(np.mean(chosen))

    def forward(self, tokens, segments: PackedSegments) -> tuple[jax.Array, list[jax.Array]]:
        """Return the last layer's output as in training, and the experts that sparse layers chose."""
        x = self.model.embed_tokens.weight[...].astype(self.dtype)[tokens]
        packed, chosen = packed_context(self.config, segments), []
        graphdefs = split_model(self.model, nnx.LoRAParam)[0]
        for graphdef, *weights in zip(graphdefs.layers, *(tree["layers"] for tree in self.trees), strict=True):
            x, own = _layer(graphdef, weights, x, packed)
            chosen += own
        return x, chosen

    def with_lora(self, rank: int) -> "Model":
        """Return the model with a live adapter on all linear layers."""
        add_lora(self.model, LoraConfig(rank=rank, alpha=2 * rank), rngs=nnx.Rngs(0))
        return self.again(rank)

    def again(self, rank: int) -> "Model":
        """Return the model, whose adapters have a rank, with programs of its own."""
        return Model(self.config, self.dtype, self.kv_cache, self.model, rank)

    def beside(self, kernels: Collection[str]) -> Iterator[tuple[dict[str, str], "Model"]]:
        """Yield the model by kernels in use, and by these of `UNTRIED`, each with what its rows say."""
        yield {}, self
        if kernels:
            backend.UNTRIED.difference_update(kernels)
            jax.clear_caches()
            yield {"untried": ", ".join(kernels)}, self.again(self.rank)
            backend.UNTRIED.update(kernels)
            jax.clear_caches()

    def compile(self, requests: Sequence[Request], plan: CachePlan) -> float:
        """Compile all programs for requests of this kind; return the seconds."""
        begun = time.perf_counter()
        short = [replace(r, sampling=replace(r.sampling, max_tokens=8)) for r in requests]
        answers = self.engine.generate(*self.trees, short, plan=plan, whole=True)
        next(answers)
        self.engine.wait()  # for the programs of fewer answers
        answers.close()
        return time.perf_counter() - begun

    def answer(self, requests: Sequence[Request], **options) -> tuple[float, list[Completion]]:
        """Return the seconds of all answers, and these."""
        begun = time.perf_counter()
        found = list(self.engine.generate(*self.trees, requests, **options))
        return time.perf_counter() - begun, found


def _unlike(model: CausalLM) -> CausalLM:
    """Make a sparse model's tokens as unlike each other as trained routers find them, which choose many experts."""
    if model.config.moe:
        model.embed_tokens.weight[...] = model.embed_tokens.weight[...] * 500
    return model


class _Observed(PackedContext):
    """Context of training that keeps the experts chosen."""

    def observe_routing(self, routing: Routing) -> None:
        """Keep the experts."""
        self.__dict__.setdefault("chosen", []).append(routing.expert_ids)


@partial(jax.jit, static_argnums=0, compiler_options=STEP_OPTIONS)
def _layer(graphdef, weights, x, packed: PackedContext):
    context = _Observed(**vars(packed))
    return merge_module(graphdef, *weights)(x, context), context.__dict__.get("chosen", [])


def draw_requests(count: int, prompt: int, new: Sequence[int], vocabulary: int, temperature: float) -> list[Request]:
    """Return prompts of random tokens whose answers have these lengths."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocabulary, (count, prompt))
    sampling = [SamplingConfig(temperature=temperature, top_p=1.0, max_tokens=int(n)) for n in new]
    return [Request(p.tolist(), s, i) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]


def read_rate() -> float:
    """Return the bytes that this GPU reads in a second, summing 4 GiB."""
    x = jnp.ones((1 << 15, 1 << 16), jnp.bfloat16)
    total = jax.jit(lambda x, axis: x.sum(axis, dtype=jnp.float32), static_argnums=1)
    spent = min(milliseconds(total, x, axis) for axis in (0, 1))
    return x.nbytes / spent * 1e3


def matmul_rate() -> float:
    """Return this GPU's FLOP/s in a matmul of 16-bit numbers under sustained load."""
    x, w = jnp.ones((4096, 4096), jnp.bfloat16), jnp.ones((12288, 4096), jnp.bfloat16)
    product = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    return 2 * x.size * len(w) / milliseconds(product, x, w, budget=300) * 1e3


def time_steps(
    model: Model, streams: int, context: int, rate: float, plan: CachePlan | None = None, adapters: int = 0
) -> dict:
    """Time decode steps of some streams, whose contexts have `context` tokens on average, in turn of some adapters."""
    vocabulary, prompt = model.config.vocab_size, context - STEPS // 2 - 32
    parts = np.repeat(np.eye(adapters, dtype=bool), model.rank // max(adapters, 1), axis=1)

    def requests(new: int) -> list[Request]:
        drawn = draw_requests(streams, prompt, [new] * streams, vocabulary, 1.0)
        return [replace(r, ranks=parts[i % adapters]) for i, r in enumerate(drawn)] if adapters else drawn

    def spent(new: int) -> float:
        return model.answer(requests(new), plan=plan, whole=True)[0]

    if plan is None:
        plan = model.engine.plan(requests(STEPS + 64))
        spent(32)
    short, long = (min(spent(new) for _ in range(2)) for new in (32, 32 + STEPS))
    step = (long - short) / STEPS
    limit = (model.bytes_read(streams) + streams * (context * model.token_bytes + 2 * model.state_bytes)) / rate
    shown = {
        "streams": streams,
        "context": context,
        "ms a step": round(step * 1e3, 2),
        "limit ms": round(limit * 1e3, 2),
    }
    return shown | {"share of limit": f"{limit / step:.0%}", "tokens/s": round(streams / step)}


def profile_steps(model: Model, streams: int, context: int, plan: CachePlan | None) -> dict:
    """Return the milliseconds of a step's kernels, the longest first, in windows behind those that begin."""
    new, windows = STEPS, 3
    requests = draw_requests(streams, context - new // 2, [new] * streams, model.config.vocab_size, 1.0)
    pieces = model.engine.pieces(*model.trees, requests, plan=plan or model.engine.plan(requests), whole=True)
    for _ in islice(pieces, 4 * streams):
        pass
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in islice(pieces, windows * streams):
                pass
            model.engine.wait()
        pieces.close()
        events = sorted(gpu_events(folder)[0], key=lambda event: event[1])
    spent = defaultdict[str, list[float]](list)
    for name, (start, end) in events:
        spent[re.sub(r"\d+", "#", name)[:70]].append(end - start)
    layers = sum(not kind.mixer.recurrent for kind in model.config.layer_kinds)
    steps = max(1, sum(len(times) for name, times in spent.items() if any(k in name for k in ATTENTION)) / layers)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:20]
    shown = {"streams": streams, "ms a step": round((events[-1][1][1] - events[0][1][0]) / steps, 2)}
    shown["kernels"] = round(sum(map(sum, spent.values())) / steps, 2)
    return shown | {
        name: f"{len(times) / steps:.1f} x {sum(times) / len(times) * 1e3:.1f} us" for name, times in longest
    }


def forced_lengths(count: int) -> np.ndarray:
    """Return log-normal lengths of answers."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(drawn.astype(int), 1, LONGEST)


def batch_requests(model: Model, count: int) -> list[Request]:
    """Return requests for uneven answers."""
    return draw_requests(count, PROMPT, forced_lengths(count), model.config.vocab_size, 1.0)


def time_batch(model: Model, count: int, rate: float, flops: float, plan: CachePlan) -> dict:
    """Time a batch of uneven answers, all given at once."""
    requests, lengths = batch_requests(model, count), forced_lengths(count)
    spent, found = model.answer(requests, plan=plan, whole=True)
    tokens = sum(len(completion.tokens) for completion in found)
    assert tokens == lengths.sum()
    per_token = 2 * model.parameters / flops
    live = (lengths[None] > np.arange(LONGEST)[:, None]).sum(1)
    live = live[live > 0]
    products = np.maximum(model.read_bytes / rate, live * per_token).sum()
    keys = (PROMPT * lengths + lengths * (lengths + 1.0) / 2).sum() * model.token_bytes / rate
    keys += 2 * lengths.sum() * model.state_bytes / rate
    prefill = count * PROMPT * per_token
    limit = products + keys + prefill
    parts = {"products": products, "keys": keys, "prompts": prefill}
    shown = {"requests": count, "tokens": tokens, "seconds": round(spent, 2), "tokens/s": round(tokens / spent)}
    shown |= {"limit tokens/s": round(tokens / limit), "share of limit": f"{limit / spent:.0%}"}
    return shown | {f"limit of {k} s": round(float(v), 2) for k, v in parts.items()}


def time_prefill(model: Model, count: int, prompt: int, flops: float) -> dict:
    """Time the prompts alone, and one window of steps, beside the layers' forward pass of training."""
    requests = draw_requests(count, prompt, [1] * count, model.config.vocab_size, 0.0)
    plan = model.engine.plan(requests)
    model.answer(requests, plan=plan)
    spent = min(model.answer(requests, plan=plan)[0] for _ in range(2))
    tokens = jax.random.randint(jax.random.key(3), (1, ROW), 0, model.config.vocab_size)
    segments = jax.device_put(pack_segments([[prompt] * (ROW // prompt)], seq_len=ROW))
    forward = milliseconds(lambda: model.forward(tokens, segments)[0], budget=200) / 1e3 * count / (ROW // prompt)
    rate = 2 * count * prompt * model.parameters / spent
    return {
        "prompts": f"{count} of {prompt}",
        "seconds": round(spent, 2),
        "tokens/s": round(count * prompt / spent),
        "share of matmul rate": f"{rate / flops:.0%}",
        "share of training's forward rate": f"{forward / spent:.0%}",
    }


def measure(
    setting: Setting, rate: float, flops: float, show, *, profile: bool, compared: Collection[str] = ()
) -> None:
    """Time all that a setting has, steps also by kernels to compare; show(kind, row) takes each row as it comes."""
    config = config_from_hf(SHAPES[setting.shape]).quantized(setting.quantize)
    model, plan = Model(config, jnp.bfloat16, setting.kv_cache), None
    show("weights", {"GiB": round(model.read_bytes / 2**30, 2)})
    if setting.requests:
        requests = batch_requests(model, setting.requests)
        plan = model.engine.plan(requests)
        show("plan", {"slots": plan.slots, "pages": plan.pages, "compilation s": round(model.compile(requests, plan))})
        show("batch", time_batch(model, setting.requests, rate, flops, plan))
    plans = {
        n: plan if n >= 8 and plan and setting.context + STEPS <= plan.table * PAGE else None for n in setting.streams
    }
    for by, engine in model.beside(compared):
        for streams, own in plans.items():
            show("steps", by | time_steps(engine, streams, setting.context, rate, own))
    if setting.prompts:
        show("prefill", time_prefill(model, setting.prompts, 500, flops))
    if setting.lora:
        for by, adapted in model.with_lora(setting.lora).beside(compared):
            for streams in setting.streams[-2:]:
                shown = by | {"lora": setting.lora}
                show("steps", shown | time_steps(adapted, streams, setting.context, rate))
                if profile:
                    show("profile", shown | profile_steps(adapted, streams, setting.context, None))
    for streams in setting.streams[-2:] if profile else ():
        show("profile", profile_steps(model, streams, setting.context, plans[streams]))
    if setting.adapters:
        adapted = model.with_lora(setting.adapters * setting.lora)
        for streams in setting.streams[1:2]:
            timed = time_steps(adapted, streams, setting.context, rate, adapters=setting.adapters)
            show("steps", {"adapters": setting.adapters, "lora": setting.lora} | timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=["all", *ROWS], default=[], help="settings of the table")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--quantize", default="none", help="format of the decoder layers' linear layers")
    parser.add_argument("--kv-cache", choices=["auto", "fp8"], default="auto")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of a live adapter, with which the steps run once more"
    )
    parser.add_argument("--adapters", type=int, default=0, help="adapters of that rank, in turn those of the streams")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=CONTEXT, help="mean tokens that a stream sees")
    parser.add_argument("--prompts", type=int, default=0, help="prompts of 500 tokens to prefill")
    parser.add_argument("--requests", type=int, default=512, help="uneven answers; 0 for none")
    parser.add_argument("--untried", nargs="*", help="take these kernels that no GPU has run, too; none named: all")
    parser.add_argument(
        "--compare", nargs="+", default=[], help="time steps once more, by these kernels that no GPU has run"
    )
    parser.add_argument("--profile", action="store_true", help="show the time of each kernel of some windows")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    take_fitting_blocks(os.environ)
    take_untried(args.untried)
    if unknown := set(args.compare) - backend.UNTRIED:
        parser.error(f"--compare: UNTRIED has no {', '.join(sorted(unknown))}, but {', '.join(backend.UNTRIED)}")
    own = {name: getattr(args, name) for name in asdict(Setting(shape="")) if name != "streams"}
    settings = {name: ROWS[name] for name in (ROWS if "all" in args.rows else args.rows)}
    settings = settings or {args.shape: Setting(**own, streams=tuple(args.streams))}
    rate, flops = read_rate(), matmul_rate()
    limits = {"read TB/s": round(rate / 1e12, 2), "matmul TFLOP/s": round(flops / 1e12)}
    print(jax.devices()[0].device_kind, limits, flush=True)
    results: dict[str, Any] = {"gpu": jax.devices()[0].device_kind, "limits": limits}
    for name, setting in settings.items():
        rows = results[name] = {"setting": asdict(setting)}

        def show(kind: str, row: dict, name: str = name, rows: dict[str, Any] = rows) -> None:
            rows.setdefault(kind, []).append(row)
            shown = "\n".join(f"{key}: {value}" for key, value in row.items()) if kind == "profile" else table([row])
            print(f"{name}: {kind}\n{shown}", flush=True)
            if args.json:
                write_results(args.json, results)  # as they come, for runs that are cut short

        measure(setting, rate, flops, show, profile=args.profile, compared=args.compare)


if __name__ == "__main__":
    main()
