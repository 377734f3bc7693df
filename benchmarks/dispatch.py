"""Time what the host does to dispatch prompts' rows and windows of answers, with CUDA graphs and without.

    python benchmarks/dispatch.py --shape qwen3-8b --json benchmarks/results/dispatch_h200.json
    python benchmarks/dispatch.py --shape tiny --rows 128 --streams 4      # on a CPU

XLA makes a CUDA graph of a program's kernels. A layer's program is called with other arrays for each layer, whose
addresses XLA writes into the graph's nodes each time. "dispatch ms": until the host has dispatched all layers, while
the device does nothing else; "whole ms": until they are done.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from generation import draw_requests
from measure import table, write_results
from shapes import SHAPES

from jaxglue.generation import programs
from jaxglue.generation.engine import DecodeBatch, Engine
from jaxglue.generation.inputs import ProgramKind, PromptInputs
from jaxglue.generation.pages import CachePlan, make_caches, pages_of
from jaxglue.generation.programs import EnginePrograms
from jaxglue.generation.scheduler import Prefill
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import split_model

VARIANTS = {
    "CUDA graphs": {"xla_gpu_graph_min_graph_size": 5},
    "launches": {"xla_gpu_graph_min_graph_size": 1 << 20},
    "CUDA graphs, traces kept": {"xla_gpu_graph_min_graph_size": 5, "xla_cmd_buffer_trace_cache_size": 1 << 10},
}
"""XLA's options: the least kernels of a graph, 5 by default, and addresses for which a library's kernels are kept."""
ROUNDS = 9


def median(call: Callable[[], tuple[float, float]]) -> dict[str, float]:
    """Return the median times of a call after two that do not count."""
    both = [call() for _ in range(ROUNDS + 2)][2:]
    times = zip(("dispatch ms", "whole ms"), zip(*both, strict=True), strict=True)
    return {name: round(statistics.median(values) * 1e3, 2) for name, values in times}


def time_rows(made: EnginePrograms, plan: CachePlan, trees: tuple, sizes: list[int], dtype) -> Iterator[dict]:
    """Yield the times of rows of prompts of about 256 tokens."""
    inputs, caches = PromptInputs(plan, made.windows, 0), make_caches(plan, made.cached, dtype, dtype, None, made.rows)
    for size in sizes:
        length, pages = min(size, 256), pages_of(min(size, 256))
        prompts = [
            Prefill(np.zeros(length, np.int32), slot, list(range(slot * pages + 1, (slot + 1) * pages + 1)))
            for slot in range(size // length)
        ]
        row = inputs.row(prompts)

        def once(row=row) -> tuple[float, float]:
            nonlocal caches
            begun = time.perf_counter()
            caches, _, passed = made.prefill(trees, *row, caches)
            dispatched = time.perf_counter() - begun
            jax.block_until_ready((caches, passed))
            return dispatched, time.perf_counter() - begun

        yield {"what": f"row of {size} tokens"} | median(once)


def time_windows(engine: Engine, trees: tuple, streams: int, vocabulary: int) -> dict:
    """Return the times of windows of some answers, one after the other; "whole ms" is from one's end to the next's."""
    requests = draw_requests(streams, 256, [256] * streams, vocabulary, 1.0)
    plan = engine.plan(requests)
    batch, spent = engine.open(*trees, plan, ProgramKind.of(requests, ()), whole=True), list[float]()
    run = vars(DecodeBatch)["_dispatch"]

    def timed(self: DecodeBatch, work: object) -> object:
        begun = time.perf_counter()
        window = run(self, work)
        spent.append(time.perf_counter() - begun)
        return window

    def once() -> tuple[float, float]:
        begun = time.perf_counter()
        list(batch.advance())
        return spent[-1], time.perf_counter() - begun

    with patch.object(DecodeBatch, "_dispatch", timed):
        batch.add([answer for number, each in enumerate(requests) for answer in engine.answers(each, number)], ())
        list(batch.advance())
        row = median(once)
    batch.close()
    return {"what": f"window of {streams} answers"} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="*", default=[128, 256, 512, 1024, 4096], help="tokens of rows")
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256], help="answers of windows")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    config, dtype = config_from_hf(SHAPES[args.shape]), jnp.bfloat16 if on_gpu else jnp.float32
    graphdefs, *trees = split_model(random_model(config, dtype=dtype), nnx.LoRAParam)
    rows: list[dict] = []
    for name in args.variants:
        options = VARIANTS[name] if on_gpu else {}
        with (
            patch.dict(programs.LAYER_OPTIONS, options),
            patch.dict(programs.ONE_OPTIONS, options),
            patch.dict(programs.SEVERAL_OPTIONS, options),
        ):
            engine = Engine(graphdefs, config, dtype=dtype)
            made = EnginePrograms(graphdefs, config, dtype, "auto", [True] * len(graphdefs.layers))
        plan = engine.plan_lengths([(256, 512)] * 64, free=16e9)
        found = [*time_rows(made, plan, tuple(trees), args.rows, dtype)]
        found += [time_windows(engine, tuple(trees), streams, config.vocab_size) for streams in args.streams]
        rows += [{"by": name} | row for row in found]
        for row in found:
            print({"by": name} | row, flush=True)
        if args.json:
            write_results(args.json, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
