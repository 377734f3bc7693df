"""The choice of an attention backend, and refusals before a launch."""

import itertools
from dataclasses import replace
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.attention import ATTENTION, AttentionCall, packed_attention
from jaxglue.ops.attention.reference import reference_attention
from jaxglue.ops.choices import Attention
from jaxglue.ops.segments import pack_segments

LLAMA = AttentionCall(dtype=jnp.bfloat16, head_dim=128, query_heads=32, kv_heads=8, seq_len=8192, segment_slots=32)


@pytest.mark.parametrize(
    ("changes", "capability", "expected"),
    [
        ({}, None, "reference"),
        ({}, (9, 0), "triton"),
        ({}, (8, 0), "triton"),
        ({}, (7, 5), "reference"),
        ({"segment_slots": 1}, (9, 0), "triton"),
        ({"segment_slots": 8, "long": True}, (9, 0), "hopper"),
        ({"segment_slots": 8, "long": True}, (10, 0), "triton"),
        ({"segment_slots": 8, "long": True, "forked": True}, (9, 0), "triton"),
        ({"segment_slots": 8, "long": True, "head_dim": 96}, (9, 0), "triton"),
        ({"segment_slots": 1, "long": True, "head_dim": 64}, (9, 0), "triton"),
        ({"segment_slots": 1, "long": True, "head_dim": 64, "seq_len": 65_536}, (9, 0), "hopper"),
        ({"segment_slots": 1, "long": True, "window": 4096}, (9, 0), "hopper"),
        ({"segment_slots": 1}, (8, 9), "triton"),
        ({"segment_slots": 1, "window": 128}, (9, 0), "triton"),
        ({"segment_slots": 4, "long": True}, (9, 0), "hopper"),
        ({"segment_slots": 4, "long": True}, (10, 0), "cudnn"),
        ({"segment_slots": 4, "long": True, "query_heads": 40}, (9, 0), "hopper"),
        ({"segment_slots": 8, "long": True, "query_heads": 8, "seq_len": 8191}, (9, 0), "hopper"),
        ({"segment_slots": 4, "long": True}, (8, 0), "triton"),
        ({"segment_slots": 4, "long": True, "window": 1024}, (9, 0), "hopper"),
        ({"segment_slots": 4, "long": True, "window": 1023}, (9, 0), "triton"),
        ({"segment_slots": 4, "long": True, "window": 1024}, (10, 0), "triton"),
        ({"head_dim": 80}, (9, 0), "triton"),
        ({"head_dim": 256, "softcap": 50.0}, (9, 0), "triton"),
        ({"head_dim": 256, "long": True}, (9, 0), "hopper"),
        ({"head_dim": 256, "long": True, "segment_slots": 4}, (9, 0), "cudnn"),
        ({"head_dim": 256, "long": True, "segment_slots": 4, "softcap": 50.0}, (9, 0), "hopper"),
        ({"head_dim": 72, "bidirectional": True, "long": True}, (9, 0), "triton"),
        ({"head_dim": 72, "bidirectional": True, "long": True, "segment_slots": 1}, (9, 0), "triton"),
        ({"head_dim": 192, "value_dim": 128}, (9, 0), "triton"),
        ({"head_dim": 192, "value_dim": 128, "long": True, "segment_slots": 4}, (9, 0), "hopper"),
        ({"head_dim": 160, "value_dim": 128, "long": True}, (9, 0), "triton"),
        ({"head_dim": 84}, (9, 0), "reference"),
        ({"head_dim": 512}, (9, 0), "triton"),
        ({"head_dim": 32, "segment_slots": 512}, (9, 0), "cudnn"),
        ({"head_dim": 32, "segment_slots": 1024}, (9, 0), "reference"),
        ({"head_dim": 512}, (8, 0), "reference"),
        ({"dtype": jnp.float32}, (9, 0), "reference"),
    ],
)
def test_auto_chooses_by_gpu_and_shape(changes, capability, expected):
    pytest.importorskip("jax_triton", reason="without jax-triton, auto never chooses triton")
    choice = ATTENTION.choose(capability, replace(LLAMA, **changes))
    assert choice.name == expected
    assert choice.reason


@pytest.mark.parametrize(
    ("backend", "changes", "capability", "message"),
    [
        ("cudnn", {}, (8, 9), "9.0.*got 8.9"),
        ("cudnn", {}, None, "no NVIDIA GPU"),
        ("cudnn", {"head_dim": 512}, (9, 0), "head dim.*got 512"),
        ("cudnn", {"split": True}, (9, 0), "some of a row's tokens"),
        ("cudnn", {"segment_slots": 513}, (9, 0), "more than 512 documents in a row"),
        ("cudnn", {"bidirectional": True}, (9, 0), "see later ones"),
        ("hopper", {}, (8, 0), "9.0, got 8.0"),
        ("hopper", {}, None, "no NVIDIA GPU"),
        ("hopper", {"head_dim": 96}, (9, 0), "head dim.*got 96"),
        ("hopper", {"forked": True}, (9, 0), "forked"),
        ("triton", {}, (7, 5), "8.0.*got 7.5"),
        ("triton", {"head_dim": 84}, (9, 0), "multiple of 8.*got 84"),
        ("cudnn", {"softcap": 50.0}, (9, 0), "capped"),
        ("triton", {"dtype": jnp.float32}, (9, 0), "dtype.*got.*float32"),
        ("flash", {}, (9, 0), "backend must be one of.*got 'flash'"),
    ],
)
def test_named_backend_that_cannot_serve_says_why(backend, changes, capability, message):
    pytest.importorskip("jax_triton", reason="without jax-triton that is the obstacle that is named")
    with pytest.raises(ValueError, match=message):
        ATTENTION.choose(capability, replace(LLAMA, **changes), backend=backend)


def arguments(**changes):
    shapes = {"q": (1, 8, 4, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16)} | changes
    return [jnp.ones(shapes[name]) for name in "qkv"]


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"q": (8, 4, 16)}, {}, r"q must be \[B, T, N, H\], got shape \(8, 4, 16\)"),
        ({"k": (1, 8, 2, 32)}, {}, r"k must be .*\[1, 8, K, 16\].*got shape \(1, 8, 2, 32\)"),
        ({"v": (1, 8, 1, 16)}, {}, r"v must have k's shape \(1, 8, 2, 16\), or narrower heads, got \(1, 8, 1, 16\)"),
        ({"q": (1, 8, 3, 16)}, {}, "multiple of key/value heads, got 3 and 2"),
        ({"q": (1, 9, 4, 16), "k": (1, 9, 2, 16), "v": (1, 9, 2, 16)}, {}, r"segments must be .*\[1, 9\].*\(1, 8\)"),
        ({}, {"window": 0}, "window must be a whole number from 1 or None, got 0"),
        ({}, {"sinks": jnp.ones(3)}, r"sinks .* 4 query heads, got shape \(3,\)"),
    ],
)
def test_unfit_arguments_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        packed_attention(*arguments(**shapes), pack_segments([[8]], seq_len=8), **options)


def test_mixed_dtypes_are_refused():
    q, k, v = arguments()
    with pytest.raises(ValueError, match="one dtype, got float32, float16 and float32"):
        packed_attention(q, k.astype(jnp.float16), v, pack_segments([[8]], seq_len=8))


def naive_attention(q, k, v, lengths, window, sinks):
    """Attend one document, one query and one head at a time, in numpy."""
    out, begin = np.zeros(q.shape), 0
    for length in lengths:
        for t, n in itertools.product(range(length), range(q.shape[2])):
            keys = slice(begin + (max(0, t - window + 1) if window else 0), begin + t + 1)
            kv = n // (q.shape[2] // k.shape[2])
            weights = np.exp(k[0, keys, kv] @ q[0, begin + t, n] / np.sqrt(q.shape[3]))
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
            out[0, begin + t, n] = weights / total @ v[0, keys, kv]
        begin += length
    return out


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_reference_is_softmax_attention_in_each_document(window, with_sinks):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=x.shape).astype(np.float32) for x in arguments())
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32) if with_sinks else None
    got = reference_attention(q, k, v, pack_segments([[4, 3]], seq_len=8), window=window, sinks=sinks)
    np.testing.assert_allclose(got, naive_attention(q, k, v, [4, 3], window, sinks), atol=1e-5)


def test_the_flag_names_every_backend():
    assert set(get_args(Attention)) == set(ATTENTION.names)


def test_long_documents_of_narrow_values_take_hoppers_kernels():
    pytest.importorskip("jax_triton", reason="without jax-triton, auto never chooses triton")
    latent = replace(LLAMA, head_dim=192, value_dim=128, long=True, segment_slots=16)
    assert ATTENTION.choose((9, 0), latent).name == "hopper"
    assert ATTENTION.choose((9, 0), replace(latent, value_dim=96)).name != "hopper"
