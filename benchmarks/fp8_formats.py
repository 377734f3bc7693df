"""Compare number formats of FP8 products by their error: scales by token or by block of 128, e4m3 or e5m2 gradients.

    python benchmarks/fp8_formats.py --json benchmarks/results/fp8_formats.json

Random data with and without outliers; errors are relative to float32, in the Frobenius norm. Runs on a CPU.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from measure import table, write_results

LARGEST = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}
FORMATS = {
    "e4m3 by token": (jnp.float8_e4m3fn, None),
    "e4m3 by 1 × 128": (jnp.float8_e4m3fn, 128),
    "e5m2 by token": (jnp.float8_e5m2, None),
}
TOKENS, IN, OUT = 256, 2048, 1024


def rounded(x, dtype=jnp.float8_e4m3fn, block: int | None = None):
    """Round values to a format, with a scale for each row or each block of a row."""
    parts = x.reshape(len(x), -1, block or x.shape[1])
    scales = jnp.abs(parts).max(axis=-1, keepdims=True) / LARGEST[dtype]
    codes = jnp.clip(parts / jnp.where(scales > 0, scales, 1), -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    return (codes.astype(jnp.float32) * scales).reshape(x.shape)


def channels(x, factor: float, count: int = 4):
    """Return x with a few columns many times as large."""
    return x.at[:, :count].multiply(factor)


def one_value(x, factor: float):
    """Return x with one value of each row many times as large, as in tokens of massive activations."""
    return x.at[jnp.arange(len(x)), jnp.arange(len(x)) * 7 % x.shape[1]].multiply(factor)


def heavy_tails(x):
    """Return x with log-normal magnitudes, as gradients have."""
    return x * jnp.exp(2 * jax.random.normal(jax.random.key(9), x.shape))


DATA = {
    "Gaussian": lambda x: x,
    "4 channels × 50": partial(channels, factor=50.0),
    "4 channels × 1,000": partial(channels, factor=1000.0),
    "one value of a token × 10,000": partial(one_value, factor=1e4),
    "heavy tails": heavy_tails,
}


def errors(change) -> dict[str, str]:
    """Return the errors of outputs, and of gradients to the input and to the weight, by format."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (change(jax.random.normal(key, (TOKENS, size))) for key, size in zip(keys, (IN, OUT), strict=False))
    weight = jax.random.normal(keys[2], (OUT, IN)) * 0.02
    quantized = rounded(weight)
    scales = jnp.abs(weight).max(axis=1) / LARGEST[jnp.float8_e4m3fn]
    row = {}
    for name, (dtype, block) in FORMATS.items():
        if dtype == jnp.float8_e4m3fn:
            row[f"y, {name}"] = error(rounded(x, dtype, block) @ quantized.T, x @ weight.T)
        # The weight's scales are folded into dy before it is rounded, as one copy of the weight serves both directions.
        row[f"dx, {name}"] = error(rounded(dy * scales, dtype, block) @ (quantized / scales[:, None]), dy @ weight)
        # A sum over tokens leaves scales of channels alone, for each of which values are rounded anew.
        if block is None:
            row[f"dw, {name.replace('token', 'channel')}"] = error(rounded(dy.T, dtype) @ rounded(x.T).T, dy.T @ x)
    return row


def error(got, expected) -> str:
    return f"{float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with jax.default_matmul_precision("highest"):
        rows = [{"data": name, **errors(change)} for name, change in DATA.items()]
    print(table(rows))
    if args.json:
        write_results(args.json, rows)


if __name__ == "__main__":
    main()
