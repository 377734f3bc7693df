"""Time fla-core's gated delta rule on packed documents; print milliseconds by case as JSON, after each all so far.

    python benchmarks/peers/delta_rule.py '{"name": [tokens, [length, …]]}' --seconds 120

fla-core tries every kernel's configurations at the first call, and nearly all of that time is compilation: processes,
each with a part of them, compile for the first case beforehand, into Triton's cache, and run none. After so many
seconds they end, and only configurations that have been compiled are tried; `tried` tells how many of all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import triton
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from timing import milliseconds
from triton.runtime import Autotuner, OutOfResources
from triton.runtime.errors import PTXASError

K, N, H = 16, 32, 128
PROCESSES = 14
"""Most that compile at a time; each holds about 2 GB of the GPU's memory."""


def autotuners() -> dict[str, Autotuner]:
    """Return fla-core's autotuners by the names of their kernels."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    found = {}
    for kernel in (value for module in modules for value in vars(module).values()):
        while hasattr(kernel, "fn"):  # heuristics around an autotuner around a function
            if isinstance(kernel, Autotuner):
                found[f"{kernel.base_fn.__module__}.{kernel.base_fn.__name__}"] = kernel
            kernel = kernel.fn
    return found


def compile_part(case: tuple[int, list[int]], part: int, parts: int) -> None:
    """Compile every so many-th configuration for a case, printing the kernel and index of each when it is done."""
    numbered, count = {}, 0
    for name, tuner in sorted(autotuners().items()):
        numbered[id(tuner)] = name, count
        count += len(tuner.configs)

    def compile_only(tuner, *args, warmup=False, **options):
        name, first = numbered[id(tuner)]
        for index, config in enumerate(tuner.configs):
            if (first + index) % parts == part:
                with suppress(OutOfResources, PTXASError):
                    tuner.fn.warmup(*args, **options, **config.all_kwargs())
                    print(json.dumps([name, index]), flush=True)

    Autotuner.run = compile_only
    _, both = passes(*case)
    both()


def compile_all(case: str, seconds: float) -> dict[str, set[int]]:
    """Compile in several processes, for so many seconds; return the compiled configurations' indices by kernel."""
    parts, end = max(min((os.cpu_count() or 1) - 2, PROCESSES), 1), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for part in range(parts):
            command = [sys.executable, __file__, case, "--part", f"{part}/{parts}"]
            with (Path(folder) / str(part)).open("w") as out:
                processes.append(subprocess.Popen(command, stdout=out, stderr=out))
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
            process.kill()
            process.wait()
        texts = [path.read_text() for path in Path(folder).iterdir()]
    compiled: dict[str, set[int]] = {}
    for line in "".join(texts).splitlines():
        with suppress(ValueError, TypeError):  # others are warnings, and the last one may be cut
            name, index = json.loads(line)
            compiled.setdefault(name, set()).add(index)
    if not compiled:
        raise RuntimeError(f"no configuration was compiled in {seconds:.0f} s: {texts[0][-800:]}")
    return compiled


def keep_compiled(compiled: dict[str, set[int]]) -> str:
    """Let the autotuners try compiled configurations alone, others their first; return how many of all in words."""
    kept = total = 0
    for name, tuner in autotuners().items():
        indices = compiled.get(name, {0})
        if name in compiled:
            total += len(tuner.configs)
            kept += len(indices)
        tuner.configs = [config for index, config in enumerate(tuner.configs) if index in indices]
    return f"{kept} of {total} configurations of {len(compiled)} kernels"


def passes(tokens: int, lengths: list[int]) -> tuple:
    """Return the forward pass of a case, and both passes."""
    rest = [tokens - sum(lengths)] if sum(lengths) < tokens else []
    bounds = torch.tensor(np.cumsum([0, *lengths, *rest]), dtype=torch.int64, device="cuda")

    def normal(heads: int):
        x = torch.nn.functional.silu(torch.randn(1, tokens, heads, H, device="cuda"))
        return x.bfloat16().requires_grad_()

    q, k, v = normal(K), normal(K), normal(N)
    g = (-torch.exp(torch.rand(1, tokens, N, device="cuda") * 6.5 - 6)).requires_grad_()
    beta = torch.rand(1, tokens, N, device="cuda").bfloat16().requires_grad_()
    dout = torch.randn(1, tokens, N, H, device="cuda").bfloat16()

    def forward():
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)[0]

    def both():
        torch.autograd.grad(forward(), (q, k, v, g, beta), dout)

    return forward, both


def measure(tokens: int, lengths: list[int]) -> dict:
    """Return the times of a case."""
    forward, both = passes(tokens, lengths)
    with torch.no_grad():
        times = {"forward_ms": milliseconds(forward)}
    times["both_ms"] = milliseconds(both)
    return times | {"torch": torch.__version__, "triton": triton.__version__, "fla-core": version("fla-core")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases")
    parser.add_argument("--seconds", type=float, default=240, help="that compilation may take")
    parser.add_argument("--part", help="compile the first case's configurations of a part, such as 3/14, alone")
    args = parser.parse_args()
    results, cases = {}, json.loads(args.cases)
    first = next(iter(cases.values()))
    if args.part:
        return compile_part(first, *map(int, args.part.split("/")))
    tried = {"tried": keep_compiled(compile_all(json.dumps({"first": first}), args.seconds))}
    for name, case in cases.items():
        results[name] = measure(*case) | tried
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
