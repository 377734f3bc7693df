"""Kernels compiled for an H200 without a GPU; needs jax-cuda13-plugin and jax-cuda13-pjrt."""

import re
import subprocess

import jax
import jax.numpy as jnp
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.names import ATTENTION_LSE, ATTENTION_OUT
from jaxglue.ops.segments import PackedSegments


def hopper_backend():
    from jaxglue.ops.attention.hopper import HopperAttention

    return HopperAttention(compute_capability=90)


def triton_backend(H, window):
    from jaxglue.ops.attention.tiles import kernel_tiles
    from jaxglue.ops.attention.triton import TritonAttention

    return TritonAttention(tiles=kernel_tiles((9, 0), H, window=window), compute_capability=90)


def compile_step(sharding, *, T, N, K, H, window, policy, forks=False, backend=None, softcap=None):
    """Compile the gradient of a checkpointed attention call."""

    def shaped(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    per_token = shaped((1, T), jnp.int32)
    segments = PackedSegments(
        segment_ids=per_token,
        positions=per_token,
        starts=per_token,
        ends=per_token,
        cu_seqlens=shaped((1, 33), jnp.int32),
        gap_starts=per_token if forks else None,
        gap_ends=per_token if forks else None,
    )
    spec = FlashSpec(backend=backend or triton_backend(H, window), window=window, softcap=softcap)

    def loss(q, k, v, sinks, segments):
        attend = jax.checkpoint(lambda *x: flash_attention(spec, *x, segments), policy=policy)
        return jnp.sin(attend(q, k, v, sinks).astype(jnp.float32)).sum()

    inputs = (*(shaped((1, T, heads, H)) for heads in (N, K, K)), shaped((N,), jnp.float32), segments)
    return jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*inputs).compile()


def kernels(compiled) -> int:
    return compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"')


def test_saved_residuals_spare_a_forward_kernel(h200):
    shape = {"T": 16_384, "N": 32, "K": 8, "H": 128, "window": None}
    saved = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LSE)
    assert kernels(compile_step(h200, **shape, policy=saved)) == 3
    assert kernels(compile_step(h200, **shape, policy=jax.checkpoint_policies.nothing_saveable)) == 4


@pytest.mark.parametrize(
    ("N", "K", "H", "window"),
    [(64, 8, 64, 128), repeat(40, 8, 128, None), repeat(32, 32, 96, None), repeat(8, 2, 256, 4096)],
)
def test_memory_is_linear_in_tokens(h200, N, K, H, window):
    T = 131_072
    policy = jax.checkpoint_policies.everything_saveable
    temporary = (
        compile_step(h200, T=T, N=N, K=K, H=H, window=window, policy=policy).memory_analysis().temp_size_in_bytes
    )
    assert temporary < 4 * T * N * H * 2  # a few arrays of q's size


@repeats_parts_of("test_saved_residuals_spare_a_forward_kernel")
@pytest.mark.parametrize("window", [None, repeat(128)])
def test_forked_segments_take_the_same_kernels(h200, window):
    shape = {"T": 8192, "N": 32, "K": 8, "H": 128 if window is None else 64, "window": window, "forks": True}
    saved = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LSE)
    assert kernels(compile_step(h200, **shape, policy=saved)) == 3


def assembler_notes(ptx: str, folder) -> str:
    """Return the remarks of the assembler, in which it says where it makes matmuls wait for each other."""
    from triton import knobs

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", source, "-o", folder / "kernel.cubin"
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.fixture
def compiled_kernels(monkeypatch):
    """Return a list that each kernel joins that is compiled for the first time."""
    from jax_triton import triton_lib

    import jaxglue.ops.launch  # noqa: F401 - has a compiler of its own

    results, compile_kernel = [], triton_lib.compile_ttir_inplace
    monkeypatch.setattr(
        triton_lib, "compile_ttir_inplace", lambda *args: results.append(compile_kernel(*args)) or results[-1]
    )
    return results


@repeats_parts_of("test_hopper_kernels_keep_matmuls_in_flight_and_write_in_place")
def test_kernels_of_wide_heads_keep_matmuls_in_flight_and_values_in_registers(h200, compiled_kernels, tmp_path):
    shape = {"T": 8192, "N": 16, "K": 8, "H": 256, "window": None, "softcap": 50.0}
    compile_step(h200, **shape, policy=jax.checkpoint_policies.everything_saveable)
    notes = [assembler_notes(result.binary, tmp_path) for result in compiled_kernels]
    assert len(notes) == 4
    assert not any("wgmma" in note for note in notes)
    assert max(int(re.search(r"(\d+) bytes spill stores", note)[1]) for note in notes) <= 32


@repeats_parts_of("test_hopper_kernels_keep_matmuls_in_flight_and_write_in_place")
@pytest.mark.parametrize("head_dim", [72, 96])
def test_heads_in_two_parts_keep_matmuls_in_flight_and_sums_in_registers(h200, compiled_kernels, tmp_path, head_dim):
    shape = {"T": 8192, "N": 16, "K": 16, "H": head_dim, "window": None}
    compile_step(h200, **shape, policy=jax.checkpoint_policies.everything_saveable)
    notes = [assembler_notes(result.binary, tmp_path) for result in compiled_kernels]
    assert len(notes) == 3
    assert not any("wgmma" in note for note in notes)
    assert max(int(re.search(r"(\d+) bytes spill stores", note)[1]) for note in notes) <= 16


def compile_hopper(sharding, *, T, N, K, H, window, slots, softcap=None, split=1, values=None):
    """Compile both passes on queries, keys and values that the program makes; queries are a part of split rows."""

    def gradients(scale, per_token):
        fields = dict.fromkeys(("segment_ids", "positions", "starts"), per_token[:, : T // split])
        if split > 1:
            fields |= {"own_keys": fields["starts"], "first_queries": per_token}
        segments = PackedSegments(**fields, ends=per_token, cu_seqlens=jnp.zeros((1, slots + 1), jnp.int32))
        shapes = (T // split, N, H), (T, K, H), (T, K, values or H)
        q, k, v = (jnp.full((1, *shape), scale) for shape in shapes)
        options = {"window": window, "softcap": softcap}
        out, lse = hopper_backend().forward(q, k, v, None, segments, **options)
        dq, dk, dv, _ = hopper_backend().backward(q, k, v, None, segments, out, lse, out, **options)
        return sum(x.astype(jnp.float32).sum() for x in (dq, dk, dv))

    shapes = ((), jnp.bfloat16), ((1, T), jnp.int32)
    return jax.jit(gradients).lower(*(jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes)).compile()


@pytest.mark.parametrize(
    ("window", "slots"), [repeat(100, 32, id="interleaved heads"), pytest.param(2048, 1, id="chunks of a head")]
)
def test_hopper_kernels_keep_matmuls_in_flight_and_write_in_place(
    h200, monkeypatch, compiled_kernels, tmp_path, window, slots
):
    from jaxglue.ops.attention import hopper

    monkeypatch.setattr(hopper, "heads_summed_at_once", lambda *_: 1)
    T, N, K, H = 8192, 16, 4, 128
    compiled = compile_hopper(h200, T=T, N=N, K=K, H=H, window=window, slots=slots)
    assert kernels(compiled) == 2
    assert all(".reqntid 384" in result.binary for result in compiled_kernels)
    assert all("wgmma" not in assembler_notes(result.binary, tmp_path) for result in compiled_kernels)
    inputs, out, one_head = 2 * T * (N + 2 * K) * H, 2 * T * N * H, 4 * T * (N // K) * H
    assert compiled.memory_analysis().temp_size_in_bytes < inputs + out + 2 * one_head


@repeats_parts_of("test_hopper_kernels_keep_matmuls_in_flight_and_write_in_place")
def test_hopper_kernels_of_split_rows_keep_matmuls_in_flight(h200, compiled_kernels, tmp_path):
    compiled = compile_hopper(h200, T=8192, N=16, K=4, H=128, window=None, slots=1, split=2)
    assert kernels(compiled) == 2
    notes = [assembler_notes(result.binary, tmp_path) for result in compiled_kernels]
    assert not any("wgmma" in note for note in notes)
    assert max(int(re.search(r"(\d+) bytes spill stores", note)[1]) for note in notes) <= 48


@repeats_parts_of("test_hopper_kernels_keep_matmuls_in_flight_and_write_in_place")
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_hopper_computes_wide_heads_forward_and_triton_backward(h200, compiled_kernels, tmp_path, softcap):
    compile_hopper(h200, T=4096, N=16, K=8, H=256, window=None, slots=32, softcap=softcap)
    forward, *gradients = compiled_kernels
    assert ".reqntid 384" in forward.binary and len(gradients) == 3
    assert all("wgmma" not in assembler_notes(result.binary, tmp_path) for result in compiled_kernels)


@repeats_parts_of("test_hopper_kernels_keep_matmuls_in_flight_and_write_in_place")
def test_hopper_keeps_the_sums_of_latent_attention_in_registers(h200, compiled_kernels, tmp_path):
    compile_hopper(h200, T=4096, N=16, K=16, H=192, values=128, window=None, slots=32)
    assert len(compiled_kernels) == 2 and all(".reqntid 384" in result.binary for result in compiled_kernels)
    notes = [assembler_notes(result.binary, tmp_path) for result in compiled_kernels]
    assert not any("wgmma" in note for note in notes)
    assert max(int(re.search(r"(\d+) bytes spill stores", note)[1]) for note in notes) <= 64
