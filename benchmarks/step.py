"""Measure one training step of a published shape with random weights, in its own process so that its peak is too.

    python benchmarks/step.py --shape qwen3-8b --tokens 16384 --remat offload

Prints one line of JSON; the other memory benchmarks run it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import expert_loop
import jax
import jax.numpy as jnp
import numpy as np
import packed_metadata
import psutil
from idle_layers import IdleLayers, idle_layers
from measure import log_normal_lengths, uniform_lengths
from shapes import SHAPES
from traces import copy_overlap, kernel_milliseconds

from jaxglue.data.batch import Batch
from jaxglue.engine import transfer
from jaxglue.engine.compiler import Lowering
from jaxglue.engine.executor import Executor
from jaxglue.engine.host_buffers import HostBuffers
from jaxglue.engine.host_table import embeddings_to_host
from jaxglue.engine.policy import AUTO, RematPolicy, parse_policies, parse_policy
from jaxglue.engine.residency import DEVICE, is_streamed, parse_weights
from jaxglue.models import config_from_hf
from jaxglue.models.decoder import packed_context
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import merge_module
from jaxglue.ops.cross_entropy import linear_cross_entropy
from jaxglue.ops.quant.formats import FORMATS, is_quantized, quantize_matrix
from jaxglue.ops.quant.fp8 import FP8Weight
from jaxglue.ops.quant.mxfp4 import BLOCK, mxfp4_scale
from jaxglue.ops.quant.nf4 import NF4
from jaxglue.ops.quant.stack import Stack
from jaxglue.ops.segments import pack_segments
from jaxglue.planner.device_memory import leave_small_blocks, take_fitting_blocks
from jaxglue.planner.gpus import GIB
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.training.remat import host_memory

ATTENTION_KERNELS = (
    "forward_kernel",
    "dq_kernel",
    "dkdv_kernel",
    "dk_kernel",
    "dv_kernel",
    "sdpa",
    "flash",
    "fmha",
    "fprop",
    "bprop",
)
MATMUL_KERNELS = "gemm", "nvjet", "cutlass", "xmma", "grouped", "splitk"
"""Parts of kernels' names."""
UNEXPECTED = 0.07
"""Relative error of an expected time from which a step is traced."""
STEPS_AHEAD = 2
"""Steps by which the host is ahead, as in training."""
LENGTHS_SEED = 0
DOCUMENTS = 64, 1024
"""Least and most tokens of a document."""


def workload(
    shape: str,
    layers: int | None,
    tokens: int,
    method: str,
    quantize: str = "none",
) -> Workload:
    """Return LoRA (rank 16, all linear layers) or full fine-tuning of one packed row of uniform document lengths."""
    raw = {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}
    return Workload(
        config=config_from_hf(raw).quantized(quantize),
        batch_size=1,
        seq_len=tokens,
        lora=LoraConfig() if method == "lora" else None,
        document_lengths=tuple(uniform_lengths(tokens, *DOCUMENTS, seed=LENGTHS_SEED)),
        batches_known=True,
    )


def random_batch(tokens: int, vocab_size: int, lengths: Sequence[int]) -> Batch:
    """Return a packed row of documents of these lengths."""
    rng = np.random.default_rng(0)
    shape = (1, tokens)
    segments = pack_segments([list(lengths)], seq_len=tokens)
    ids, targets = (rng.integers(0, vocab_size, shape, dtype=np.int32) for _ in range(2))
    return Batch(tokens=ids, targets=targets, loss_weights=np.ones(shape, np.float32), segments=segments)


def parameters(work: Workload, weights: tuple[str, ...] | None = None, embeddings: str = "device"):
    """Return (graphdefs, trainable, frozen) with random values, made layer by layer to bound GPU memory.

    `weights`: places of the layers' frozen weights (see `residency`), by default all on the device.
    """
    graphdefs, *trees = abstract_parts(work)

    def fill(tree, key, host: bool):
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_quantized)
        filled = transfer.commit(_maker(treedef, tuple(leaves))(key))
        return jax.block_until_ready(transfer.to_host(filled)) if host else filled

    out = []
    for number, tree in enumerate(trees):
        rest = fill({name: part for name, part in tree.items() if name != "layers"}, jax.random.key(number), False)
        if work.config.moe and "embed_tokens" in rest:
            rest["embed_tokens"] = _unlike(rest["embed_tokens"])
        if number and embeddings == "host":
            rest = jax.block_until_ready(embeddings_to_host(rest))
        layers = [
            fill(layer, jax.random.key(100 + 2 * index + number), bool(number and weights and weights[index] != DEVICE))
            for index, layer in enumerate(tree["layers"])
        ]
        out.append({**rest, "layers": layers})
    return graphdefs, *out


@partial(jax.jit, donate_argnums=0)
def _unlike(embedding):
    """Return an embedding of tokens as unlike each other as routers of trained models find them.

    With small ones hidden states are a row's mean and the biases, and all tokens go to the same experts.
    """
    return jax.tree.map(lambda table: table * 500, embedding)


@cache
def _maker(treedef, leaves: tuple):
    """Compile once per layer type: a PRNG key → a random tree of these leaves."""

    def make(key):
        keys = jax.random.split(key, max(len(leaves), 1))
        return jax.tree.unflatten(treedef, [_random(k, leaf) for k, leaf in zip(keys, leaves, strict=False)])

    return jax.jit(make)


def _random(key, leaf):
    """Return normal matrices with σ = 0.02, ones for vectors, uniform NF4 and MXFP4 codes with that σ."""
    if isinstance(leaf, Stack):
        return replace(leaf, rows=_random(key, leaf.rows))
    if leaf.dtype == jnp.uint8 and not is_quantized(leaf):
        is_block = leaf.shape[-1] == BLOCK // 2
        return (
            jax.random.bits(key, leaf.shape, jnp.uint8)
            if is_block
            else jnp.full(leaf.shape, mxfp4_scale(0.02), jnp.uint8)
        )
    if isinstance(leaf, NF4):
        parts = {"scales": jnp.zeros(leaf.scales.shape, jnp.uint8), "scale_absmax": jnp.zeros(leaf.scale_absmax.shape)}
        codes = jax.random.bits(key, leaf.codes.shape, jnp.uint8)
        return NF4(codes=codes, **parts, scale_offset=jnp.float32(0.034), dtype=leaf.dtype)
    if leaf.dtype == jnp.uint8:  # MXFP4: codes, and exponents of moderate scales
        return jax.random.randint(key, leaf.shape, 116, 124).astype(jnp.uint8)
    if is_quantized(leaf):
        return quantize_matrix(_matrix(key, leaf), "fp8" if isinstance(leaf, FP8Weight) else "int8")
    return jnp.ones(leaf.shape, leaf.dtype) if len(leaf.shape) == 1 else _matrix(key, leaf)


def _matrix(key, leaf):
    return (jax.random.normal(key, leaf.shape, jnp.bfloat16) * 0.02).astype(leaf.dtype)


def document_lengths(args) -> tuple[int, ...]:
    """Return the lengths of the row's documents by the flags."""
    if args.log_normal:
        return tuple(log_normal_lengths(args.tokens, args.log_normal, seed=LENGTHS_SEED))
    least, most = (args.document_tokens,) * 2 if args.document_tokens else args.documents
    return tuple(uniform_lengths(args.tokens, least, most, seed=LENGTHS_SEED))


def args_workload(args, layers: int | None = None) -> Workload:
    """Return the workload of the flags, with other layers if given."""
    work = workload(args.shape, layers or args.layers, args.tokens, args.method, args.quantize)
    options: dict[str, Any] = {"host_embeddings": args.embeddings == "host", "tile": args.tile}
    return replace(work, document_lengths=document_lengths(args), **options)


def choose(args, planner: Planner) -> dict:
    """Return the setting that `--remat auto` chooses under the memory limit, with its predicted time and memory."""
    plan = planner.choose(host_memory=pinned_gib(args) * GIB, weights=AUTO if args.memory_limit else DEVICE)
    args.remat, args.weights, args.tile = plan.remat, plan.places, plan.tile
    args.attention, args.layers_per_program = planner.workload.attention, plan.layers_per_program
    args.host_buffers = args.host_buffers or plan.offloaded_bytes / GIB
    foreseen = {"predicted_ms": plan.seconds * 1e3, "predicted_gib": plan.device_bytes / GIB}
    return {"remat": args.remat, "weights": args.weights, "tile": args.tile, **foreseen}


def hold_idle_layers(args, work: Workload) -> IdleLayers:
    """Hold the memory of layers that are not run."""
    gpu, layers = device_gpu(jax.devices()[0]), work.config.num_hidden_layers
    part, whole = (Planner(args_workload(args, count), gpu) for count in (layers, args.of_layers))
    plan = part.plan(parse_policies(args.remat, layers), weights=args.weights)
    policies = parse_policies(args.of_remat, args.of_layers) if args.of_remat else None
    return idle_layers(part, whole, plan, args.of_layers, policies)


def pinned_gib(args) -> float:
    """Return the host memory that may be pinned, GiB."""
    if args.pinned_gib is not None:
        return args.pinned_gib
    return host_memory() / GIB


def open_buffers(args) -> HostBuffers | None:
    """Return buffers for offloaded values, as a run has them; None for JAX's pool."""
    device = jax.devices()[0]
    if args.jax_pool or "offload" not in args.remat or args.executor != "layers" or device.platform == "cpu":
        return None
    return HostBuffers(device, round(args.host_buffers * GIB))


def executor_step(args, work, batch) -> Callable[..., Callable]:
    """Begin to lower the step's programs, as a run does; return a function of the model: → a step's dispatch.

    This returns the loss and an array that is ready when the step ends.
    """
    graphdefs, *shapes = abstract_parts(work)
    executor = Executor(
        graphdefs,
        work.config,
        policy=parse_policies(args.remat, len(graphdefs.layers)),
        stream_weights=is_streamed(parse_weights(args.weights, len(graphdefs.layers))),
        prefetch_depth=args.depth,
        tile=args.tile,
        attention=args.attention,
        layers_per_program=args.layers_per_program,
        host_buffers=open_buffers(args),
    )
    foreseen = not 1 < args.layers_per_program < len(graphdefs.layers) and args.embeddings == "device"
    lowerings = [Lowering(executor.trace_step(*shapes, [batch]))] if foreseen else []
    kept: list[Any] = []

    def dispatch(trainable, frozen):
        while lowerings:
            lowerings.pop().compile()
        into = kept.pop() if kept else None
        loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(args.tokens), into=into)
        if not executor.reuses_gradients:
            return loss, smallest(gradients)  # others do not stay
        kept.append(gradients)
        return loss, loss

    return lambda _, *trees: partial(dispatch, *trees)


def whole_step(args, work, batch, graphdefs, trainable, frozen):
    """Compile the whole step as one program, its layers unrolled or scanned, with XLA's own offloading."""

    def apply(train, froze, x, context):
        return merge_module(graphdefs.layers[0], train, froze)(x, context)

    layer = checkpointed(apply, parse_policy(args.remat))

    def loss(trainable, frozen, batch):
        def module(name):
            return merge_module(getattr(graphdefs, name), trainable[name], frozen[name])

        x, context = module("embed_tokens")(batch.tokens, work.dtype), packed_context(work.config, batch.segments)
        if args.executor == "scan":
            stacks = trainable["layers"], frozen["layers"]
            x, _ = jax.lax.scan(lambda x, layers: (layer(*layers, x, context), None), x, stacks)
        else:
            for train, froze in zip(trainable["layers"], frozen["layers"], strict=True):
                x = layer(train, froze, x, context)
        output = module("embed_tokens" if graphdefs.lm_head is None else "lm_head").weight[...]
        flat = module("norm")(x).reshape(-1, x.shape[-1])
        total = linear_cross_entropy(flat, output, batch.targets.ravel(), batch.loss_weights.ravel())
        return total / args.tokens

    if args.executor == "scan":
        for tree in (trainable, frozen):
            tree["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tree["layers"])
    step = jax.jit(jax.value_and_grad(loss))

    def dispatch():
        total, gradients = step(trainable, frozen, batch)
        return total, smallest(gradients)

    return dispatch


def checkpointed(layer, policy: RematPolicy):
    """Apply XLA's own offloading of a policy to a layer, its input included."""
    if policy.saved is None:
        return layer
    names = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(policy.saved),
        names_which_can_be_offloaded=sorted(policy.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(layer, policy=names, prevent_cse=False)


def memory(device: jax.Device, statistic: str) -> float:
    """Return a memory statistic in GiB; 0 on CPUs."""
    return (device.memory_stats() or {statistic: 0})[statistic] / 2**30


def pinned_bytes(tree) -> int:
    """Return the bytes of a tree's arrays in pinned host memory."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(array.nbytes for array in arrays if array.sharding.memory_kind == transfer.PINNED)


def report(phase: str) -> None:
    """Print a phase as it begins, or ends, with the process's age and memory."""
    process, device = psutil.Process(), jax.devices()[0]
    used = f"GPU {memory(device, 'bytes_in_use'):.1f} GiB, peak {memory(device, 'peak_bytes_in_use'):.1f}"
    host = f"resident host memory {process.memory_info().rss / 2**30:.1f} GiB"
    free = f"{psutil.virtual_memory().available / 2**30:.1f} GiB available"
    print(f"[{time.time() - process.create_time():.0f} s] {phase}: {used}; {host}, {free}", file=sys.stderr, flush=True)


def measure(args, ready: Callable[[], None] = lambda: None) -> dict:
    """Return milliseconds of a step, seconds of the first, peak memory, and copies from the trace.

    Call `ready` once all programs are compiled.
    """
    work = args_workload(args)
    if args.routing == "loop":
        expert_loop.install()
    if args.metadata == "layer":
        packed_metadata.install(work.config)
    chosen = {}
    if args.remat == AUTO:
        chosen = choose(args, Planner(work, device_gpu(jax.devices()[0]).limited(args.memory_limit)))
    batch = jax.device_put(random_batch(args.tokens, work.config.vocab_size, work.document_lengths))
    build = executor_step(args, work, batch) if args.executor == "layers" else partial(whole_step, args, work, batch)
    report("weights")
    held = leave_small_blocks(jax.devices()[:1])
    begun = time.perf_counter()
    parts = parameters(work, parse_weights(args.weights, work.config.num_hidden_layers), args.embeddings)
    moments = [jax.tree.map(jnp.zeros_like, parts[1]) for _ in range(2)]  # AdamW's, so that the peak is a run's
    device = jax.devices()[0]
    jax.block_until_ready(moments)
    filled, weights = time.perf_counter() - begun, memory(device, "bytes_in_use")
    pinned = pinned_bytes(parts[2]) / 2**30
    report(f"first step; {pinned:.1f} GiB of weights in pinned memory")
    others = hold_idle_layers(args, work) if args.of_layers else None
    step = build(*parts)
    with traced(args, args.trace_first) as found:
        begun = time.perf_counter()
        loss, _ = jax.block_until_ready(step())
        first = time.perf_counter() - begun
        report(f"{args.steps} steps; the first took {first:.1f} s")
    if found:
        report(" ".join(f"{k} {v}" for k, v in found.items()))
    ready()
    if args.warm_up:
        jax.block_until_ready(step())
    times = step_times(step, args.steps, STEPS_AHEAD) or [(found["busy_ms"] / 1e3, first)]
    row = {
        "setting": {name: value for name, value in vars(args).items() if value is not None},
        "gpu": device.device_kind,
        "loss": float(loss),
        "ms": float(np.median([t for t, _ in times]) * 1e3),
        "dispatch_ms": float(np.median([d for _, d in times]) * 1e3),
        "first_step_s": first,
        "tokens_per_second": args.tokens / float(np.median([t for t, _ in times])),
        "weights_s": filled,
        "weights_gib": weights,
        "pinned_weights_gib": pinned,
        "host_rss_gib": psutil.Process().memory_info().rss / 2**30,
        "host_free_gib": psutil.virtual_memory().available / 2**30,
        "peak_gib": memory(device, "peak_bytes_in_use"),
        **chosen,
    }
    del others, held  # until the memory was read
    if (args.trace or args.kernels) and not args.trace_first and is_unexpected(row["ms"], args.expected_ms):
        with traced(args, True) as found:
            jax.block_until_ready(step())
    return row | found


def is_unexpected(ms: float, expected: float | None) -> bool:
    """Return whether a step's time is worth an explanation; always where none was expected."""
    return expected is None or abs(ms / expected - 1) > UNEXPECTED


def step_times(step: Callable, steps: int, ahead: int) -> list[tuple[float, float]]:
    """Return seconds of each step and of its dispatch; the host dispatches `ahead` steps before it waits for one.

    A thread takes the time at each step's end, as dispatch waits, too, where layers copy to the host.
    """
    dispatched, ended = [], list[Future[float]]()
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as watching:
        for index in range(steps):
            begun = time.perf_counter()
            ended.append(watching.submit(ready_at, step()[1]))
            dispatched.append(time.perf_counter() - begun)
            if index >= ahead:
                ended[index - ahead].result()
        times = np.diff([started, *(end.result() for end in ended)]).tolist()
    report("steps of " + ", ".join(f"{1e3 * seconds:,.0f}" for seconds in times) + " ms")
    return list(zip(times, dispatched, strict=True))


def ready_at(array: jax.Array) -> float:
    """Return the time when an array is ready."""
    array.block_until_ready()
    return time.perf_counter()


def smallest(gradients: dict) -> jax.Array:
    """Return a small array that is ready when a step ends: of the first layer's gradients."""
    layers = gradients["layers"]
    return min(jax.tree.leaves(layers[0] if isinstance(layers, list) else layers), key=lambda array: array.nbytes)


@contextmanager
def traced(args, wanted: bool) -> Iterator[dict]:
    """Yield a dictionary that has copies, and kernels' times by kind, once the step inside is done."""
    row: dict[str, Any] = {}
    if not wanted:
        yield row
        return
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield row
        if args.trace:
            found = copy_overlap(folder)
            row |= {"copies_ms": found.to_host + found.to_device, "hidden_ms": found.hidden, "busy_ms": found.busy}
            row |= {"span_ms": found.span, "hidden_share": found.hidden_share}
        if args.kernels:
            row["kernels"] = by_kind(kernel_milliseconds(folder))


def by_kind(kernels: dict[str, float]) -> dict[str, float]:
    """Add up kernels' milliseconds by kind."""
    kinds = {"attention": ATTENTION_KERNELS, "matmul": MATMUL_KERNELS, "copy": ("memcpy", "memset")}
    spent = dict.fromkeys((*kinds, "other"), 0.0)
    for name, milliseconds in kernels.items():
        fits = (kind for kind, parts in kinds.items() if any(part in name.lower() for part in parts))
        spent[next(fits, "other")] += milliseconds
    longest = {name[:40]: time for name, time in list(kernels.items())[:8]}
    return {name: round(time, 3) for name, time in (spent | longest).items()}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--of-layers", type=int, help="hold idle memory as of so many layers, and run --layers of them")
    parser.add_argument("--of-remat", help="policies of these; by default those of --remat, repeated")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--documents", type=int, nargs=2, default=DOCUMENTS, help="least and most tokens of one")
    parser.add_argument("--document-tokens", type=int, help="length of all documents, in place of --documents")
    parser.add_argument("--log-normal", type=int, metavar="N", help="N documents of log-normal lengths in their place")
    parser.add_argument("--tile", type=int, help="tokens that pass through a layer at a time")
    parser.add_argument("--attention", default="auto", help="as of scripts/train.py")
    parser.add_argument("--layers-per-program", type=int, default=1, help="as of scripts/train.py; auto chooses it")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--quantize", choices=FORMATS, default="none")
    parser.add_argument("--embeddings", choices=("device", "host"), default="device")
    parser.add_argument("--remat", default="full", help="as of scripts/train.py; auto chooses where weights are, too")
    parser.add_argument("--memory-limit", type=float, help="GiB that auto plans with")
    parser.add_argument("--pinned-gib", type=float, help="host memory that auto plans with; by default what JAX pins")
    parser.add_argument("--host-buffers", type=float, default=0, help="GiB to take ahead for offloaded values")
    parser.add_argument("--jax-pool", action="store_true", help="leave offloaded values to JAX's pinned memory")
    parser.add_argument("--weights", default=DEVICE, help="as of scripts/train.py")
    parser.add_argument(
        "--depth",
        type=int,
        help="layers by which copies are requested ahead, 0 for none; by default the executor chooses",
    )
    parser.add_argument(
        "--metadata", choices=("batch", "layer"), default="batch", help="what finds documents' bounds and rotary tables"
    )
    parser.add_argument("--routing", choices=("sort", "loop"), default="sort", help="of tokens to their experts")
    parser.add_argument("--executor", choices=("layers", "unrolled", "scan"), default="layers")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="measure from the second step")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument(
        "--trace-first",
        action="store_true",
        help="trace the first step; with --trace --steps 0 its kernels' time, without gaps, stands for a step's",
    )
    parser.add_argument("--expected-ms", type=float, help="trace only a step that takes another time")
    parser.add_argument("--kernels", action="store_true", help="add up kernels' time by kind")
    return parser


def run_case(environment: dict[str, str] | None = None, **options) -> dict:
    """Run `measure` in its own process with these environment variables added."""
    flags = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    command = [sys.executable, str(Path(__file__)), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (environment or {}))
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    take_fitting_blocks(os.environ)
    print(json.dumps(measure(arguments().parse_args())))
