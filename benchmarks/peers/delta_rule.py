"""Time fla-core's gated delta rule on packed documents; print milliseconds by case as JSON, after each all so far.

python benchmarks/peers/delta_rule.py '{"name": [tokens, [length, …]]}'
"""

import json
import sys

import numpy as np
import torch
import triton
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

K, N, H = 16, 32, 128


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
    return times | {"torch": torch.__version__, "triton": triton.__version__}


def main() -> None:
    results = {}
    for name, case in json.loads(sys.argv[1]).items():
        results[name] = measure(*case)
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
