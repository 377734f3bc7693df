"""Time a small model's step by the number of layers dispatched as one program, in alternation in one process.

    python benchmarks/layer_groups.py --sizes 14 1 28 4 --json benchmarks/results/layer_groups.json

A step is forward, backward and AdamW of LoRA (rank 16, all linear layers) on one row of documents of 64–1,024 tokens,
nothing recomputed. Dispatch is the host's time for a step while the GPU is idle. Results are written after every round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from kernel_profile import is_copy, kernel_times, profile_rows
from measure import table, write_results
from shapes import SHAPES
from step import parameters, random_batch, workload

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.models.parameters import Params
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig
from jaxglue.training.step import StepProgram


class Variant:
    """A model's step with some layers in a program, and its times in ms.

    Args:
        size: layers in a program.
        work, parts, batch: the model's workload and parameters, and a batch on the host.
        whole: update in the program of all layers, as a run does.
    """

    def __init__(self, size: int, work, parts, batch, *, whole: bool = False):
        graphdefs, trainable, self._frozen = parts
        self.size, self._batch, self._count = size, batch, 0
        self._executor = Executor(graphdefs, work.config, policy=parse_policy("none"), layers_per_program=size)
        config = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_ratio=0.0, clip_norm=0.0)
        self._optimizer = AdamWOptimizer(config, 10_000)
        self._trainable = jax.tree.map(jnp.copy, trainable)
        self._state = self._optimizer.init(self._trainable)
        self._spent: Params | None = None
        self._program = StepProgram(self._executor, self._optimizer) if whole else None
        self.steps: list[float] = []
        self.dispatches: list[float] = []
        begun = time.perf_counter()
        self.first_loss = float(self.step())
        self.first_s = time.perf_counter() - begun

    def step(self) -> jax.Array:
        """Dispatch a step and return its loss."""
        total = float(self._batch.tokens.size)
        if self._program:
            arguments = self._frozen, self._batch, total, None, self._count
            self._trainable, self._state, values = self._program(self._trainable, self._state, *arguments)
            loss = values["loss"]
        else:
            arguments = self._trainable, self._frozen, [jax.device_put(self._batch)], total
            loss, gradients = self._executor.loss_and_gradients(*arguments, into=self._spent)
            self._spent = gradients if self._executor.reuses_gradients else None
            updated = self._optimizer.update(self._trainable, self._state, gradients, self._count)
            self._trainable, self._state, _ = updated
        self._count += 1
        return loss

    def wait(self) -> None:
        """Wait until all steps are done."""
        jax.block_until_ready(self._trainable)

    def measure(self, steps: int) -> None:
        """Add a round: one step's dispatch, then the mean of `steps` of which the host is at most two ahead."""
        self.step()
        self.wait()
        begun = time.perf_counter()
        self.step()
        self.dispatches.append((time.perf_counter() - begun) * 1e3)
        self.wait()
        begun, pending = time.perf_counter(), None
        for _ in range(steps):
            loss = self.step()
            jax.block_until_ready(pending)
            pending = loss
        self.wait()
        self.steps.append((time.perf_counter() - begun) * 1e3 / steps)

    def profile(self) -> dict:
        """Return kernels, their sum in ms, and their table, of one step."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.step()
                self.wait()
            kernels = [kernel for kernel in kernel_times(Path(folder)) if not is_copy(kernel)]
        launches, spent = sum(kernel.launches for kernel in kernels), sum(kernel.milliseconds for kernel in kernels)
        return {"kernels": launches, "kernel_ms": round(spent, 2), "profile": profile_rows(kernels, top=60)}

    def row(self) -> dict:
        """Return the table's row."""
        return {
            "layers in a program": f"{self.size} and the update" if self._program else self.size,
            "ms a step": round(statistics.median(self.steps), 2),
            "rounds": [round(each, 1) for each in self.steps],
            "dispatch ms": round(statistics.median(self.dispatches), 1),
            "first step s": round(self.first_s, 1),
            "first loss": self.first_loss,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sizes", type=int, nargs="+", default=[14, 1, 28, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work = workload(args.shape, None, args.tokens, "lora")
    parts, batch = parameters(work), random_batch(args.tokens, work.config.vocab_size, work.document_lengths)
    variants, profile = [], {}
    for size in args.sizes:
        for whole in [True, False] if size >= work.config.num_hidden_layers else [False]:
            variants.append(Variant(size, work, parts, batch, whole=whole))
            print(f"{size} layers in a program: first step {variants[-1].first_s:.1f} s", flush=True)
    for number in range(args.rounds):
        for variant in variants:
            variant.measure(args.steps)
        print(table([variant.row() for variant in variants]), flush=True)
        if number == 0 and jax.default_backend() != "cpu":
            profile = variants[0].profile()
            print(f"{profile['kernels']} kernels, {profile['kernel_ms']} ms", flush=True)
        if args.json:
            write_results(args.json, {"shape": args.shape, "rows": [each.row() for each in variants]} | profile)


if __name__ == "__main__":
    main()
