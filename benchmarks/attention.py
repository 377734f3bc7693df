"""Time every attention backend over models, numbers of tokens and distributions of document lengths.

python benchmarks/attention.py --json benchmarks/results/attention.json

The limit is useful work at the speed of a large bfloat16 matmul: 2·(H + V) FLOPs for each visible pair of query and key
and each query head forward, 2·(3·H + 2·V) backward, for keys of H and values of V. Kernels that no GPU has run are
tried, too. Those of latent attention, beside heads of 128:

python benchmarks/attention.py --models "heads of 128" DeepSeek-V2-Lite --tokens 16384 --backends hopper triton
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from measure import log_normal_lengths, milliseconds, table, uniform_lengths, write_results

from jaxglue.ops.attention import packed_attention
from jaxglue.ops.backend import UNTRIED
from jaxglue.ops.segments import pack_segments

LIMIT = 790e12  # FLOP/s of a large bfloat16 matmul on an H200


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention of one layer of a model."""

    N: int
    K: int
    H: int
    window: int | None = None
    sinks: bool = False
    values: int | None = None
    """Head dim of values; None for H."""

    @property
    def value_dim(self) -> int:
        """Return the head dim of values."""
        return self.H if self.values is None else self.values

    @property
    def columns(self) -> tuple[int, int]:
        """Return the columns of the matmuls of the forward pass, and of both."""
        forward = self.H + self.value_dim
        return forward, forward + 3 * self.H + 2 * self.value_dim


MODELS = {
    "Llama-3.1-8B": Heads(N=32, K=8, H=128),
    "Qwen3-0.6B": Heads(N=16, K=8, H=128),
    "Qwen3-14B": Heads(N=40, K=8, H=128),
    "Llama-3.2-1B": Heads(N=32, K=8, H=64),
    "window 128": Heads(N=32, K=8, H=128, window=128),
    "GPT-OSS, window 128": Heads(N=64, K=8, H=64, window=128, sinks=True),
    "GPT-OSS, full": Heads(N=64, K=8, H=64, sinks=True),
    "heads of 128": Heads(N=16, K=16, H=128),
    "DeepSeek-V2-Lite": Heads(N=16, K=16, H=192, values=128),
}

COLUMNS = ("forward ms", "forward + backward ms", "of the limit, forward", "of the limit, both")


def distributions(tokens: int) -> dict[str, list[int]]:
    """Return document lengths that add up to `tokens`, by name."""
    return {
        "log-normal": log_normal_lengths(tokens, max(2, round(26 * tokens / 16_384))),
        "uniform 64-1024": uniform_lengths(tokens),
        "16 equal": [tokens // 16] * 16,
        "4 equal": [tokens // 4] * 4,
        "2 equal": [tokens // 2] * 2,
        "one": [tokens],
    }


def visible_pairs(lengths: list[int], window: int | None) -> int:
    """Count the visible pairs of query and key."""
    longest = max(lengths)
    visible = np.cumsum(np.minimum(np.arange(1, longest + 1), window or longest))
    return int(sum(visible[length - 1] for length in lengths))


def random_inputs(heads: Heads, tokens: int):
    """Return (q, k, v), sinks and dout."""
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = (heads.N, heads.H), (heads.K, heads.H), (heads.K, heads.value_dim), (heads.N, heads.value_dim)
    shapes = [(1, tokens, *size) for size in sizes]
    q, k, v, dout = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys[:4], shapes, strict=True))
    return (q, k, v), jax.random.normal(keys[4], (heads.N,)) if heads.sinks else None, dout


def measure(heads: Heads, lengths: list[int], backend: str) -> tuple[float, float]:
    """Return milliseconds of the forward pass, and of forward and backward."""
    tokens = sum(lengths)
    qkv, sinks, dout = random_inputs(heads, tokens)
    segments = jax.device_put(pack_segments([lengths], seq_len=tokens))

    def attend(qkv, sinks, segments):
        return packed_attention(*qkv, segments, window=heads.window, sinks=sinks, backend=backend)

    def step(qkv, sinks, segments, dout):
        out, pull = jax.vjp(lambda qkv, sinks: attend(qkv, sinks, segments), qkv, sinks)
        return out, pull(dout)

    forward = milliseconds(jax.jit(attend), qkv, sinks, segments)
    return forward, milliseconds(jax.jit(step), qkv, sinks, segments, dout)


def results_of(model: str, tokens: int, lengths_name: str, backend: str) -> dict:
    """Return a row of the table."""
    heads, lengths = MODELS[model], distributions(tokens)[lengths_name]
    row = {"model": model, "tokens": tokens, "documents": f"{lengths_name} ({len(lengths)})", "backend": backend}
    try:
        forward, both = measure(heads, lengths, backend)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return row | dict.fromkeys(COLUMNS, "out of memory")
    except ValueError as error:  # of a backend that does not serve the row
        return row | dict.fromkeys(COLUMNS, str(error))
    pairs = 2 * visible_pairs(lengths, heads.window) * heads.N
    rates = (pairs * columns / time * 1e3 for columns, time in zip(heads.columns, (forward, both), strict=True))
    shares = [rate / LIMIT for rate in rates]
    values = (round(forward, 3), round(both, 3), *(f"{share:.0%}" for share in shares))
    return row | dict(zip(COLUMNS, values, strict=True))


def cases(args: argparse.Namespace):
    """Yield (model, tokens, lengths' name, backend): all lengths for the first model, log-normal ones for the rest."""
    for tokens in args.tokens:
        for model in args.models:
            for name in distributions(tokens) if model == args.models[0] else ["log-normal"]:
                for backend in args.backends:
                    if backend != "reference" or tokens <= args.reference_tokens:
                        yield model, tokens, name, backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="+", default=["triton", "cudnn", "reference"])
    parser.add_argument("--reference-tokens", type=int, default=4096, help="the reference's memory grows with T²")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    UNTRIED.clear()
    results = []
    for case in cases(args):
        results.append(results_of(*case))
        print(*results[-1].values(), sep="  ", flush=True)
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
