"""Gated short convolutions at the widths of LFM2 and LFM3: times of both passes, beside XLA's and a copy's.

    python benchmarks/short_convolution.py --json benchmarks/results/short_convolution.json

A pass moves arguments and results, each once: 4 rows of the model's width a token forward, 7 backward.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from measure import log_normal_lengths, milliseconds, table, write_results

from jaxglue.ops.recurrence import recur
from jaxglue.ops.segments import PackedSegments, pack_segments
from jaxglue.ops.short_convolution import short_convolution

CASES = {"lfm2": 3, "lfm3": 7}
"""Tokens of a convolution."""
ROWS = {"forward": 4, "backward": 7}
"""Arrays [tokens, C] that a pass reads and writes."""


def measure(taps: int, backend: str, segments: PackedSegments, channels: int) -> dict[str, float]:
    """Return milliseconds of the forward pass, and of the backward pass alone."""
    keys, shape = jax.random.split(jax.random.key(0), 3), segments.segment_ids.shape
    values = jax.random.normal(keys[0], (*shape, 3 * channels), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (channels, 1, taps), jnp.bfloat16)
    dy = jax.random.normal(keys[2], (*shape, channels), jnp.bfloat16)

    def forward(values):
        return recur(short_convolution(weight, backend=backend), segments, values)

    def backward(values, dy):  # the forward pass' result is unused, so it does not run
        return jax.vjp(forward, values)[1](dy)

    return {
        "forward": milliseconds(jax.jit(forward), values),
        "backward": milliseconds(jax.jit(backward), values, dy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--channels", type=int, default=2048)
    parser.add_argument("--backends", nargs="+", default=["triton", "reference"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    segments = pack_segments([log_normal_lengths(args.tokens - 37, 30)], seq_len=args.tokens)
    results = []
    for case, taps in CASES.items():
        for backend in args.backends:
            for name, ms in measure(taps, backend, segments, args.channels).items():
                moved = 2 * ROWS[name] * args.tokens * args.channels
                rate = moved / ms / 1e9
                results.append({"case": case, "by": backend, "pass": name, "ms": round(ms, 4), "TB/s": round(rate, 2)})
                print(results[-1], flush=True)
                if args.json:
                    write_results(args.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
