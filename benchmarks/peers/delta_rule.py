"""Time fla-core's gated delta rule on packed documents; print milliseconds by case as JSON, after each all so far.

    python benchmarks/peers/delta_rule.py '{"name": [tokens, [length, …]]}'

fla-core tries every kernel's configurations at the first call, and nearly all of that time is compilation: processes,
each with a part of them, compile for the first case beforehand, into Triton's cache.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import torch
import triton
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

K, N, H = 16, 32, 128


def keep_configurations(part: int, parts: int) -> None:
    """Let the autotuners of fla-core try every so many-th configuration alone."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    found = {}
    for kernel in (value for module in modules for value in vars(module).values()):
        while hasattr(kernel, "fn"):  # heuristics around an autotuner around a function
            if isinstance(kernel, triton.runtime.Autotuner):
                found[id(kernel)] = kernel
            kernel = kernel.fn
    for tuner in found.values():
        tuner.configs = tuner.configs[part % len(tuner.configs) :: parts]


def compile_all(case: str, parts: int) -> None:
    """Compile all configurations that a case needs."""
    commands = [[sys.executable, __file__, case, f"{part}/{parts}"] for part in range(parts)]
    for process in [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]:
        process.wait()


def milliseconds(function, calls: int = 5, repeats: int = 5) -> float:
    """Return the least mean time of a call."""
    function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return min(times)


def measure(tokens: int, lengths: list[int]) -> dict:
    """Return the times of a case."""
    if sum(lengths) < tokens:
        lengths.append(tokens - sum(lengths))
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int64, device="cuda")

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

    with torch.no_grad():
        times = {"forward_ms": milliseconds(forward)}
    times["both_ms"] = milliseconds(both)
    return times | {"torch": torch.__version__, "triton": triton.__version__, "fla-core": version("fla-core")}


def main() -> None:
    results, cases = {}, json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        keep_configurations(*map(int, sys.argv[2].split("/")))
    else:
        compile_all(json.dumps(dict(list(cases.items())[:1])), max((os.cpu_count() or 1) - 2, 1))
    for name, case in cases.items():
        results[name] = measure(*case)
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
