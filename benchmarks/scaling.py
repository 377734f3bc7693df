"""Training steps on 1, 2, 4, … GPUs of one host: tokens/s, efficiency, and the time that collectives cost.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Every case runs in a process of its own, so that its peak is its own; cases run side by side where the GPUs suffice for
both. A step is loss, gradients and AdamW, of one packed row of 16,384 tokens for each GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

SHAPES = {  # model, layers, method, remat, quantise
    "8b-lora": {"shape": "qwen3-8b", "remat": "dots"},
    "8b-full": {"shape": "qwen3-8b", "method": "full", "remat": "dots"},
    "32b-lora": {"shape": "qwen3-32b", "remat": "48 x full + 16 x dots"},
    "32b-nf4": {"shape": "qwen3-32b", "remat": "48 x full + 16 x dots", "quantise": "nf4"},
    "30b-a3b-lora": {"shape": "qwen3-30b-a3b", "remat": "full"},
    "tiny": {"shape": "tiny", "tokens": 512, "remat": "dots"},
    "tiny-full": {"shape": "tiny", "tokens": 512, "method": "full", "remat": "full"},
}
CASES = (
    "8b-lora:data=1",
    "8b-lora:data=2",
    "32b-nf4:data=1",
    "8b-lora:data=4",
    "8b-full:fsdp=4",
    "32b-lora:fsdp=4",
    "30b-a3b-lora:expert=2",
    "30b-a3b-lora:expert=4",
    "8b-lora:data=8",
    "8b-full:fsdp=8",
    "30b-a3b-lora:data=2,expert=4",
)
"""Shape and mesh, in order of importance; those that need more GPUs than there are are left out."""
COLUMNS = ("case", "gpus", "tokens/s", "efficiency", "ms", "MFU", "collectives ms", "exposed ms", "peak GiB", "start s")


def gpus_of(case: str) -> int:
    """GPUs in a case's mesh."""
    count = 1
    for axis in case.partition(":")[2].split(","):
        count *= int(axis.partition("=")[2])
    return count


def measure(case: str, steps: int) -> dict:
    """Runs one case on the GPUs that this process sees."""
    import jax
    import numpy as np
    from measure import uniform_lengths
    from step import LENGTHS_SEED, workload

    from jaxglue.data.batch import Batch
    from jaxglue.flops import training_flops_per_token
    from jaxglue.memory.executor import Executor
    from jaxglue.memory.policy import parse_policies
    from jaxglue.memory.trace import collective_overlap
    from jaxglue.memory.workload import abstract_parts
    from jaxglue.peaks import peak_flops
    from jaxglue.segments import pack_segments
    from jaxglue.sharding.layout import Layout
    from jaxglue.sharding.mesh import MeshShape, make_mesh, place_batch
    from jaxglue.training.optimizer import Optimizer, OptimizerConfig

    begun = time.perf_counter()
    name, _, mesh_text = case.partition(":")
    options = SHAPES[name]
    tokens, method = options.get("tokens", 16384), options.get("method", "lora")
    work = workload(options["shape"], options.get("layers"), tokens, method, options.get("quantise", "none"))
    shape = MeshShape.parse(mesh_text)
    mesh = make_mesh(shape, jax.devices()[: shape.devices]) if shape.devices > 1 else None
    layout = Layout(mesh, work.dtype)

    def rows() -> Batch:
        rng, size = np.random.default_rng(0), (shape.rows, tokens)
        lengths = [uniform_lengths(tokens, seed=LENGTHS_SEED + row) for row in range(shape.rows)]
        ids, targets = (rng.integers(0, work.config.vocab_size, size, dtype=np.int32) for _ in range(2))
        segments = pack_segments(lengths, seq_len=tokens)
        return Batch(tokens=ids, targets=targets, loss_weights=np.ones(size, np.float32), segments=segments)

    structure, *trees = abstract_parts(work)
    trainable, frozen = random_trees(trees, layout, work) if mesh else step_parameters(work)
    executor = Executor(
        structure,
        work.config,
        policy=parse_policies(options["remat"], work.config.num_hidden_layers),
        dtype=work.dtype,
        mesh=mesh,
    )
    optimizer = Optimizer(OptimizerConfig(), 1000, layout)
    state = optimizer.init(trainable)
    batch, count = place_batch(rows(), mesh), shape.rows * tokens

    def step(number: int):
        nonlocal trainable, state
        loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(count))
        trainable, state, values = optimizer.update(trainable, state, gradients, number)
        return loss, values

    jax.block_until_ready(step(0))
    first = time.perf_counter() - begun
    for number in (1, 2):
        jax.block_until_ready(step(number))
    begun, in_flight = time.perf_counter(), deque()
    for number in range(3, 3 + steps):
        in_flight.append(step(number))
        if len(in_flight) > 2:
            jax.block_until_ready(in_flight.popleft())
    loss, values = jax.block_until_ready(in_flight[-1])
    seconds = (time.perf_counter() - begun) / steps
    devices = jax.devices()[: shape.devices]
    flops = training_flops_per_token(work.config, visible_keys=work.visible_keys, weight_gradients=method == "full")
    peak = peak_flops(devices[0].device_kind)
    row = {
        "case": case,
        "gpus": shape.devices,
        "remat": options["remat"],
        "tokens_per_gpu": tokens,
        "ms": seconds * 1e3,
        "tokens_per_second": count / seconds,
        "mfu": peak and count / seconds * flops / (peak * shape.devices),
        "peak_gib": max((device.memory_stats() or {"peak_bytes_in_use": 0})["peak_bytes_in_use"] for device in devices)
        / 2**30,
        "start_s": first,
        "loss": float(loss),
        "grad_norm": float(values["grad_norm"]),
        "gpu": devices[0].device_kind,
    }
    print(json.dumps(row), flush=True)  # what there is, should the trace fail
    if devices[0].platform == "gpu":
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(step(100))
            found = collective_overlap(folder)
        row |= {"collectives_ms": found.collectives, "exposed_ms": found.exposed, "busy_ms": found.busy}
    return row


def step_parameters(work):
    """Whole, on one GPU."""
    from step import parameters

    return parameters(work, "device")[1:]


def random_trees(trees, layout, work):
    """Random parameters, each made in its places on the mesh; no device ever holds them all."""
    import jax
    import jax.numpy as jnp

    made: dict = {}

    def fill(tree, prefix: str, seed: int):
        leaves, treedef = jax.tree.flatten(tree)
        shardings = jax.tree.leaves(layout.shardings(layout.stored(tree, prefix)))
        kind = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), tuple(shardings))

        def values(key):
            keys = jax.random.split(key, max(len(leaves), 1))
            return [one(k, leaf) for k, leaf in zip(keys, leaves, strict=False)]

        if kind not in made:
            made[kind] = jax.jit(values, out_shardings=shardings)
        return jax.tree.unflatten(treedef, made[kind](jax.random.key(seed)))

    def one(key, leaf):
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        return (jax.random.normal(key, leaf.shape, work.dtype) * 0.02).astype(leaf.dtype)

    out = []
    for number, tree in enumerate(trees):
        parts = {name: fill(part, name, number) for name, part in tree.items() if name != "layers"}
        layers = [fill(layer, "", 100 + 2 * index + number) for index, layer in enumerate(tree["layers"])]
        out.append({**parts, "layers": layers})
    return out


def run_all(cases: list[str], gpus: list[str], args: argparse.Namespace) -> list[dict]:
    """Runs the cases, the first that fit the free GPUs first, each for `--limit` seconds at most."""
    waiting, running, results, free = list(cases), [], [], list(gpus)
    while waiting or running:
        for case in [case for case in waiting if gpus_of(case) <= len(free)]:
            if gpus_of(case) > len(free):
                break
            own, free = free[: gpus_of(case)], free[gpus_of(case) :]
            waiting.remove(case)
            running.append((case, own, start(case, own, args), time.monotonic()))
        for entry in list(running):
            case, own, process, begun = entry
            if process.poll() is None and time.monotonic() - begun > args.limit:
                process.kill()
            if process.poll() is not None:
                running.remove(entry)
                free += own
                results.append(read(case, process))
                print(json.dumps(results[-1]), flush=True)
                if args.json:
                    save(args.json, results)
        time.sleep(0.2)
    return results


def start(case: str, own: list[str], args: argparse.Namespace) -> subprocess.Popen:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)} if own[0] else dict(os.environ)
    # NCCL's buffers are outside of what JAX preallocates.
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.9" if len(own) == 1 else "0.85"
    command = [sys.executable, __file__, "--one", case, "--steps", str(args.steps)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=os.dup(out.fileno()), stderr=os.dup(errors.fileno())
        )
        process.out, process.errors = os.fdopen(os.dup(out.fileno()), "r"), os.fdopen(os.dup(errors.fileno()), "r")
    return process


def read(case: str, process: subprocess.Popen) -> dict:
    """The last line of JSON that a case printed, or what went wrong."""
    texts = []
    for file in (process.out, process.errors):
        file.seek(0)
        texts.append(file.read().strip())
    lines = [line for line in texts[0].splitlines() if line.startswith("{")]
    row = json.loads(lines[-1]) if lines else {"case": case, "gpus": gpus_of(case)}
    if process.returncode:
        row["error"] = f"exit {process.returncode}: {texts[1][-600:]}"
    return row


def with_efficiency(results: list[dict]) -> list[dict]:
    """Tokens/s of a GPU against those of the smallest mesh of the same shape."""
    best: dict[str, dict] = {}
    for row in sorted((row for row in results if "ms" in row), key=lambda row: row["gpus"]):
        first = best.setdefault(row["case"].partition(":")[0], row)
        rate, base = (r["tokens_per_second"] / r["gpus"] for r in (row, first))
        row["efficiency"] = rate / base if row is not first else None
    return results


def save(path: Path, results: list[dict]) -> None:
    from measure import write_results

    write_results(path, with_efficiency(results), gpu=next((row["gpu"] for row in results if "gpu" in row), "unknown"))


def line(row: dict) -> str:
    if "ms" not in row:
        return f"| {row['case']} | {row['gpus']} | {row['error'].splitlines()[-1][:100]} |" + " |" * (len(COLUMNS) - 3)
    share = "–" if row.get("efficiency") is None else f"{row['efficiency']:.1%}"
    exposed = [f"{row[name]:.0f}" if name in row else "–" for name in ("collectives_ms", "exposed_ms")]
    mfu = "–" if row["mfu"] is None else f"{row['mfu']:.1%}"
    values = [row["case"], str(row["gpus"]), f"{row['tokens_per_second']:,.0f}", share, f"{row['ms']:.1f}", mfu]
    return f"| {' | '.join([*values, *exposed, f'{row["peak_gib"]:.1f}', f'{row["start_s"]:.0f}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help=f"by default those of: {' '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case")
    parser.add_argument("--gpus", type=int, help="by default all that nvidia-smi lists")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.steps)))
        return
    gpus = visible_gpus() or [""] * (args.gpus or 1)
    gpus = gpus[: args.gpus]
    cases = args.cases or [case for case in CASES if gpus_of(case) <= len(gpus)]
    results = with_efficiency(run_all(cases, gpus, args))
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in results:
        print(line(row))


def visible_gpus() -> list[str]:
    """Numbers of the GPUs, asked of nvidia-smi: this process must not take their memory."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen:
        return chosen.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number, _ in enumerate(listed.splitlines())]


if __name__ == "__main__":
    main()
