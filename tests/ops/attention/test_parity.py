"""Every backend against the float32 reference: output and all gradients, on uneven segments."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops import row_split
from jaxglue.ops.attention import ATTENTION, _call, packed_attention
from jaxglue.ops.attention.padded import PaddedValues
from jaxglue.ops.attention.reference import reference_attention
from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles
from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.row_split import bounds, split_segments
from jaxglue.ops.segments import pack_forks, pack_segments


@dataclass(frozen=True, kw_only=True)
class Case:
    lengths: tuple[tuple[int, ...], ...]
    T: int
    N: int
    K: int
    H: int
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    values: int | None = None
    """Head dim of values; None for H."""

    def inputs(self, dtype):
        """Return (q, k, v, sinks), segments, dout."""
        keys = jax.random.split(jax.random.key(0), 5)
        values = self.H if self.values is None else self.values
        sizes = self.H, self.H, values, values
        q, k, v, dout = (
            jax.random.normal(key, (len(self.lengths), self.T, heads, size), dtype)
            for key, heads, size in zip(keys[:4], (self.N, self.K, self.K, self.N), sizes, strict=True)
        )
        sinks = jax.random.normal(keys[4], (self.N,)) if self.sinks else None
        segments = jax.tree.map(jnp.asarray, pack_segments(self.lengths, seq_len=self.T))
        return (q, k, v, sinks), segments, dout


# For the interpreter, with tiles of 16: small, and each on the edge of something.
SMALL = {
    "two rows, ragged, padding": Case(lengths=((5, 1, 1, 17), (14, 3)), T=27, N=4, K=2, H=16),
    "ends on tile boundaries": Case(lengths=((16, 16),), T=32, N=2, K=2, H=16, sinks=True),
    "window shorter than segments": Case(lengths=((23, 3, 10),), T=40, N=4, K=1, H=16, window=5, sinks=True),
    "window longer than segments": Case(lengths=((11, 20),), T=32, N=2, K=1, H=16, window=30),
    "window of one token": Case(lengths=((18, 3),), T=22, N=2, K=1, H=16, window=1),
    "head dim and group are no powers of two": Case(lengths=((7, 13),), T=20, N=3, K=1, H=24, window=9),
    "two tiles of heads in a group": Case(lengths=((9, 4),), T=16, N=6, K=1, H=16, sinks=True),
    "a row of padding": Case(lengths=((18,), ()), T=20, N=2, K=1, H=16, sinks=True),
    "documents of one token": Case(lengths=((1,) * 17,), T=20, N=2, K=1, H=16),
    "values narrower than keys": Case(lengths=((7, 17), (3, 1, 12)), T=25, N=4, K=2, H=24, values=16, window=12),
    "values narrower than one part of keys": Case(lengths=((7, 17),), T=25, N=2, K=2, H=28, values=8),
    "heads in two parts": Case(lengths=((7, 17), (3, 1, 12)), T=25, N=4, K=2, H=40, window=12, sinks=True),
    "capped scores": Case(lengths=((1, 17, 9), ()), T=31, N=4, K=2, H=24, window=11, softcap=0.7),
}


def random_lengths(total: int, count: int, seed: int = 0) -> tuple[int, ...]:
    """Return `count` random lengths, some of them 1, that add up to `total`."""
    cuts = np.random.default_rng(seed).choice(np.arange(1, total), size=count - 1, replace=False)
    cuts = np.union1d(cuts, [1, 2, total - 1])
    return tuple(np.diff([0, *cuts, total]).tolist())


LARGE = {
    "Llama": Case(lengths=(random_lengths(1400, 9), random_lengths(900, 4, seed=1)), T=1500, N=32, K=8, H=128),
    "GPT-OSS": Case(lengths=(random_lengths(2000, 7),), T=2048, N=64, K=8, H=64, window=128, sinks=True),
    "GPT-OSS, full": Case(lengths=(random_lengths(2000, 7),), T=2048, N=64, K=8, H=64, sinks=True),
    "Qwen3-14B": Case(lengths=(random_lengths(1024, 12),), T=1024, N=40, K=8, H=128),
    "window longer than segments": Case(lengths=(random_lengths(1000, 5),), T=1001, N=8, K=2, H=128, window=700),
    "head dim 72": Case(lengths=(random_lengths(900, 5),), T=960, N=4, K=4, H=72),
    "head dim 96": Case(lengths=(random_lengths(900, 5),), T=960, N=8, K=8, H=96, window=100),
    "head dim 256": Case(lengths=(random_lengths(1000, 5),), T=1024, N=8, K=2, H=256),
    "head dim 256, capped scores": Case(lengths=(random_lengths(1000, 5),), T=1024, N=8, K=4, H=256, softcap=2.0),
    "latent": Case(
        lengths=(random_lengths(1400, 6), random_lengths(1024, 3, seed=1)), T=1500, N=16, K=16, H=192, values=128
    ),
    "latent, one segment": Case(lengths=((2500,),), T=2560, N=8, K=8, H=192, values=128),
    "latent, grouped, window": Case(
        lengths=(random_lengths(1900, 3),), T=2048, N=8, K=2, H=192, values=128, window=700
    ),
    "head dim 512": Case(lengths=(random_lengths(1000, 5),), T=1024, N=8, K=1, H=512),
    "head dim 256, window": Case(lengths=(random_lengths(1000, 5),), T=1024, N=4, K=2, H=256, window=200),
    "hundreds of documents": Case(lengths=(random_lengths(1024, 300),), T=1024, N=8, K=4, H=64),
    "one segment": Case(lengths=((4096,),), T=4096, N=8, K=2, H=128),
    "one segment and padding": Case(lengths=((1000,), (300,)), T=1100, N=8, K=2, H=128, sinks=True),
    "chunks of tiles in a window": Case(lengths=((5900,),), T=6001, N=4, K=2, H=128, window=4500, sinks=True),
    "one segment, window": Case(lengths=((1000,),), T=1100, N=8, K=2, H=128, window=64),
}


HOPPER = (
    "Llama",
    "GPT-OSS",
    "GPT-OSS, full",
    "Qwen3-14B",
    "hundreds of documents",
    "one segment and padding",
    "chunks of tiles in a window",
    *("latent", "latent, one segment", "latent, grouped, window"),
)


def output_and_gradients(attention, inputs, dout):
    """Return (out, (dq, dk, dv, dsinks)) in float32."""

    @jax.jit
    def step(inputs, dout):
        out, pull = jax.vjp(attention, *inputs)
        return jax.tree.map(lambda x: x.astype(jnp.float32), (out, pull(dout.astype(out.dtype))))

    return step(inputs, dout)


def expected_of(case, inputs, segments, dout):
    """Return the reference's output and gradients, computed in float32."""
    q, k, v, sinks = inputs
    exact = (*(x.astype(jnp.float32) for x in (q, k, v)), sinks)
    with jax.default_matmul_precision("highest"):
        return output_and_gradients(
            lambda q, k, v, sinks: reference_attention(
                q, k, v, segments, window=case.window, sinks=sinks, softcap=case.softcap
            ),
            exact,
            dout,
        )


def assert_close(got, expected, dout, tolerance):
    """Assert ‖got − expected‖ ≤ tolerance·‖expected‖ for every array; against ‖dout‖ where expected is 0."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = np.linalg.norm(b) or np.linalg.norm(dout.astype(jnp.float32))
        assert np.linalg.norm(a - b) <= tolerance * scale


LATE = "values narrower than keys", "heads in two parts", "capped scores"
"""Cases with the most in them."""


@pytest.mark.parametrize(
    ("name", "late"),
    [*((name, False) for name in SMALL), *(((name, True) if name in LATE else repeat(name, True)) for name in SMALL)],
)
def test_interpreted_kernels_match_the_reference(name, late, interpreted_backend):
    case = SMALL[name]
    inputs, segments, dout = case.inputs(jnp.float32)
    assert_interpreted(case, segments, inputs, dout, interpreted_backend, late=late)


def test_kernels_without_narrow_values_get_padded_ones(interpreted_backend):
    case = SMALL["values narrower than keys"]
    inputs, segments, dout = case.inputs(jnp.float32)
    assert_interpreted(case, segments, inputs, dout, lambda **options: PaddedValues(interpreted_backend(**options)))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_weights_are_rounded_alike_in_all_tiles(has_sinks, interpreted_backend):
    case = Case(lengths=((3, 93),), T=96, N=2, K=1, H=16, sinks=has_sinks)
    (q, k, v, sinks), segments, _ = case.inputs(jnp.float16)

    def outputs(block: int) -> np.ndarray:
        tiles = AttentionTiles(block_m=block, block_n=block, num_warps=4, num_stages=1)
        tiles = AttentionKernelTiles(forward=tiles, dq=tiles, dkdv=tiles, dv=None)
        spec = FlashSpec(backend=interpreted_backend(tiles=tiles, compute_capability=80), window=None)
        return np.asarray(flash_attention(spec, 4 * q, k, v, sinks, segments))

    assert (outputs(16) == outputs(64)).mean() > 0.99  # 0.93 with peaks that are not whole


@pytest.mark.parametrize("name", ["capped scores", "heads in two parts"])
def test_gradients_of_values_in_a_kernel_of_their_own_match_the_reference(name, interpreted_backend):
    case = SMALL[name]
    inputs, segments, dout = case.inputs(jnp.float32)
    assert_interpreted(case, segments, inputs, dout, interpreted_backend, apart=True)


def assert_interpreted(case, segments, inputs, dout, interpreted_backend, late=False, apart=False):
    """Assert that interpreted kernels compute a case."""
    tiles = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=1, late=late)
    tiles = AttentionKernelTiles(forward=tiles, dq=tiles, dkdv=tiles, dv=tiles if apart else None)
    backend = interpreted_backend(tiles=tiles, compute_capability=80)
    spec = FlashSpec(backend=backend, window=case.window, softcap=case.softcap)
    got = output_and_gradients(lambda *x: flash_attention(spec, *x, segments), inputs, dout)
    assert_close(got, expected_of(case, inputs, segments, dout), dout, 1e-5)


def split_queries(case: Case, segments, inputs, dout, device: int, devices: int = 2):
    """Return (inputs, metadata, dout) of a device's queries, and dout of whole rows, zero for others' queries."""
    split = jax.tree.map(jnp.asarray, split_segments(segments, devices))
    own = case.T // devices
    part = slice(device * own, (device + 1) * own)
    names = "segment_ids", "positions", "starts", "ends", "gap_starts", "gap_ends"
    fields = {name: values[:, part] for name in names if (values := getattr(split, name)) is not None}
    rows = split.split.rows[:, part]
    parts = replace(split.split, rows=rows, before=split.split.before[:, device : device + 1])
    take = jax.vmap(lambda values, index: values[index])
    is_own = jnp.zeros(dout.shape[:2]).at[jnp.arange(len(rows))[:, None], rows].set(1)[:, :, None, None]
    q, *others = inputs
    metadata = bounds(replace(split, **fields, split=parts), case.window)
    return (take(q, rows), *others), metadata, take(dout, rows), (dout * is_own).astype(dout.dtype), rows


def assert_split(case: Case, backend, dtype, tolerance: float, device: int, forks=None):
    """Assert that a backend computes the queries of one device of two."""
    inputs, segments, dout = case.inputs(dtype)
    if forks is not None:
        segments = jax.tree.map(jnp.asarray, pack_forks(forks, seq_len=case.T))
    given, metadata, own_dout, whole_dout, rows = split_queries(case, segments, inputs, dout, device)
    # Windows of forked segments go by positions, others are in the bounds.
    spec = FlashSpec(backend=backend, window=None if forks is None else case.window, softcap=case.softcap)
    got = output_and_gradients(lambda *x: flash_attention(spec, *x, metadata), given, own_dout)
    out, (dq, *others) = expected_of(case, inputs, segments, whole_dout)
    out, dq = (jax.vmap(lambda values, index: values[index])(x, rows) for x in (out, dq))
    assert_close(got, (out, (dq, *others)), dout, tolerance)


SPLIT = {
    "chunks and whole documents": Case(lengths=((70, 5, 11, 3), (41, 32, 17)), T=92, N=2, K=1, H=16, sinks=True),
    "a window": Case(lengths=((81, 14),), T=96, N=2, K=1, H=16, window=27),
}


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, 1) for name in SPLIT] + [repeat(name, 0) for name in SPLIT],
)
def test_kernels_compute_the_queries_of_split_rows(name, device, interpreted_backend, monkeypatch):
    monkeypatch.setattr(row_split, "_LEAST_CHUNK", 8)
    tiles = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
    tiles = AttentionKernelTiles(forward=tiles, dq=tiles, dkdv=tiles)
    assert_split(SPLIT[name], interpreted_backend(tiles=tiles, compute_capability=80), jnp.float32, 1e-5, device)


@pytest.mark.parametrize(("device", "window"), [(0, None), (1, 19), repeat(1, None), repeat(0, 19)])
def test_kernels_compute_the_queries_of_split_forks(device, window, interpreted_backend, monkeypatch):
    monkeypatch.setattr(row_split, "_LEAST_CHUNK", 4)
    forks = ([(20, 17, 13), (3, 17, 25, 2)],)
    case = Case(lengths=tuple(tuple(map(sum, row)) for row in forks), T=100, N=2, K=1, H=16, window=window)
    tiles = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
    tiles = AttentionKernelTiles(forward=tiles, dq=tiles, dkdv=tiles)
    backend = interpreted_backend(tiles=tiles, compute_capability=80)
    assert_split(case, backend, jnp.float32, 1e-5, device, forks=forks)


LARGE_SPLIT = {
    "Llama": Case(lengths=(random_lengths(3900, 9), random_lengths(3000, 4, seed=1)), T=4096, N=8, K=2, H=128),
    "GPT-OSS": Case(lengths=(random_lengths(4000, 7),), T=4096, N=16, K=2, H=64, window=128, sinks=True),
    "Qwen3-14B": Case(lengths=((4096,),), T=4096, N=10, K=2, H=128, sinks=True),
    "window": Case(lengths=((5000, 900),), T=6000, N=8, K=2, H=128, window=1500),
    "head dim 256": Case(lengths=((2500, 500),), T=3072, N=8, K=2, H=256, softcap=2.0),
}
"""Of few heads, since the reference implementation in float32 holds the scores of all."""


@pytest.mark.gpu
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("name", LARGE_SPLIT)
def test_backends_compute_the_queries_of_split_rows_on_a_gpu(name, backend, device):
    case = LARGE_SPLIT[name]
    (q, k, v, _), segments, _ = case.inputs(jnp.bfloat16)
    call = replace(_call(q, k, v, segments, None, case.softcap), split=True, long=backend == "hopper")
    assert_split(case, ATTENTION.load(call, backend=backend), jnp.bfloat16, 1e-2, device)


def test_units_of_documents_match_the_reference(interpreted_backend, monkeypatch):
    from jaxglue.ops import segments as rows
    from jaxglue.ops.attention import triton

    for module in (rows, triton):
        monkeypatch.setattr(module, "UNIT", 16)
    case = Case(lengths=((9, 65, 70),), T=150, N=2, K=1, H=16)
    inputs, segments, dout = case.inputs(jnp.float32)
    assert_interpreted(case, segments, inputs, dout, interpreted_backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "hopper", "triton"])
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.bfloat16) for name in LARGE), ("Llama", jnp.float16), ("GPT-OSS", jnp.float16)]
)
def test_backends_match_the_reference_on_a_gpu(name, dtype, backend):
    case = LARGE[name]
    if backend == "hopper" and name not in HOPPER:
        pytest.skip("other cases show the same of these kernels, which compile slowly")
    if backend == "cudnn" and (case.softcap is not None or case.H > 256):
        pytest.skip("cuDNN does not cap scores, nor know wider heads")
    inputs, segments, dout = case.inputs(dtype)

    def attention(q, k, v, sinks):
        options = {"window": case.window, "sinks": sinks, "softcap": case.softcap}
        return packed_attention(q, k, v, segments, **options, backend=backend)

    got = output_and_gradients(attention, inputs, dout)
    assert_close(got, expected_of(case, inputs, segments, dout), dout, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "triton"])
def test_no_transfer_from_the_device(backend):
    case = LARGE["GPT-OSS"]
    (q, k, v, sinks), segments, dout = case.inputs(jnp.bfloat16)

    @jax.jit
    def step(q, k, v, sinks, segments, dout):
        def attention(q, k, v, sinks):
            return packed_attention(q, k, v, segments, window=case.window, sinks=sinks, backend=backend)

        return jax.vjp(attention, q, k, v, sinks)[1](dout)

    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(q, k, v, sinks, segments, dout))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_gradients_are_deterministic(backend):
    case = LARGE["Llama"]
    inputs, segments, dout = case.inputs(jnp.bfloat16)

    def attention(q, k, v, _):
        return packed_attention(q, k, v, segments, backend=backend)

    first, second = (output_and_gradients(attention, inputs, dout) for _ in range(2))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, first, second))


@pytest.mark.gpu
def test_offsets_beyond_int32():
    last = 200
    case = Case(lengths=((4096,) * 31 + (4096 - last, last),), T=131_072, N=136, K=8, H=128)
    inputs, segments, dout = case.inputs(jnp.bfloat16)
    assert inputs[0].size > 2**31

    def attention(q, k, v, sinks):
        return packed_attention(q, k, v, segments, backend="triton")

    @jax.jit  # so that no whole array is widened: other tests share the GPU
    def ends(inputs, dout):
        return jax.tree.map(lambda x: x[:, -last:], output_and_gradients(attention, inputs, dout))

    got = ends(inputs, dout)
    tail = Case(lengths=((last,),), T=last, N=case.N, K=case.K, H=case.H)
    inputs, dout = jax.tree.map(lambda x: x[:, -last:], (inputs, dout))
    segments = jax.tree.map(jnp.asarray, pack_segments(tail.lengths, seq_len=last))
    assert_close(got, expected_of(tail, inputs, segments, dout), dout, 1e-2)
