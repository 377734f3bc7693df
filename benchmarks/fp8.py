"""Time bf16 and FP8 projections in alternation in one process: a layer's forward and backward, and whole steps.

    python benchmarks/fp8.py --json benchmarks/results/fp8.json

Random weights, LoRA of rank 16, one packed row of 64–1,024-token documents. `--profile` prints each one's kernels.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
from kernel_profile import is_copy, kernel_times, profile_rows
from measure import milliseconds, table, write_results
from shapes import SHAPES
from step import memory, parameters, random_batch, workload

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policies

FORMATS = {"bf16": ("none", False), "FP8": ("fp8", False), "FP8 with its head": ("fp8", True)}
"""(storage of the layers' weights, output projection in FP8) by label."""


class Model:
    """Random parameters in one format, and the step that trains their adapters."""

    def __init__(self, label: str, args: argparse.Namespace):
        storage, fp8_head = FORMATS[label]
        work = workload(args.shape, args.layers, args.tokens, "lora", storage)
        config = replace(work.config, fp8_head=fp8_head)
        before = memory(jax.devices()[0], "bytes_in_use")
        graphdefs, self.trainable, self.frozen = jax.block_until_ready(parameters(work))
        self.gib = memory(jax.devices()[0], "bytes_in_use") - before
        self._batch = jax.device_put(random_batch(args.tokens, work.config.vocab_size, work.document_lengths))
        policies = parse_policies(args.remat, len(graphdefs.layers))
        self.executor = Executor(graphdefs, config, policy=policies, dtype=work.dtype)

    def step(self) -> tuple[jax.Array, dict]:
        """Return the loss and the gradients of a step."""
        return self.executor.loss_and_gradients(
            self.trainable, self.frozen, [self._batch], float(self._batch.tokens.size)
        )

    def layer_times(self) -> dict[str, float]:
        """Return the milliseconds of a layer's forward and backward."""
        layer = self.executor.layers[0]
        x, contexts = self.executor.entry_head.embed(self.trainable, self.frozen, self._batch, None)
        inputs = self.trainable["layers"][0], self.frozen["layers"][0], x, contexts[0]
        y, residuals, _ = layer.forward(*inputs)
        forward = milliseconds(lambda: layer.forward(*inputs)[0], repeats=3)
        return {
            "forward": forward,
            "backward": milliseconds(lambda: layer.backward(residuals, *inputs, y, None)[0], repeats=3),
        }

    def profile(self) -> tuple[float, list[dict]]:
        """Return the milliseconds of a step's kernels, and a row for each of the longest."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(self.step())
            kernels = kernel_times(Path(folder))
        return sum(kernel.milliseconds for kernel in kernels if not is_copy(kernel)), profile_rows(kernels, top=40)


def alternate(functions: dict[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return all times of functions that are called in turn, by function and by the name that it gives them."""
    times: dict[str, dict[str, list[float]]] = {name: {} for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            for part, value in function().items():
                times[name].setdefault(part, []).append(value)
    return times


def step_times(model: Model, count: int = 3) -> dict[str, float]:
    """Return the milliseconds of a step in a run of some."""
    jax.block_until_ready(model.step())
    begun = time.perf_counter()
    for _ in range(count):
        result = model.step()
    jax.block_until_ready(result)
    return {"step": (time.perf_counter() - begun) / count * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="by default all")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--remat", default="dots", help="as of scripts/train.py")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models = {label: Model(label, args) for label in args.formats}
    times = alternate({label: model.layer_times for label, model in models.items()}, args.rounds)
    for label, steps in alternate(
        {label: lambda m=m: step_times(m) for label, m in models.items()}, args.rounds
    ).items():
        times[label] |= steps
    rows = []
    for label, model in models.items():
        medians = {part: statistics.median(values) for part, values in times[label].items()}
        loss = float(model.step()[0])
        rows.append({"matmul": label, "weights_gib": model.gib, "loss": loss, **medians})
    if args.profile:
        for row, model in zip(rows, models.values(), strict=True):
            row["kernel_ms"], row["profile"] = model.profile()
            print(f"{row['matmul']}\n{table(row['profile'])}", flush=True)
    print(table([{key: value for key, value in row.items() if key != "profile"} for row in rows]))
    if args.json:
        write_results(args.json, [{**row, "times": times[row["matmul"]], "shape": args.shape} for row in rows])


if __name__ == "__main__":
    main()
