"""Time transformers' experts of one layer: the loop over experts that models come with, and grouped matmuls, as JSON.

    python benchmarks/peers/moe_routing.py --tokens 8192 16384

Frozen experts of Qwen3-30B-A3B's shape in bf16, forward, and forward with the gradient to the tokens, as `ours` of
benchmarks/moe_routing.py. In the loop each expert finds its tokens by `torch.where` of a mask, whose size the host
waits for; both ways give the same outputs, whose relative difference is in each row.
"""

import argparse
import json
import time

import engines

SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "tiny": (64, 32, 8, 2)}
"""Hidden size, width of an expert, experts, experts of a token."""
WAYS = "eager", "grouped_mm"


def milliseconds(function, repeats: int) -> float:
    """Return the median time of a call, the host's waiting included."""
    import torch

    cuda = torch.cuda.is_available()
    times = []
    for _ in range(repeats + 2):
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return sorted(times[2:])[repeats // 2]


def make_config(shape: str, way: str):
    """Return the configuration of a layer's experts."""
    from transformers import AutoConfig

    hidden, width, count, per_token = SHAPES[shape]
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width}
    sizes |= {"num_experts": count, "num_experts_per_tok": per_token}
    return AutoConfig.for_model("qwen3_moe", **sizes, experts_implementation=way)


def make_experts(shape: str):
    """Return a layer's frozen experts with random weights."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    cuda = torch.cuda.is_available()
    with torch.device("cuda" if cuda else "cpu"):
        experts = Qwen3MoeExperts(make_config(shape, WAYS[0])).to(torch.bfloat16 if cuda else torch.float32)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts.requires_grad_(False)


def measure(shape: str, tokens: int, repeats: int) -> list[dict]:
    """Return a row for each way."""
    import torch

    experts = make_experts(shape)
    weight = experts.down_proj
    hidden, _, count, per_token = SHAPES[shape]
    x = torch.randn(tokens, hidden, dtype=weight.dtype, device=weight.device, requires_grad=True)
    scores = torch.randn(tokens, count, device=weight.device).softmax(-1)
    weights, chosen = scores.topk(per_token, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(weight.dtype)
    dout = torch.randn_like(x)
    rows, first = [], None
    for way in WAYS:
        experts.config = make_config(shape, way)
        out = experts(x, chosen, weights).detach()
        first = out if first is None else first
        forward = milliseconds(lambda: experts(x, chosen, weights), repeats)
        both = milliseconds(lambda: torch.autograd.grad(experts(x, chosen, weights), x, dout), repeats)
        apart = ((out - first).float().norm() / first.float().norm()).item()
        row = {"way": f"transformers, {way}", "shape": shape, "tokens": tokens, "forward ms": round(forward, 3)}
        rows.append(row | {"forward + dx ms": round(both, 3), "apart": f"{apart:.1e}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    for tokens in args.tokens:
        for row in measure(args.shape, tokens, args.repeats):
            print(json.dumps(row | {"gpu": gpu, "versions": engines.versions()}), flush=True)


if __name__ == "__main__":
    main()
