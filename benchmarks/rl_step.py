"""Time a whole step of reinforcement learning on random weights of a published shape, and compare log-probabilities.

    python benchmarks/rl_step.py --shape qwen3-8b --prompts 64 --answers 8 --json benchmarks/results/x.json
    python benchmarks/rl_step.py --shape gpt-oss-20b --json …    # a mixture; --plain-experts: no adapters on experts
    python benchmarks/rl_step.py --inputs-only FILE.npz    # prompts and lengths, for benchmarks/peers/grpo.py

Prompts have 200 tokens, answers forced, log-normal lengths (mean 512, σ 0.7, at most 1,024). The step has the phases of
`jaxglue train --objective grpo` with adapters: sampling by the live weights, packing, and forward, backward and update.
Log-probabilities of sampling and of training's programs are compared on these answers; the final norm is scaled until
distributions have about two nats, as those of trained models, and adapters are random, since fresh ones add nothing.
With --drafts, of families that have draft heads, sampling is timed a second time, with drafts that are accepted with a
given probability; the step's time is then given for both.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import jax
import numpy as np
from drafts import accept_drawn
from flax import nnx
from measure import take_untried, write_results
from shapes import SHAPES

from jaxglue.data.config import DataConfig
from jaxglue.data.iterator import Step
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.generation.config import Drafts, SamplingConfig
from jaxglue.generation.drafts import HEAD, WORDS, LoadedHead, make_drafting, words_of
from jaxglue.generation.engine import Engine
from jaxglue.generation.pages import CachePlan
from jaxglue.generation.scheduler import Request
from jaxglue.generation.window_sizes import WindowSizes
from jaxglue.models.draft import build_draft
from jaxglue.models.lora_config import LoraConfig
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.rollouts import StepCounts
from jaxglue.ops.attention.tiles import key_tile
from jaxglue.ops.backend import one_device_each
from jaxglue.ops.choices import QUANTIZE
from jaxglue.planner.device_memory import bounded_pool, take_fitting_blocks
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.pack import Group, Packed, TrainedAnswer, pack_groups
from jaxglue.rl.sampler import Sampler, copies_of
from jaxglue.sharding.mesh import mesh_of
from jaxglue.training.config import ModelConfig, RunConfig, TrainConfig
from jaxglue.training.rollout_policy import TrainedPolicy
from jaxglue.training.run import Run
from jaxglue.training.setup import resolve
from jaxglue.training.step import prepare_steps, train_step

PROMPT, MEAN, SIGMA, LONGEST = 200, 512, 0.7, 1024
DRAFTED_WORDS = 32768
"""Tokens that drafts are chosen among."""
_EXPERTS = "experts.gate_up_proj", "experts.down_proj"


def forced_lengths(count: int, longest: int) -> np.ndarray:
    """Return log-normal lengths, at most the longest."""
    mu = np.log(MEAN) - SIGMA**2 / 2
    drawn = np.random.default_rng(0).lognormal(mu, SIGMA, count) * longest / LONGEST
    return np.clip(drawn.round().astype(int), 1, longest)


def forced_prompts(count: int, vocabulary: int) -> np.ndarray:
    """Return prompts of random tokens."""
    return np.random.default_rng(1).integers(0, vocabulary, (count, PROMPT))


def save_inputs(args: argparse.Namespace) -> None:
    """Write prompts, lengths of answers [prompts, answers] and the architecture."""
    config, shape = SHAPES[args.shape], (args.prompts, args.answers)
    lengths = forced_lengths(args.prompts * args.answers, args.longest).reshape(shape)
    prompts = forced_prompts(args.prompts, config["vocab_size"])
    np.savez(args.inputs_only, prompts=prompts, lengths=lengths, config=json.dumps(config))


def make_run(args: argparse.Namespace, folder: Path) -> Run:
    """Return a run of GRPO on random prompts."""
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    shape["max_position_embeddings"] = max(shape["max_position_embeddings"], args.row)  # weights are random anyhow
    if args.model is None:
        tokenizer = load_tokenizer(Path(__file__).parents[1] / "jaxglue" / "recipes" / "quickstart" / "model")
        tokenizer.save_pretrained(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(shape))
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * args.prompts)
    config = TrainConfig(
        model=ModelConfig(
            model=str(args.model or folder / "model"),
            random_weights=args.model is None,
            dtype=args.dtype,
            quantize=args.quantize,
            matmul=args.matmul,
            memory_limit=args.memory,
        ),
        data=DataConfig(data=(str(folder / "prompts.jsonl"),), seq_len=args.row),
        objective=ObjectiveConfig(objective="grpo", beta=args.beta),
        rollouts=RolloutConfig(
            reward=("exact",),
            num_generations=args.answers,
            generation_batch_size=args.prompts * args.answers,
            max_completion_length=args.longest,
            exact_sampling="on" if args.exact else "off",
        ),
        lora=LoraConfig(rank=16, alpha=32, exclude=_EXPERTS if args.plain_experts else ()),
        run=RunConfig(batch_size=jax.device_count(), output=folder / "run", steps=200, compilation_cache=None),
    )
    return resolve(config)


class Benchmark:
    """A model, and the phases of a step."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.run, self._rows = args, make_run(args, folder), jax.device_count()
        self._mesh = mesh_of(self.run.mesh)
        self.parts, self.state = prepare_steps(self.run, self._mesh)
        self._spread()
        options: dict[str, Any] = {"dtype": self.run.dtype, "as_written": True}
        self._engine = Engine(self.parts.graphdefs, self.run.model, **options, exact=args.exact)
        self._tile = key_tile(self.run.model.layer_kinds[0].head_dim) if args.exact else 1
        self.drafting: Engine | None = None
        """Engine with a random draft head."""
        if args.drafts != "off":
            graphdef, state = nnx.split(build_draft(self.run.model, dtype=self.run.dtype, rngs=nnx.Rngs(0)))
            weights = {HEAD: nnx.to_pure_dict(state)}
            if self.run.model.vocab_size > 2 * DRAFTED_WORDS:
                trees = self.state.trainable, self.state.frozen
                weights[WORDS] = words_of(self.parts.graphdefs, trees, list(range(DRAFTED_WORDS)))
            self._head = LoadedHead(make_drafting(graphdef, args.drafts), weights)
            self.drafting = Engine(self.parts.graphdefs, self.run.model, **options, drafting=self._head.drafting)
        self._policy = TrainedPolicy(self.run, self.parts, self.state)
        self.prompts = forced_prompts(args.prompts, self.run.model.vocab_size).tolist()
        if args.texts is not None:
            texts = [json.loads(line)["text"] for line in args.texts.read_text().splitlines()[: args.prompts]]
            self.prompts = [self.run.tokenizer.encode(text)[:PROMPT] for text in texts]
        self._lengths = forced_lengths(args.prompts * args.answers, args.longest).reshape(args.prompts, args.answers)
        self.remat = str(self.run.remat)
        self.ended: list[tuple[int, float]] = []
        """Answers' tokens, and seconds after which they were there, of the last sampling."""
        self.slots = 0
        """Answers at a time in it."""
        self.devices = len(copies_of((self.state.trainable, self.state.frozen)))
        """GPUs that answer prompts, each by its own copy of the weights."""
        self._samplers = {engine: self._sampler(engine) for engine in (self._engine, self.drafting) if engine}

    def _sampler(self, engine: Engine) -> Sampler:
        """Return what plans an engine's memory as in a run."""
        sampling = SamplingConfig(max_tokens=self.args.longest, temperature=1.0, top_p=1.0)
        return Sampler(engine, (), sampling, rounds=200, typical=self.prompts, idle=self._policy.idle)

    def _spread(self) -> None:
        """Give adapters random values, and distributions about two nats."""
        key = jax.random.key(3)
        self.state = self.state._replace(
            trainable=jax.tree.map(lambda x: x + 0.01 * jax.random.normal(key, x.shape, x.dtype), self.state.trainable)
        )
        self.state.frozen["norm"] = jax.tree.map(lambda x: x * self.args.norm, self.state.frozen["norm"])

    def sample(
        self, *, shorter: int = 1, part: int = 1, devices: int | None = None, drafts: bool = False
    ) -> list[Group]:
        """Return answers of the forced lengths, or of shorter ones.

        Args:
            shorter: what their lengths are divided by.
            part: one of how many parts of the prompts to answer.
            devices: GPUs to use; by default all that hold the weights.
            drafts: by the engine that drafts.
        """
        engine = self.drafting if drafts and self.drafting else self._engine
        sampling = SamplingConfig(max_tokens=self.args.longest, temperature=1.0, top_p=1.0)
        count = self.args.answers
        prompts = self.prompts[: len(self.prompts) // part]
        requests = [Request(prompt, sampling, index, n=count) for index, prompt in enumerate(prompts)]
        ends = np.maximum(self._lengths // shorter, 1)
        trees = self.state.trainable, self.state.frozen

        def decode(plan: CachePlan) -> list[Group]:
            print(f"{plan}; {memory()}", flush=True)
            copies = copies_of(trees)[:devices]
            if engine is self.drafting:
                copies = [self._head.beside(copy) for copy in copies]
            begun, self.ended, self.slots = time.perf_counter(), [], plan.slots
            groups = [Group(request.prompt, [None] * count) for request in requests]  # type: ignore[list-item]

            def share(first: int) -> None:
                with one_device_each() if len(copies) > 1 else nullcontext():
                    own = range(first, len(requests), len(copies))
                    self._sample_part(engine, copies[first], requests, own, ends, plan, groups)

            with ThreadPoolExecutor(len(copies)) as pool:
                list(pool.map(share, range(len(copies))))
            self.ended = [(tokens, at - begun) for tokens, at in self.ended]
            return groups

        # A plan of all prompts, so that parts of them need no programs of their own.
        groups = self._samplers[engine].in_plan(trees, count, decode)
        self.state = jax.block_until_ready(self._policy.state)  # moments that had moved are back
        return groups

    def _sample_part(self, engine: Engine, trees, requests, own, ends, plan, groups) -> None:
        """Sample the answers to some of the requests by one device's copy of the weights."""

        def until(number: int, answer: int, tokens: list[int]) -> bool:
            return len(tokens) >= ends[own[number], answer]

        mine = [requests[index] for index in own]
        for done in engine.generate(*trees, mine, plan=plan, until=until, whole=True):
            number, end = own[done.number], ends[own[done.number], done.answer]
            self.ended.append((int(end), time.perf_counter()))
            answer = TrainedAnswer(
                tokens=done.tokens[:end],
                log_probs=done.log_probs[:end],
                reference=done.log_probs[:end] if self.args.beta else None,
                counted=np.ones(len(done.tokens[:end]), bool),
                advantage=float(np.random.default_rng([number, done.answer]).normal()),
            )
            groups[number].answers[done.answer] = answer  # type: ignore[index]

    def compile_sampling(self, *, shorter: int = 16, drafts: bool = False) -> None:
        """Compile windows of all sizes, which answers do not wait for: in a run, its first steps go on meanwhile.

        Then few prompts and fewer, in rows of every size: those of prompts that begin when some answers have ended.
        """
        with patch.object(WindowSizes, "give_up", lambda sizes: None):  # as answers' end does of those not begun
            self.sample(shorter=shorter, drafts=drafts)
        part = 2
        while part <= len(self.prompts):
            self.sample(shorter=self.args.longest, part=part, drafts=drafts)
            part *= 2

    def given(self, *, forced: bool = False) -> list[Group]:
        """Return answers of random tokens, all of the greatest length or of the forced ones."""
        vocabulary, lengths = self.run.model.vocab_size, self._lengths.ravel()

        def answer(number: int) -> TrainedAnswer:
            rng, longest = np.random.default_rng(number), int(lengths[number]) if forced else self.args.longest
            return TrainedAnswer(
                tokens=rng.integers(0, vocabulary, longest),
                log_probs=np.full(longest, np.nan, np.float32),
                reference=np.zeros(longest, np.float32) if self.args.beta else None,
                counted=np.ones(longest, bool),
                advantage=float(rng.normal()),
            )

        count = self.args.answers
        return [Group(p, [answer(i * count + k) for k in range(count)]) for i, p in enumerate(self.prompts)]

    def decode(self, context: int) -> None:
        """Sample 64 tokens of each answer to a prompt of a length; call twice to leave compilation out."""
        prompt = np.random.default_rng(2).integers(0, self.run.model.vocab_size, context).tolist()
        request = Request(prompt, SamplingConfig(max_tokens=64, temperature=1.0, top_p=1.0), n=self.args.answers)
        list(self._engine.generate(self.state.trainable, self.state.frozen, [request], whole=True))

    def pack(self, groups: list[Group]) -> Step:
        """Return the step's micro-batches."""
        slots = self.args.prompts * self.args.answers
        self.groups = groups
        self.packed = self._pack(groups)
        tokens = sum(len(answer.tokens) for group in groups for answer in group.answers)
        counts = StepCounts(slots, tokens, len(self.packed), self.args.longest)
        objective: Any = self.run.objective
        batches = tuple(batch for batch, _ in self.packed)
        return Step(micro_batches=batches, tokens=tokens, targets=objective.normalizer(counts))

    def _pack(self, groups: list[Group]) -> list[Packed]:
        plan = self.run.rollouts.plan
        slots = self.args.prompts * self.args.answers
        sizes = {"seq_len": self.args.row, "batch_size": self._rows, "slots": slots, "tile": self._tile}
        return pack_groups(groups, **sizes, shared=plan.shared, copies=plan.copies)

    def train(self, step: Step) -> dict[str, float]:
        """Run the optimizer step, and return its values."""
        self.state, result = train_step(self.parts, self.state, step)
        self._policy.state = self.state
        return {name: float(value) for name, value in result.values.items()}

    def log_probs(self, packed: list[Packed], *, reference: bool) -> None:
        """Compute log-probabilities of answers, as several steps on them need, or those of the reference."""
        jax.block_until_ready([self._policy.log_probs(batch, reference=reference) for batch, _ in packed])

    def mismatch(self, most: int) -> dict[str, Any]:
        """Compare log-probabilities of sampling and training, in nats, on micro-batches with about `most` tokens.

        `layouts` compares training with itself, answers in other rows and in reverse order.
        """
        count = max(1, most // self.args.row)
        answers = len(self.groups[0].answers)
        own, sampled = self._trained(self.packed[:count]), self._sampled()
        turned = [group._replace(answers=group.answers[::-1]) for group in self.groups[::-1]]
        other = self._trained(self._pack(turned)[-count:])
        total = len(self.groups) * answers
        both = [number for number in own if total - 1 - number in other]
        return {
            "sampler": differences([own[number] for number in own], [sampled[number] for number in own]),
            "layouts": differences([own[number] for number in both], [other[total - 1 - number] for number in both]),
        }

    def against_training(self, trainable: Any = None) -> dict[str, Any]:
        """Compare log-probabilities of sampling and training, under these adapters if some are given, on all rows."""
        state = self.state
        self._policy.state = state if trainable is None else state._replace(trainable=trainable)
        own, sampled = self._trained(self.packed), self._sampled()
        self._policy.state = state
        found = differences([own[number] for number in own], [sampled[number] for number in own])
        return found | {"places": places(own, sampled)}

    def _trained(self, packed: list[Packed]) -> dict[int, np.ndarray]:
        """Return the log-probabilities of micro-batches' answers by training's programs, by the answers' numbers."""
        found = dict[int, np.ndarray]()
        for batch, numbers in packed:
            assert batch.rollouts is not None
            for owners, row, own in zip(
                np.asarray(batch.rollouts.owners), np.asarray(self._policy.log_probs(batch)), numbers, strict=True
            ):
                found |= {number: row[owners == slot] for slot, number in enumerate(own)}
        return found

    def _sampled(self) -> list[np.ndarray]:
        return [answer.log_probs for group in self.groups for answer in group.answers]


def places(trained: dict[int, np.ndarray], others: list[np.ndarray], most: int = 8) -> list[str]:
    """Return the first tokens whose log-probabilities differ, as answer: token of so many."""
    unequal = ((number, np.flatnonzero(own != others[number]), len(own)) for number, own in sorted(trained.items()))
    return [f"{number}: {token} of {length}" for number, tokens, length in unequal for token in tokens][:most]


def differences(trained: list[np.ndarray], others: list[np.ndarray]) -> dict[str, float]:
    """Summarize other log-probabilities less training's, in nats."""
    if not trained:
        return {}
    difference = np.concatenate(others).astype(np.float64) - np.concatenate(trained)
    return {
        "tokens": len(difference),
        "equal": float((difference == 0).mean()),
        "mean_log_prob": float(np.concatenate(trained).mean()),
        "mean_absolute": float(np.abs(difference).mean()),
        "percentile_99.9": float(np.percentile(np.abs(difference), 99.9)),
        "largest": float(np.abs(difference).max()),
        "mean_signed": float(difference.mean()),
        "half_variance": float(difference.var() / 2),
    }


def when(ended: list[tuple[int, float]]) -> dict[str, float]:
    """Return the seconds after which answers of some lengths were there."""
    lengths = sorted(ended)
    return {str(lengths[i][0]): round(lengths[i][1], 2) for i in range(0, len(lengths), max(1, len(lengths) // 8))} | {
        "all": round(max(seconds for _, seconds in ended), 2)
    }


def timed(results: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """Call a phase and note its seconds; a failure is printed, and ends the phase alone."""
    begun = time.perf_counter()
    try:
        found = call()
    except Exception as error:  # the other phases still say something
        print(f"{name} FAILED: {type(error).__name__}: {str(error)[:600]}", flush=True)
        return None
    results[name] = round(time.perf_counter() - begun, 3)
    print(f"{name}: {results[name]} s; {memory()}", flush=True)
    return found


def memory() -> str:
    """Say what each GPU's pool has in use, and how much of the rest is in one piece."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    names = {"in use": "bytes_in_use", "peak": "peak_bytes_in_use", "largest free": "largest_free_block_bytes"}
    return "GiB " + ", ".join(
        f"{label} {' · '.join(f'{of.get(name, 0) / 2**30:.1f}' for of in stats)}" for label, name in names.items()
    )


def read_flags(flags: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or these flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--row", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", default="none", choices=QUANTIZE)
    parser.add_argument("--matmul", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--exact", action="store_true", help="sample with the bits of training")
    parser.add_argument("--plain-experts", action="store_true", help="adapters on all linear layers but the experts")
    parser.add_argument("--untried", nargs="*", help="take these kernels that no GPU has run, too; none named: all")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the divergence from a reference")
    parser.add_argument("--norm", type=float, default=3.5, help="scale of the final norm")
    parser.add_argument("--model", type=Path, help="folder of a trained model, in place of random weights")
    parser.add_argument("--texts", type=Path, help="rows of text whose beginnings are the prompts")
    parser.add_argument("--given", action="store_true", help="train on given answers of the greatest length alone")
    parser.add_argument(
        "--train-alone", action="store_true", help="train on random answers of the forced lengths alone"
    )
    parser.add_argument("--memory", type=float, help="GPU memory that the step may take, GiB")
    parser.add_argument("--train-rows", type=int, help="rows to train on, from which the time of all follows")
    parser.add_argument(
        "--compared", type=int, default=10**5, help="tokens of rows to compare log-probabilities on; 0: none"
    )
    parser.add_argument("--compare-alone", action="store_true", help="end after the log-probabilities")
    parser.add_argument(
        "--drafts", default="off", choices=get_args(Drafts), help="tokens to draft, as of jaxglue train"
    )
    parser.add_argument("--accepted", type=float, default=0.7, help="probability with which a draft is accepted")
    parser.add_argument("--inputs-only", type=Path, help="write prompts and lengths for a peer, and end")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(flags)


def main() -> None:
    args = read_flags()
    if args.inputs_only:
        save_inputs(args)
        return
    results: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(args).items()}}
    take_fitting_blocks(os.environ)
    if args.drafts != "off":
        accept_drawn(args.accepted)
    take_untried(args.untried)
    with tempfile.TemporaryDirectory() as folder, bounded_pool(args.memory, os.environ):
        bench = timed(results, "load", partial(Benchmark, args, Path(folder)))
        if bench is None:
            sys.exit(1)
        results["remat"] = bench.remat
        print(f"device {jax.devices()[0].device_kind}; remat {bench.remat}", flush=True)
        if args.given:
            long_answers(args, bench, results)
            return
        if args.train_alone:
            train_alone(args, bench, results)
            return
        timed(results, "compile sampling", bench.compile_sampling)
        groups = timed(results, "sampling", bench.sample)
        if groups is None:
            sys.exit(1)
        results["slots"] = bench.slots
        print("seconds by answers' tokens:", results.setdefault("ended", when(bench.ended)), flush=True)
        if bench.drafting is not None:
            time_drafts(args, bench, results)
        if bench.devices > 1:  # as much for each GPU, and a step of the same size
            part = bench.devices
            timed(results, "sampling a part on one GPU", partial(bench.sample, part=part, devices=1))
            timed(results, "sampling a part on all GPUs", partial(bench.sample, part=part))
        answers = [answer for group in groups for answer in group.answers]
        results["answer_tokens"] = sum(len(answer.tokens) for answer in answers)
        step = timed(results, "packing", partial(bench.pack, groups))
        results["row_fill"] = round(step.tokens / (len(step.micro_batches) * jax.device_count() * args.row), 3)
        if args.compared:  # training changes the adapters: compare before it
            results["mismatch"] = timed(results, "comparison", partial(bench.mismatch, args.compared))
            print(json.dumps(results["mismatch"], indent=1), flush=True)
        save(args, results)
        if args.compare_alone:
            return
        time_training(args, bench, step, results)
        four = bench.packed[:4]
        timed(results, "pass of 4 rows", partial(bench.log_probs, four, reference=False))
        if args.beta:
            timed(results, "compile reference", partial(bench.log_probs, four[:1], reference=True))
            timed(results, "reference pass of 4 rows", partial(bench.log_probs, four, reference=True))
    results["step"] = round(sum(results.get(name, 0) for name in ("sampling", "packing", "training")), 2)
    if "sampling with drafts" in results:
        drafted = results["sampling with drafts"]
        results["step with drafts"] = round(results["step"] - results["sampling"] + drafted, 2)
        results["times"] = {
            "sampling": round(results["sampling"] / drafted, 3),
            "step": round(results["step"] / results["step with drafts"], 3),
        }
    results["sampled_tokens_per_second"] = round(results["answer_tokens"] / results.get("sampling", np.inf))
    print(json.dumps(results, indent=1), flush=True)
    save(args, results)


def time_drafts(args: argparse.Namespace, bench: Benchmark, results: dict[str, Any]) -> None:
    """Time sampling with drafts; what its windows take beside is known from the sampling before."""
    assert bench.drafting is not None
    # to the answers' ends: `auto` chooses by those that are left
    timed(results, "compile sampling with drafts", partial(bench.compile_sampling, shorter=1, drafts=True))
    begun = replace(bench.drafting.drafts)
    timed(results, "sampling with drafts", partial(bench.sample, drafts=True))
    made = bench.drafting.drafts.made - begun.made
    results["drafts"] = {"made": made, "accepted": bench.drafting.drafts.accepted - begun.accepted}
    print("seconds by answers' tokens, with drafts:", results.setdefault("ended with drafts", when(bench.ended)))
    save(args, results)


def train_alone(args: argparse.Namespace, bench: Benchmark, results: dict[str, Any]) -> None:
    """Time a training step on random answers of the forced lengths."""
    time_training(args, bench, bench.pack(bench.given(forced=True)), results)
    print(json.dumps(results, indent=1), flush=True)
    save(args, results)


def time_training(args: argparse.Namespace, bench: Benchmark, step: Step, results: dict[str, Any]) -> None:
    """Time the optimizer step, of some rows if so asked."""
    results["rows"] = len(step.micro_batches)
    few = replace(step, micro_batches=step.micro_batches[: min(2, args.train_rows or 2)])
    timed(results, "compile training", partial(bench.train, few))
    some = replace(step, micro_batches=step.micro_batches[: args.train_rows])
    results["values"] = timed(results, "training", partial(bench.train, some))
    if args.train_rows and "training" in results:  # all rows take as long
        results["training"] = round(results["training"] * results["rows"] / len(some.micro_batches), 2)
    results["memory_gb"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
    save(args, results)


def long_answers(args: argparse.Namespace, bench: Benchmark, results: dict[str, Any]) -> None:
    """Time a training step on given answers of the greatest length, and decoding after as many tokens."""
    time_training(args, bench, bench.pack(bench.given()), results)
    timed(results, "compile decoding", partial(bench.decode, args.longest))
    timed(results, "prefill and 64 decode steps", partial(bench.decode, args.longest))
    print(json.dumps(results, indent=1), flush=True)
    save(args, results)


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write the results so far."""
    if args.json:
        write_results(args.json, [results])


if __name__ == "__main__":
    main()
