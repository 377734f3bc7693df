"""Train jaxglue on the batches of benchmarks/sft_step.py; print a JSON line of times, losses and memory, then another
with kernels.

    python benchmarks/sft_ours.py --model DIR --adapter DIR --batches FILE.npz --memory-limit 18.8

Steps are the trainer's, executor and AdamW, dispatched one ahead of the awaited loss.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from inputs import embedding_scale
from kernel_profile import is_copy, kernel_times, profile_rows
from measure import milliseconds
from peers.host import HostMemory

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import Lowering
from jaxglue.engine.executor import Executor
from jaxglue.engine.host_table import embeddings_to_host
from jaxglue.engine.policy import AUTO, parse_policies
from jaxglue.engine.residency import is_streamed
from jaxglue.engine.transfer import commit
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import Params, split_model
from jaxglue.ops.choices import SERVED
from jaxglue.ops.segments import pack_segments, segment_bucket
from jaxglue.planner.device_memory import bound_pool, leave_small_blocks, outside_pool, take_fitting_blocks
from jaxglue.planner.flops import mean_visible_keys
from jaxglue.planner.gpus import GIB
from jaxglue.planner.plan import Plan
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig
from jaxglue.training.progress import StartupTimer
from jaxglue.training.step import StepProgram
from jaxglue.training.weights import place_layers

PACKAGES = ("jax", "jaxlib", "flax", "jax-triton", "triton")


def read_batches(path: Path) -> list[Batch]:
    """Read the packed rows as equal-shaped batches; every token except a document's last has a target."""
    with np.load(path) as stored:
        tokens, lengths = stored["tokens"], stored["lengths"]
    slots = segment_bucket(int((lengths > 0).sum(1).max()))
    return [make_batch(row, sizes[sizes > 0], slots) for row, sizes in zip(tokens, lengths, strict=True)]


def make_batch(tokens: np.ndarray, lengths: np.ndarray, slots: int) -> Batch:
    """Return a packed row."""
    segments = pack_segments([lengths.tolist()], seq_len=len(tokens), max_segments=slots)
    last = np.zeros((1, len(tokens)), bool)
    last[0, np.cumsum(lengths) - 1] = True
    targets = np.where(last, 0, np.roll(tokens, -1)[None]).astype(np.int32)
    weights = np.where(last, 0, 1).astype(np.float32)
    return Batch(tokens=tokens[None].astype(np.int32), targets=targets, loss_weights=weights, segments=segments)


def storage(args: argparse.Namespace) -> str:
    """Return the storage format of the decoder layers' linear layers."""
    return "fp8" if args.matmul == "fp8" else args.quantize


def settle_config(args: argparse.Namespace) -> DecoderConfig:
    """Return the folder's architecture in the formats of the flags, experts among them."""
    return config_from_hf(read_config(args.model)).quantized(storage(args), fp8_head=args.fp8_head)


def choose(args: argparse.Namespace, config: DecoderConfig, batches: list[Batch]) -> Plan | None:
    """Return the plan for the flags, including the weights' location; None without a GPU."""
    if jax.default_backend() == "cpu":
        return None
    workload = Workload(
        config=config,
        batch_size=1,
        seq_len=batches[0].tokens.shape[1],
        lora=LoraConfig(),
        document_lengths=document_lengths(batches),
        host_embeddings=args.embeddings == "host",
    )
    planner = Planner(workload, device_gpu(jax.devices()[0]).limited(args.memory_limit), prefetch_depth=args.depth)
    if args.remat == AUTO:
        weights = AUTO if args.memory_limit else args.weights
        return planner.choose(host_memory=args.pinned_gib * GIB, weights=weights)
    return planner.plan(parse_policies(args.remat, config.num_hidden_layers), weights=args.weights)


def load(args: argparse.Namespace, config: DecoderConfig, plan: Plan | None) -> tuple:
    """Return (graphdefs, trainable, frozen), of random weights if the folder has none, where the plan places them."""
    dtype = np.dtype("float32") if plan is None else jax.numpy.bfloat16
    place = partial(place_layers, plan.weights) if plan is not None and is_streamed(plan.weights) else None
    if any(Path(args.model).glob("*.safetensors")):
        model = load_model(args.model, dtype=dtype, quantize=storage(args), place=place)
    else:
        model = random_model(config, dtype=dtype, place=place)
        embedding = model.embed_tokens.weight
        embedding.set_value(embedding.get_value() * embedding_scale(config))
    add_adapter(model, args.adapter)
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    if args.embeddings == "host":
        frozen = embeddings_to_host(frozen)
    return graphdefs, commit(trainable), commit(frozen)


class Run:
    """A model with its adapter, AdamW and training step."""

    def __init__(
        self,
        parts: tuple,
        config: DecoderConfig,
        plan: Plan | None,
        *,
        steps: int,
        learning_rate: float,
        depth: int | None = None,
    ):
        graphdefs, self.trainable, self.frozen = parts
        self._executor = Executor(
            graphdefs,
            config,
            policy=plan.policies if plan else parse_policies("dots", config.num_hidden_layers),
            dtype=np.dtype("float32") if plan is None else jax.numpy.bfloat16,
            stream_weights=plan is not None and is_streamed(plan.weights),
            prefetch_depth=depth,
            tile=plan.tile if plan else None,
            layers_per_program=plan.layers_per_program if plan else 1,
        )
        optimizer = OptimizerConfig(learning_rate=learning_rate, schedule="constant", warmup_ratio=0.0, clip_norm=0.0)
        self._optimizer = AdamWOptimizer(optimizer, steps)
        self._state, self._step = self._optimizer.init(self.trainable), 0
        self._program = StepProgram(self._executor, self._optimizer) if plan and plan.one_program else None
        self._spent: Params | None = None

    def compile(self, batch: Batch) -> None:
        """Compile the programs of single layers ahead of the first step, their kernels side by side."""
        programs = self._executor.trace_step(self.trainable, self.frozen, [jax.device_put(batch)])
        # Those around the layers read tables on the host otherwise.
        Lowering(program for program in programs if program.fun_name in ("_forward", "_backward")).compile()

    def step(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Dispatch a step; return (loss, an array ready once the backward pass is done)."""
        weight = float(batch.loss_weights.sum())
        if self._program is not None:  # as the trainer does: each array handed over by itself costs the host
            arguments = self.frozen, batch, weight, None, self._step
            self.trainable, self._state, values = self._program(self.trainable, self._state, *arguments)
            self._step += 1
            return values["loss"], values["grad_norm"]
        loss, gradients = self._executor.loss_and_gradients(
            self.trainable, self.frozen, [jax.device_put(batch)], weight, into=self._spent
        )
        self._spent = gradients if self._executor.reuses_gradients else None
        self.trainable, self._state, values = self._optimizer.update(self.trainable, self._state, gradients, self._step)
        self._step += 1
        return loss, values["grad_norm"]


def train(run: Run, batches: list[Batch], warm_up: int, ready: Callable[[], None] = lambda: None) -> dict:
    """Return all losses, and the intervals between step ends after the warm-up, dispatching one step ahead.

    Call `ready` once the warm-up is done.

    A step's end is seen once the next one is dispatched. The last step has none after it, and the first after the
    warm-up, which is waited for, begins before that end is seen: their intervals are shorter, and left out.
    """
    begun, losses, ends, pending = time.perf_counter(), [], [], None
    for number, batch in enumerate(batches):
        loss, done = run.step(batch)
        losses.append(loss)
        if number == 0 or number == warm_up - 1:
            jax.block_until_ready(run.trainable)
        if number == warm_up - 1:
            ready()
        if number == 0:
            first = time.perf_counter() - begun
        if pending is not None:
            jax.block_until_ready(pending)
            ends.append(time.perf_counter())
        pending = done
    jax.block_until_ready((pending, run.trainable))
    ends.append(time.perf_counter())
    times = (np.diff(ends)[warm_up:-1] * 1e3).tolist()
    return {"ms": statistics.median(times), "ms_all": times, "losses": [*map(float, losses)], "first_step_s": first}


def wait_for_others() -> None:
    """Say that the timed steps are next, and wait for a line of stdin."""
    print(json.dumps({"warm": True}), flush=True)
    sys.stdin.readline()


def attention_flops(config: DecoderConfig, batches: list[Batch]) -> dict[str, float]:
    """Return each attention kernel's FLOPs per launch from visible keys: two, three and four matmuls."""
    matmul = (
        2
        * config.num_attention_heads
        * config.head_dim
        * mean_visible_keys(np.array(document_lengths(batches)))
        * batches[0].tokens.size
    )
    matmuls = {"forward_kernel": 2, "dq_kernel": 3, "dkdv_kernel": 4, "dk_kernel": 3, "dv_kernel": 2}
    return {name: count * matmul for name, count in matmuls.items()}


def document_lengths(batches: list[Batch]) -> tuple[int, ...]:
    """Return the lengths of all documents."""
    lengths = np.concatenate([np.diff(np.asarray(batch.segments.cu_seqlens[0])) for batch in batches])
    return tuple(lengths[lengths > 0].tolist())


def profile(run: Run, batch: Batch, folder: Path, flops: dict[str, float]) -> dict:
    """Profile the kernels of a step."""
    with jax.profiler.trace(folder):
        run.step(batch)
        jax.block_until_ready(run.trainable)
    events = kernel_times(folder, flops)
    kernels = [event for event in events if not is_copy(event)]
    busy = sum(kernel.milliseconds for kernel in kernels)
    launches = sum(kernel.launches for kernel in kernels)
    return {"kernels": launches, "kernel_ms": busy, "profile": profile_rows(events)}


def matmul_rate(size: int = 8192) -> float:
    """Measure TFLOP/s of a large bf16 matmul of random numbers."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jax.numpy.bfloat16) for key in keys)
    dots = (jax.jit(jax.numpy.dot), jax.jit(lambda a, b: a @ b.T))
    return 2 * size**3 / min(milliseconds(dot, a, b) for dot in dots) / 1e9


def measure(args: argparse.Namespace) -> Iterator[dict]:
    """Yield times, losses and peak memory of a run over all batches; then the same with kernels.

    Each stands whatever becomes of the rest; the first thing known is how long loading took.
    """
    timer, host = StartupTimer.since_process_start(), HostMemory()
    config = settle_config(args)
    batches = read_batches(args.batches)
    plan, held = choose(args, config, batches), leave_small_blocks(jax.devices()[:1])
    timer.stage("plan")
    run = Run(
        load(args, config, plan), config, plan, steps=len(batches), learning_rate=args.learning_rate, depth=args.depth
    )
    jax.block_until_ready((run.trainable, run.frozen))
    timer.stage("load")
    yield {"seconds": timer.stages}
    if plan is None or plan.layers_per_program == 1:
        run.compile(batches[0])
        timer.stage("compile")
    ready, device = wait_for_others if args.wait else (lambda: None), jax.devices()[0]
    result = train(run, batches, args.warm_up, ready)
    result["host_gib"] = host.added()
    timer.stage("train")
    result |= {"gpu": device.device_kind, "versions": {package: version(package) for package in PACKAGES}}
    if plan is None:
        yield result | {"seconds": timer.stages}
        return
    result |= {"peak_gib": device.memory_stats()["peak_bytes_in_use"] / GIB, "plan": str(plan)}
    result |= {"planned_ms": plan.seconds * 1e3, "planned_gib": plan.device_bytes / GIB}
    yield result | {"seconds": timer.stages}
    with tempfile.TemporaryDirectory() as scratch:
        result |= profile(run, batches[-1], args.trace or Path(scratch), attention_flops(config, batches))
    timer.stage("profile")
    del run, held
    result["matmul_tflops"] = matmul_rate()
    timer.stage("matmuls")
    yield result | {"seconds": timer.stages}


def parse(flags: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, by default the process's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--quantize", choices=("none", "nf4", *SERVED), default="none")
    parser.add_argument("--matmul", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--fp8-head", action="store_true", help="the output projection in FP8 too")
    parser.add_argument("--remat", default=AUTO)
    parser.add_argument("--weights", default="device", help="where there is no --memory-limit")
    parser.add_argument("--embeddings", choices=("device", "host"), default="device")
    parser.add_argument("--depth", type=int, help="layers that copies from the host are ahead")
    parser.add_argument("--memory-limit", type=float, help="GiB that auto plans for, and JAX's pool has")
    parser.add_argument("--pinned-gib", type=float, default=100.0, help="host memory that may be pinned")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--wait", action="store_true", help="before the timed steps, wait for a line of stdin")
    parser.add_argument("--trace", type=Path, help="where to keep the profiler's trace of a step")
    return parser.parse_args(flags)


def main() -> None:
    args = parse()
    take_fitting_blocks(os.environ)
    if args.memory_limit:  # of JAX's pool, as peers' is that of PyTorch's
        bound_pool(args.memory_limit + outside_pool() / GIB, os.environ)
    for result in measure(args):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
