"""Training steps of mixtures of experts: LoRA of rank 16 on attention and experts, with the executor and AdamW.

    python benchmarks/moe_step.py --json benchmarks/results/moe_step.json

Each case runs in its own process, to measure its own peak memory; 8,192 tokens in one packed row.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from measure import table, uniform_lengths, write_results
from shapes import SHAPES

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.engine.transfer import commit
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.segments import pack_segments
from jaxglue.planner.device_memory import take_fitting_blocks
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measurement's model, checkpoint policy and batch."""

    shape: str
    remat: str
    lengths: tuple[int, ...]
    layers: int | None = None
    expand: bool = False
    matmul: str = "bf16"
    fp8_head: bool = False
    fp8_experts: bool = False

    @property
    def config(self) -> DecoderConfig:
        raw = {**SHAPES[self.shape], **({"num_hidden_layers": self.layers} if self.layers else {})}
        config = config_from_hf(raw)
        config = config.expanded if self.expand else config
        products = {"fp8_head": self.fp8_head, "fp8_experts": self.fp8_experts}
        return config.quantized("fp8", **products) if self.matmul == "fp8" else config


EQUAL = (1024,) * 8
MIXED = tuple(uniform_lengths(8192))
CASES = {
    "gpt-oss-20b, 6 layers, bf16, nothing recomputed": Case(
        shape="gpt-oss-20b", layers=6, expand=True, remat="none", lengths=EQUAL
    ),
    "gpt-oss-20b, 6 layers, bf16, dots kept": Case(
        shape="gpt-oss-20b", layers=6, expand=True, remat="dots", lengths=EQUAL
    ),
    "gpt-oss-20b, 6 layers, bf16, recomputed": Case(
        shape="gpt-oss-20b", layers=6, expand=True, remat="full", lengths=EQUAL
    ),
    "gpt-oss-20b, 6 layers, MXFP4, dots kept": Case(shape="gpt-oss-20b", layers=6, remat="dots", lengths=EQUAL),
    "gpt-oss-20b, whole, MXFP4, offloaded": Case(shape="gpt-oss-20b", remat="offload", lengths=MIXED),
    "gpt-oss-20b, whole, MXFP4, recomputed": Case(shape="gpt-oss-20b", remat="full", lengths=MIXED),
    "gpt-oss-20b, whole, MXFP4, dots kept": Case(shape="gpt-oss-20b", remat="dots", lengths=MIXED),
    "qwen3-30b-a3b, 12 layers, bf16, recomputed": Case(shape="qwen3-30b-a3b", layers=12, remat="full", lengths=MIXED),
    "tiny": Case(shape="tiny-moe", remat="dots", lengths=(96, 32)),
}


_FP8 = {
    "attention in FP8": {},
    "attention and head in FP8": {"fp8_head": True},
    "experts in FP8": {"fp8_experts": True},
    "all in FP8": {"fp8_head": True, "fp8_experts": True},
}
CASES |= {
    f"gpt-oss-20b, whole, MXFP4, {name}, {kept}": Case(
        shape="gpt-oss-20b", remat=remat, lengths=MIXED, matmul="fp8", **products
    )
    for name, products in _FP8.items()
    for kept, remat in (("recomputed", "full"), ("dots kept", "dots"))
}


def measure(case: Case, steps: int, profile: Path | None = None) -> dict:
    """Measure milliseconds per step, tokens and model FLOPs per second, and memory in GiB."""
    config, tokens = case.config, sum(case.lengths)
    model = random_model(config)
    add_lora(model, LoraConfig(), rngs=nnx.Rngs(0))
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    del model
    trainable, frozen = commit(trainable), commit(frozen)
    optimizer = AdamWOptimizer(OptimizerConfig(), steps)
    state = optimizer.init(trainable)
    executor = Executor(graphdefs, config, policy=parse_policy(case.remat))
    batch = jax.device_put(_batch(case.lengths, config.vocab_size))
    weights = _memory("bytes_in_use")
    seconds, losses = [], []
    for step in range(steps + 3):  # the first compiles, the second still allocates, the last may be profiled
        traced = jax.profiler.trace(str(profile)) if profile and step == steps + 2 else nullcontext()
        with traced:
            begun = time.perf_counter()
            loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(tokens))
            trainable, state, _ = optimizer.update(trainable, state, gradients, step)
            del gradients
            jax.block_until_ready((loss, trainable))
            losses.append(round(float(loss), 4))
            seconds.append(time.perf_counter() - begun)
    median = float(np.median(seconds[2:-1]))
    visible = mean_visible_keys(np.array(case.lengths))
    flops = training_flops_per_token(config, visible_keys=visible, weight_gradients=False)
    return {
        "ms": round(median * 1e3, 1),
        "tokens/s": round(tokens / median),
        "model TFLOP/s": round(flops * tokens / median / 1e12, 1),
        "weights GiB": round(weights, 2),
        "peak GiB": round(_memory("peak_bytes_in_use"), 2),
        "first step s": round(seconds[0], 1),
        "losses": losses,
        "gpu": jax.devices()[0].device_kind,
    }


def _batch(lengths: tuple[int, ...], vocab_size: int) -> Batch:
    rng = np.random.default_rng(0)
    shape = (1, sum(lengths))
    tokens, targets = (rng.integers(0, vocab_size, shape, dtype=np.int32) for _ in range(2))
    segments = pack_segments([list(lengths)], seq_len=shape[1])
    return Batch(tokens=tokens, targets=targets, loss_weights=np.ones(shape, np.float32), segments=segments)


def _memory(statistic: str) -> float:
    """Return a statistic of the device's memory in GiB; 0 on CPUs, which have none."""
    return (jax.devices()[0].memory_stats() or {statistic: 0})[statistic] / 2**30


def run_case(name: str, steps: int) -> dict:
    """Run `measure` in its own process; an error is a result."""
    command = [sys.executable, __file__, "--case", name, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"case": name, "error": done.stderr.strip().splitlines()[-1]}
    return {"case": name, **json.loads(done.stdout.strip().splitlines()[-1])}


def main() -> None:
    take_fitting_blocks(os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="measure one case in this process and print JSON")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[name for name in CASES if name != "tiny"],
        help="all by default",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="with --case: folder for a trace of one more step")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(CASES[args.case], args.steps, args.profile)))
        return
    results = []
    for name in args.cases:
        results.append(run_case(name, args.steps))
        print(*results[-1].values(), sep="  ", flush=True)
        if args.json:
            write_results(args.json, results, gpu=next((row["gpu"] for row in results if "gpu" in row), "none"))
    measured = [result for result in results if "error" not in result]
    print(table(measured) if measured else "")


if __name__ == "__main__":
    main()
