"""K-quants against the published algorithm in plain numpy, dequantized by the gguf package."""

import numpy as np
import pytest
from selection import repeats

from jaxglue.ops.quant.k_quants import BLOCK_BYTES, SUPER_BLOCK, quantize_super_blocks

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install '.[gguf]'")

TYPES = {kind: gguf.GGMLQuantizationType[kind.upper()] for kind in BLOCK_BYTES}
f32 = np.float32


def quantize(rows, kind, importance=None):
    """Return rows rounded to a format, by the mean square of each column's input."""
    weights = None if importance is None else np.tile(importance.reshape(-1, SUPER_BLOCK), (len(rows), 1))
    blocks = quantize_super_blocks(rows.reshape(-1, SUPER_BLOCK), kind, weights)
    return gguf.dequantize(np.asarray(blocks).reshape(len(rows), -1), TYPES[kind])


def fit_sub_block(x, weights, levels, first, step, count):
    """Return scale and negated minimum of one sub-block, by the published search."""
    low, high = min(x.min(), f32(0)), x.max()
    if high <= low:
        return f32(0), -low
    scale = (high - low) / f32(levels)
    q = np.clip(np.rint((x - low) / scale), 0, levels)
    least = (weights * (scale * q + low - x) ** 2).sum()
    sum_w, sum_x = weights.sum(), (weights * x).sum()
    for index in range(count):
        inverse = f32(first + step * index + levels) / (high - low)
        q = np.clip(np.rint(inverse * (x - low)), 0, levels).astype(f32)
        sum_q, sum_qq, sum_qx = (weights * q).sum(), (weights * q * q).sum(), (weights * q * x).sum()
        determinant = sum_w * sum_qq - sum_q * sum_q
        if determinant <= 0:
            continue
        new_scale = (sum_w * sum_qx - sum_x * sum_q) / determinant
        new_low = (sum_qq * sum_x - sum_q * sum_qx) / determinant
        if new_low > 0:
            new_low, new_scale = f32(0), sum_qx / sum_qq
        error = (weights * (new_scale * q + new_low - x) ** 2).sum()
        if error < least:
            least, scale, low = error, new_scale, new_low
    return scale, -low


def fit_six_bits(values, weights):
    """Return the scale and the six-bit integers of positive values, by the published coordinate descent."""
    largest = values.max()
    if largest < 1e-15:
        return f32(0), np.zeros(8)

    def rounded(inverse):
        return np.minimum(np.rint(inverse * values), 63)

    def error(inverse):
        return (weights * (values - rounded(inverse) / inverse) ** 2).sum()

    best = min([63 / largest, *((63 + 0.1 * i) / largest for i in range(-4, 5) if i)], key=error)
    q = rounded(best)
    sum_qx, sum_qq = (weights * values * q).sum(), (weights * q * q).sum()
    for _ in range(5):
        for j in range(8):
            rest_qx, rest_qq = sum_qx - weights[j] * values[j] * q[j], sum_qq - weights[j] * q[j] ** 2
            if rest_qx > 0 and rest_qq > 0:
                new = min(np.rint(values[j] * rest_qq / rest_qx), 63)
                new_qx, new_qq = rest_qx + weights[j] * values[j] * new, rest_qq + weights[j] * new**2
                if new != q[j] and new_qx**2 * sum_qq > sum_qx**2 * new_qq:
                    q[j], sum_qx, sum_qq = new, new_qx, new_qq
    return (sum_qx / sum_qq if sum_qq > 0 else f32(0)), q


def with_minimum(x, levels, importance):
    """Return the values of a super-block after quantization with scales and minima."""
    blocks = x.reshape(8, 32)
    if importance is None:
        weights = np.sqrt((blocks**2).mean(axis=1, keepdims=True)) + np.abs(blocks)
        search = (-1.0, 0.1, 21) if levels == 15 else (-0.5, 0.1, 16)
    else:
        weights = importance.reshape(8, 32) * np.sqrt(2 * (x**2).mean() + blocks**2)
        search = (-0.9, 0.05, 37)
    fits = [fit_sub_block(block, w, levels, *search) for block, w in zip(blocks, weights, strict=True)]
    parts = []
    for values in np.array(fits, f32).T:
        if importance is None:
            largest = values.max()
            q = np.rint(63 / largest * values) if largest > 0 else np.zeros(8)
            parts.append(f32(np.float16(largest / 63)) * np.minimum(q, 63))
        else:
            scale, q = fit_six_bits(values, weights.sum(axis=1))
            parts.append(f32(np.float16(scale)) * q)
    scale, minimum = (part[:, None] for part in parts)
    q = np.clip(np.rint((blocks + minimum) / np.where(scale > 0, scale, 1)), 0, levels)
    return (scale * q - minimum).reshape(-1)


def symmetric(x, importance):
    """Return the values of a super-block after quantization to q6_k."""
    scales = []
    blocks = x.reshape(16, 16)
    for block, weights in zip(blocks, blocks**2 if importance is None else importance.reshape(16, 16), strict=True):
        extreme = block[np.argmax(np.abs(block))]
        if abs(extreme) < 1e-15:
            scales.append(f32(0))
            continue
        best = (f32(-1), f32(0))
        for offset in (0, *range(-9, 0), *range(1, 10)):
            q = np.clip(np.rint(-(32 + 0.1 * offset) / extreme * block), -32, 31)
            sum_qx, sum_qq = (weights * q * block).sum(), (weights * q * q).sum()
            if sum_qq > 0 and sum_qx**2 / sum_qq > best[0]:
                best = (sum_qx**2 / sum_qq, sum_qx / sum_qq)
        scales.append(best[1])
    scales = np.array(scales, f32)
    largest = scales[np.argmax(np.abs(scales))]
    if abs(largest) < 1e-15:
        return np.zeros_like(x)
    d = f32(np.float16(largest / -128)) * np.minimum(np.rint(-128 / largest * scales), 127)
    d = d[:, None]
    return (d * np.clip(np.rint(blocks / np.where(d != 0, d, 1)), -32, 31)).reshape(-1)


def published(rows, kind, importance):
    """Return rows after quantization by the published algorithm."""
    result = np.empty_like(rows)
    for row, out in zip(rows, result, strict=True):
        for start in range(0, len(row), 256):
            span = slice(start, start + 256)
            weights = None if importance is None else importance[span]
            levels = {"q4_k": 15, "q5_k": 31}.get(kind)
            out[span] = symmetric(row[span], weights) if levels is None else with_minimum(row[span], levels, weights)
    return result


def normal(rng):
    return rng.normal(size=(16, 512)).astype(f32) * f32(0.02)


def outliers(rng):
    return normal(rng) * np.where(rng.random((16, 512)) < 0.01, 20, 1).astype(f32)


def skewed(rng):
    return np.abs(normal(rng)) - f32(0.003)


def shares(rng):
    """Sub-blocks of very different sizes, zeros among them."""
    sizes = rng.choice([0, 1e-3, 1e-2, 1], (16, 32, 1)).astype(f32)
    return (rng.normal(size=(16, 32, 16)).astype(f32) * sizes).reshape(16, 512)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("make", [normal, outliers, skewed, shares])
@pytest.mark.parametrize("kind", repeats(BLOCK_BYTES, "q5_k"))
def test_error_is_that_of_the_published_algorithm(kind, make, weighted):
    rng = np.random.default_rng(0)
    rows = make(rng)
    importance = rng.lognormal(sigma=1.5, size=512).astype(f32) if weighted else None
    weights = 1 if importance is None else importance
    ours = quantize(rows, kind, importance)
    expected = published(rows, kind, importance)
    assert np.mean(weights * (ours - rows) ** 2) <= 1.01 * np.mean(weights * (expected - rows) ** 2)


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_rows_of_zeros_and_equal_values_are_exact(kind):
    rows = np.zeros((2, 256), f32)
    assert not quantize(rows, kind).any()
    rows[1] = -0.5
    np.testing.assert_allclose(quantize(rows, kind), rows, rtol=1e-3)


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_importance_lowers_the_weighted_error(kind):
    rng = np.random.default_rng(2)
    rows = normal(rng)
    importance = np.where(rng.random(512) < 0.1, 100, 0.01).astype(f32)

    def error(weights):
        ours = quantize(rows, kind, weights)
        return np.mean(importance * (ours - rows) ** 2)

    assert error(importance) < 0.9 * error(None)
