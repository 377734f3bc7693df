"""Time mamba-ssm's Triton kernels, or fla-core's simple_gla, on packed documents; print a line of JSON for each case.

    python benchmarks/peers/state_space.py mamba-ssm '[N, P, G, S]' '{"name": [tokens, [length, …]]}'

Of mamba-ssm the package's own kernels that PyTorch compiles are not needed: its folder need hold `ops/triton` and
`utils` alone. The first call compiles all configurations of a kernel side by side and takes the
fastest, as Triton does one after the other.
"""

import argparse
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
import triton
from timing import compile_together, milliseconds


def load_mamba():
    """Return mamba-ssm's operation, without the modules that its package imports at first."""
    folder = next(Path(path) / "mamba_ssm" for path in sys.path if (Path(path) / "mamba_ssm/ops/triton").is_dir())
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined


def passes(engine: str, heads: list[int], tokens: int, lengths: list[int]) -> tuple:
    """Return the forward pass of a case, and both passes."""
    N, P, G, S = heads
    rest = [tokens - sum(lengths)] if sum(lengths) < tokens else []

    def normal(*shape: int):
        return torch.nn.functional.silu(torch.randn(1, tokens, *shape, device="cuda")).bfloat16().requires_grad_()

    x, b, c = normal(N, P), normal(G, S), normal(G, S)
    step = torch.exp(torch.rand(1, tokens, N, device="cuda") * 4.6 - 6.9).requires_grad_()
    A, D = -1 - 15 * torch.rand(N, device="cuda"), torch.ones(N, device="cuda")
    dout = torch.randn(1, tokens, N, P, device="cuda").bfloat16()
    if engine == "mamba-ssm":
        scan = load_mamba()
        documents = torch.tensor(np.repeat(np.arange(len(lengths + rest)), lengths + rest), device="cuda")
        documents = documents.int()[None]

        def forward():
            return scan(x, step, A, b, c, chunk_size=256, D=D, seq_idx=documents)
    else:
        from fla.ops.simple_gla import chunk_simple_gla

        bounds = torch.tensor(np.cumsum([0, *lengths, *rest]), dtype=torch.int64, device="cuda")

        def forward():
            keys, queries = (y.repeat_interleave(N // G, dim=2) for y in (b, c))
            values = (step[..., None] * x).bfloat16()
            out = chunk_simple_gla(queries, keys, values, g=step * A, scale=1.0, cu_seqlens=bounds)[0]
            return out + (D[:, None] * x).bfloat16()

    def both():
        torch.autograd.grad(forward(), (x, b, c, step), dout)

    return forward, both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("mamba-ssm", "fla-core"))
    parser.add_argument("heads", type=json.loads)
    parser.add_argument("cases", type=json.loads)
    args = parser.parse_args()
    compile_together()
    for name, case in args.cases.items():
        forward, both = passes(args.engine, args.heads, *case)
        with torch.no_grad():
            times = {"forward_ms": milliseconds(forward)}
        print(json.dumps({"case": name, **times}), flush=True)
        times["both_ms"] = milliseconds(both)
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        print(json.dumps({"case": name, **times, **versions}), flush=True)


if __name__ == "__main__":
    main()
