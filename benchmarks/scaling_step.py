"""Measure a training step of one case of benchmarks/scaling.py on this process's first GPUs.

    python benchmarks/scaling_step.py 8b-lora:data=2

Prints a line of JSON, and another with the trace's figures.
"""

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from measure import uniform_lengths
from shapes import SHAPES
from step import DOCUMENTS, LENGTHS_SEED, memory, parameters, workload
from traces import collective_overlap

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import Lowering
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import AUTO, RematPolicy, format_policies, parse_policies
from jaxglue.models.parameters import Params
from jaxglue.ops.segments import pack_segments
from jaxglue.planner.candidates import most
from jaxglue.planner.device_memory import take_fitting_blocks
from jaxglue.planner.flops import training_flops_per_token
from jaxglue.planner.gpus import peak_flops
from jaxglue.planner.plan import DoesNotFit
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.sharding.mesh import MeshShape, make_mesh, place_batch
from jaxglue.sharding.rules import Layout
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig

_ATTENDED = "save:attention_out,attention_lse"
_LONG: dict[str, Any] = {"shape": "llama-3.1-8b", "remat": _ATTENDED, "steps": 1, "once": True}
MODELS = {
    "8b-lora": {"shape": "qwen3-8b", "remat": "dots"},
    "8b-full": {"shape": "qwen3-8b", "method": "full", "remat": "dots"},
    "32b-lora": {"shape": "qwen3-32b", "remat": "48 x full + 16 x dots"},
    "32b-nf4": {"shape": "qwen3-32b", "remat": "48 x full + 16 x dots", "quantize": "nf4"},
    "30b-a3b-lora": {"shape": "qwen3-30b-a3b", "remat": "dots"},
    "70b-lora": {"shape": "llama-3.3-70b", "remat": AUTO, "steps": 3},
    "document": {"shape": "llama-3.1-8b", "remat": _ATTENDED, "steps": 2, "tokens": 2**17, "documents": (2**17,) * 2},
    "documents": {"shape": "llama-3.1-8b", "remat": _ATTENDED, "steps": 4, "tokens": 2**16, "documents": (2000, 30000)},
    "half-million": _LONG | {"tokens": 2**19, "documents": (2**19,) * 2},
    "million": _LONG | {"tokens": 2**20, "documents": (2**20,) * 2},
}
"""Published shapes with random weights; LoRA of rank 16 on all linear layers, or all weights in float32."""
_TINY = {
    "qwen3-8b": "tiny",
    "qwen3-32b": "tiny",
    "qwen3-30b-a3b": "tiny-qwen3-moe",
    "llama-3.3-70b": "tiny-llama",
    "llama-3.1-8b": "tiny-llama",
}
"""Shapes of the same families for CPUs."""
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model's training step: its shape, how it is trained, and the layers wanted of it."""

    shape: str
    remat: str
    method: str = "lora"
    quantize: str = "none"
    steps: int = 6
    tokens: int = 16384
    """Of a row."""
    documents: tuple[int, int] = DOCUMENTS
    """Least and most tokens of a document, uniform."""
    layers: int | None = None
    once: bool = False
    """The first step is the timed one, its programs compiled before: it takes minutes."""

    def workload(self, layers: int | None = None) -> Workload:
        """Return the work of a row on one GPU with `layers`, by default those wanted."""
        work = workload(self.shape, layers or self.layers, self.tokens, self.method, self.quantize)
        return replace(work, document_lengths=tuple(uniform_lengths(self.tokens, *self.documents, seed=LENGTHS_SEED)))

    def tiny(self) -> "Setting":
        """Return the setting with a tiny model of the family."""
        return replace(
            self, shape=_TINY[self.shape], remat="dots", steps=2, tokens=512, documents=DOCUMENTS, layers=None
        )


class Run:
    """A case's parameters on its mesh, and its training step."""

    def __init__(self, setting: Setting, shape: MeshShape):
        self.work, self.policies = fit(setting, shape)
        mesh = make_mesh(shape, jax.devices()[: shape.devices]) if shape.devices > 1 else None
        layout = Layout(mesh, self.work.dtype)
        graphdefs, *trees = abstract_parts(self.work)
        self._trainable, self._frozen = sharded(trees, layout) if mesh else parameters(self.work)[1:]
        executed = {"policy": self.policies, "dtype": self.work.dtype, "tile": self.work.tile}
        self._executor = Executor(graphdefs, self.work.config, mesh=mesh, **executed)
        self._optimizer = AdamWOptimizer(OptimizerConfig(), 1000, layout)
        self._state = self._optimizer.init(self._trainable)
        self._batch = place_batch(rows(self.work, shape.batch_shards, setting.documents), mesh)
        self.count = shape.batch_shards * setting.tokens
        self._step = 0

    def compile(self) -> None:
        """Compile the programs of loss and gradients."""
        Lowering(self._executor.trace_step(self._trainable, self._frozen, [self._batch])).compile()

    def step(self) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Dispatch loss, gradients and update."""
        loss, gradients = self._executor.loss_and_gradients(
            self._trainable, self._frozen, [self._batch], float(self.count)
        )
        self._trainable, self._state, values = self._optimizer.update(
            self._trainable, self._state, gradients, self._step
        )
        self._step += 1
        return loss, values


def fit(setting: Setting, shape: MeshShape) -> tuple[Workload, Sequence[RematPolicy]]:
    """Return the work of a GPU, with fewer layers where not all fit, and each layer's policy.

    For `auto`, or where the named policies do not fit, they are the fastest that fit without host memory.

    Raises:
        ValueError: not even one layer fits.
    """
    device, work = jax.devices()[0], setting.workload()
    layers = work.config.num_hidden_layers
    if device.platform == "cpu":
        return work, parse_policies(setting.remat, layers)
    gpu = device_gpu(device)

    def planner(layers: int) -> Planner:
        return Planner(replace(setting.workload(layers), mesh=shape), gpu)

    def fits(count: int) -> bool:
        with contextlib.suppress(DoesNotFit):
            return bool(planner(count).choose(host_memory=0))
        return False

    fitting = most(range(1, layers + 1), fits)
    if fitting is None:
        raise ValueError(f"one layer of {setting.shape} and its embeddings do not fit {gpu.name} on {shape}")
    if fitting == layers and setting.remat != AUTO:
        named = parse_policies(setting.remat, layers)
        if planner(layers).fits(planner(layers).memory(named), host_memory=0):
            return work, named
    plan = planner(fitting).choose(host_memory=0)
    return replace(setting.workload(fitting), tile=plan.tile), plan.policies


def rows(work: Workload, count: int, documents: tuple[int, int]) -> Batch:
    """Return packed rows of different documents of so many tokens."""
    rng, size = np.random.default_rng(0), (count, work.seq_len)
    lengths = [uniform_lengths(work.seq_len, *documents, seed=LENGTHS_SEED + row) for row in range(count)]
    ids, targets = (rng.integers(0, work.config.vocab_size, size, dtype=np.int32) for _ in range(2))
    segments = pack_segments(lengths, seq_len=work.seq_len)
    return Batch(tokens=ids, targets=targets, loss_weights=np.ones(size, np.float32), segments=segments)


def sharded(trees: list[Params], layout: Layout) -> list[Params]:
    """Return random parameters, each created in its shards on the mesh."""
    programs: dict = {}

    def fill(tree: Params, prefix: str, seed: int) -> Params:
        leaves, treedef = jax.tree.flatten(tree)
        shardings = jax.tree.leaves(layout.shardings(layout.param_specs(tree, prefix)))
        kind = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), tuple(shardings))

        def values(key):
            keys = jax.random.split(key, max(len(leaves), 1))
            return [_random(*pair) for pair in zip(keys, leaves, strict=False)]

        if kind not in programs:
            programs[kind] = jax.jit(values, out_shardings=shardings)
        return jax.tree.unflatten(treedef, programs[kind](jax.random.key(seed)))

    return [
        {name: fill(part, name, number) for name, part in tree.items() if name != "layers"}
        | {"layers": [fill(layer, "", 100 + 2 * index + number) for index, layer in enumerate(tree["layers"])]}
        for number, tree in enumerate(trees)
    ]


def _random(key, leaf):
    if len(leaf.shape) == 1:
        return jax.numpy.ones(leaf.shape, leaf.dtype)
    return (jax.random.normal(key, leaf.shape, jax.numpy.bfloat16) * 0.02).astype(leaf.dtype)


def timed(run: Run, steps: int) -> float:
    """Return seconds per step, with the host up to two steps ahead as in the trainer."""
    begun, in_flight = time.perf_counter(), deque()
    for _ in range(steps):
        in_flight.append(run.step())
        if len(in_flight) > _IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())
    jax.block_until_ready(in_flight)
    return (time.perf_counter() - begun) / steps


def measure(case: str, setting: Setting, *, trace: bool):
    """Yield the result, then, with `trace`, the result with the trace's figures."""
    begun = time.perf_counter()
    shape = MeshShape.parse(case.partition(":")[2])
    run = Run(setting, shape)
    if setting.once:
        run.compile()
        start = time.perf_counter() - begun
        loss, _ = jax.block_until_ready(run.step())
        seconds = time.perf_counter() - begun - start
    else:
        loss, _ = jax.block_until_ready(run.step())
        start = time.perf_counter() - begun
        timed(run, 1)
        seconds = timed(run, setting.steps)
    devices = jax.devices()[: shape.devices]
    full, rate = setting.method == "full", run.count / seconds
    flops = training_flops_per_token(run.work.config, visible_keys=run.work.visible_keys, weight_gradients=full)
    peak = peak_flops(devices[0].device_kind)
    row = {
        "case": case,
        **asdict(setting),
        "layers": run.work.config.num_hidden_layers,
        "of_layers": SHAPES[setting.shape]["num_hidden_layers"],
        "remat": format_policies(run.policies),
        "tile": run.work.tile,
        "gpu": devices[0].device_kind,
        "gpus": shape.devices,
        "tokens_per_gpu": setting.tokens * shape.batch_shards // shape.devices,
        "ms": seconds * 1e3,
        "tokens_per_second": rate,
        "mfu": peak and rate * flops / (peak * shape.devices),
        "peak_gib": max(memory(device, "peak_bytes_in_use") for device in devices),
        "start_s": start,
        "first_loss": float(loss),
    }
    yield row
    if trace and not setting.once and devices[0].platform == "gpu":
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(run.step())
            found = collective_overlap(folder)
        yield row | {"collectives_ms": found.collectives, "exposed_ms": found.exposed, "busy_ms": found.busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help=f"one of {', '.join(MODELS)}, a colon, and a mesh such as data=2")
    parser.add_argument("--steps", type=int, help="timed steps; default 6, of the longest models 3")
    parser.add_argument("--layers", type=int, help="most layers")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the family, as for CPUs")
    parser.add_argument("--no-trace", action="store_true")
    args = parser.parse_args()
    take_fitting_blocks(os.environ)
    for row in measure(args.case, chosen(args), trace=not args.no_trace):
        print(json.dumps(row), flush=True)


def chosen(args: argparse.Namespace) -> Setting:
    """Return the setting of the flags."""
    setting = Setting(**MODELS[args.case.partition(":")[0]])
    if args.tiny:
        return setting.tiny()
    layers = SHAPES[setting.shape]["num_hidden_layers"]
    return replace(setting, steps=args.steps or setting.steps, layers=min(args.layers or layers, layers))


if __name__ == "__main__":
    main()
