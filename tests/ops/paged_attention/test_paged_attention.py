"""Attention over pages and writes to them: the references against numpy, the kernels against the references."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.backend import tracing_for
from jaxglue.ops.norm_rope import LLAMA_NORM, NORM_ROPE, HeadNorms, NormStyle, norm_and_rotate
from jaxglue.ops.paged_attention import (
    APPEND,
    APPEND_AND_ATTEND,
    PAGED_ATTENTION,
    AppendAndAttendCall,
    AppendCall,
    KVPages,
    PagedCall,
    append,
    append_and_attend,
    append_in_order,
    make_pages,
    paged_attention,
)
from jaxglue.ops.rope import RopeConfig, RopeTables, Rotary, rope_tables

PAGE = 16
FP8 = jnp.float8_e4m3fn


def random_case(S, N, K, H, pages, dtype=jnp.float32, cache_dtype=None, positions=None, page=PAGE):
    """Return (q, cache, tables, positions, sinks) of sequences that end anywhere in their pages."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    tables = 1 + rng.permutation(S * pages).reshape(S, pages).astype(np.int32)
    if positions is None:
        positions = rng.integers(0, pages * page, S, dtype=np.int32)
    every = jnp.repeat(jnp.arange(S * pages + 1), page), jnp.tile(jnp.arange(page), S * pages + 1)
    new = normal(2, (S * pages + 1) * page, K, H)
    cache = make_pages(S * pages + 1, K, page, H, cache_dtype or dtype).write(*new, *every)
    return normal(S, N, H), cache, jnp.asarray(tables), jnp.asarray(positions, jnp.int32), 2 * normal(N)


def attend(case, backend, window=None, has_sinks=False, softcap=None, rows=1):
    *operands, sinks = case
    options = {"window": window, "sinks": sinks if has_sinks else None, "softcap": softcap, "rows": rows}
    run = jax.jit(lambda *operands: paged_attention(*operands, **options, backend=backend))
    return np.asarray(run(*operands), np.float32)


@pytest.mark.parametrize(
    ("window", "has_sinks", "cache_dtype"), [(None, False, None), (20, True, None), (20, True, FP8)]
)
def test_reference_matches_numpy(window, has_sinks, cache_dtype):
    q, cache, tables, positions, sinks = case = random_case(S=3, N=4, K=2, H=8, pages=4, cache_dtype=cache_dtype)
    got, pools = attend(case, "reference", window, has_sinks), cache.read(jnp.arange(13)[None], jnp.float32)
    keys, values = (np.asarray(pool[0]) for pool in pools)
    for s, head in np.ndindex(3, 4):
        own = [np.concatenate([pool[page, head // 2] for page in tables[s]]) for pool in (keys, values)]
        seen = slice(max(0, positions[s] + 1 - (window or 1000)), positions[s] + 1)
        weights = np.exp(own[0][seen] @ q[s, head] / np.sqrt(8))
        want = weights @ own[1][seen] / (weights.sum() + has_sinks * np.exp(sinks[head]))
        np.testing.assert_allclose(got[s, head], want, rtol=1e-4, atol=1e-5)


def kernels(interpreted, **fields):
    from jaxglue.ops.paged_attention.triton import TritonPagedAttention

    return interpreted(TritonPagedAttention)(compute_capability=80, plain=True, **fields)


@pytest.mark.parametrize("group", [1, 4, repeat(5), repeat(8)])
@pytest.mark.parametrize(
    ("window", "has_sinks", "softcap", "programs"),
    [(None, False, None, 1), (20, True, None, 264), repeat(40, True, 3.0, 1), (None, True, 3.0, 264)],
)
def test_interpreted_attention_matches_the_reference(
    group, window, has_sinks, softcap, programs, interpreted, monkeypatch
):
    monkeypatch.setattr("jaxglue.ops.paged_attention.triton._PROGRAMS", programs)  # with 1, one reads all pages
    ends = [0, PAGE - 1, PAGE, 3 * PAGE - 1, 50]  # a single token, and page borders
    case = random_case(5, 2 * group, 2, 24 if group == 5 else 16, 4, positions=ends)
    with PAGED_ATTENTION.using(kernels(interpreted)):
        got = attend(case, "auto", window, has_sinks, softcap)
    np.testing.assert_allclose(got, attend(case, "reference", window, has_sinks, softcap), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [2, repeat(3)])
@pytest.mark.parametrize(("window", "has_sinks", "programs"), [(None, False, 1), (20, True, 264)])
def test_interpreted_attention_of_several_tokens_is_that_of_each(
    rows, window, has_sinks, programs, interpreted, monkeypatch
):
    monkeypatch.setattr("jaxglue.ops.paged_attention.triton._PROGRAMS", programs)
    monkeypatch.setattr("jaxglue.ops.backend.UNTRIED", set())
    ends = [0, PAGE - 2, PAGE - 1, 3 * PAGE - 1, 50, 4 * PAGE - 1]  # pages of the last tokens alone, and beyond a table
    _, *cached, sinks = random_case(len(ends), 6, 2, 16, 4, positions=ends)
    case = random_case(len(ends) * rows, 6, 2, 16, 1)[0], *cached, sinks
    with PAGED_ATTENTION.using(kernels(interpreted)):
        got = attend(case, "auto", window, has_sinks, rows=rows)
    cache, tables, positions = cached
    for row in range(rows):
        own = case[0][row::rows], cache, tables, jnp.minimum(positions + row, 4 * PAGE - 1), sinks
        seen = np.asarray(positions + row < 4 * PAGE)  # others are nobody's
        want = attend(own, "reference", window, has_sinks)
        np.testing.assert_allclose(got[row::rows][seen], want[seen], rtol=1e-4, atol=1e-5)


def test_interpreted_attention_splits_pages_into_steps_and_shares(interpreted, monkeypatch):
    from jaxglue.ops.paged_attention import triton

    monkeypatch.setattr(triton, "_PROGRAMS", 1)
    monkeypatch.setattr(triton, "_LONGEST", 2 * PAGE)
    case = random_case(3, 4, 2, 16, 5, positions=[70, 3, 40])
    with PAGED_ATTENTION.using(kernels(interpreted, tiles=triton.PagedTiles(tokens=8, num_warps=1))):
        got = attend(case, "auto", None, True)
    np.testing.assert_allclose(got, attend(case, "reference", None, True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", [jnp.float32, FP8])
def test_interpreted_warps_attend_their_own_tokens(cache_dtype, interpreted):
    from jaxglue.ops.paged_attention.triton import PagedTiles

    ends = [0, 15, 40, 63, 127]  # warps that see nothing, or only later
    case = random_case(5, 8, 2, 16, 2, cache_dtype=cache_dtype, positions=ends, page=64)
    with PAGED_ATTENTION.using(kernels(interpreted, tiles=PagedTiles(tokens=16, num_warps=4))):
        got = attend(case, "auto", 20, True)
    close = {"rtol": 2e-3, "atol": 2e-3} if cache_dtype == FP8 else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(got, attend(case, "reference", 20, True), **close)


def test_interpreted_attention_reads_float8_pages(interpreted):
    case = random_case(3, 8, 2, 16, 4, cache_dtype=FP8)
    with PAGED_ATTENTION.using(kernels(interpreted)):
        got = attend(case, "auto", 20, True)
    np.testing.assert_allclose(got, attend(case, "reference", 20, True), rtol=2e-3, atol=2e-3)  # float16 products


@pytest.mark.parametrize("interprets", [False, True])
def test_garbage_of_a_pages_last_owner_is_not_seen(interpreted, interprets):
    case = random_case(2, 4, 2, 16, 2, positions=[3, 20])
    keys, values = (x.at[case[2][0, 0], :, 4:].set(jnp.nan) for x in (case[1].keys, case[1].values))
    with PAGED_ATTENTION.using(kernels(interpreted) if interprets else None):
        got = attend((case[0], KVPages(keys=keys, values=values), *case[2:]), "auto")
        np.testing.assert_allclose(got, attend(case, "auto"), rtol=1e-6)


def append_case(T, N, K, H, cache_dtype=jnp.float32, style=LLAMA_NORM, part=1.0):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((T, heads, H)), jnp.float32) for heads in (N, K, K))
    norms = HeadNorms(*jnp.asarray(rng.standard_normal((2, H)), jnp.float32), 1e-6, style)
    rotary = Rotary(RopeConfig(rope_theta=100.0, partial_rotary_factor=part), H)
    positions = jnp.asarray(rng.integers(0, 60, (1, T)), jnp.int32)
    rope = RopeTables((rotary,), (rope_tables(positions, rotary.config, H),))
    pages, offsets = jnp.asarray(1 + rng.permutation(T), jnp.int32), jnp.asarray(rng.integers(0, PAGE, T), jnp.int32)
    return (q, k, v, make_pages(T + 1, K, PAGE, H, cache_dtype), pages, offsets, rope), rotary, norms


def mostly_close(got, want):
    assert np.isclose(got, want, rtol=1e-5, atol=1e-6).mean() > 0.98


@pytest.mark.parametrize(
    ("group", "window", "has_sinks", "softcap", "rotates", "cache_dtype"),
    [
        repeat(4, None, False, None, True, jnp.float32),
        (5, 20, True, 3.0, True, jnp.float32),
        repeat(1, None, True, None, False, jnp.float32),
        repeat(4, 20, True, None, True, FP8),
    ],
)
def test_a_token_attended_as_it_is_written_equals_two_passes(
    group, window, has_sinks, softcap, rotates, cache_dtype, interpreted, monkeypatch
):
    monkeypatch.setattr("jaxglue.ops.paged_attention.triton._PROGRAMS", 1)
    page = 64  # two warps have parts of it
    positions = [0, 1, page - 1, page, 3 * page - 1, 200]
    _, cache, tables, positions, sinks = random_case(
        6, 2 * group, 2, 16, 4, cache_dtype=cache_dtype, positions=positions, page=page
    )
    (q, k, v, _, _, _, rope), rotary, norms = append_case(6, 2 * group, 2, 16)
    rows = jnp.arange(6)
    places = tables[rows, positions // page], positions % page, rope, rotary if rotates else None, norms, 1.0
    options = {"window": window, "sinks": sinks if has_sinks else None, "softcap": softcap}

    own = kernels(interpreted)

    def run(at_once):
        with APPEND_AND_ATTEND.using(at_once), APPEND.using(own), PAGED_ATTENTION.using(own):
            return append_and_attend(q, k, v, cache, *places, tables, positions, **options)

    (got, written), (want, expected) = run(own), run(None)
    close = {"rtol": 2e-3, "atol": 2e-3} if cache_dtype == FP8 else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(got, want, **close)
    for array, other in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        mostly_close(np.asarray(array, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("cache_dtype", [jnp.float32, FP8])
@pytest.mark.parametrize(
    ("group", "has_norms", "rotates"),
    [(4, True, True), repeat(5, False, True), (1, True, False), repeat(1, False, False)],
)
def test_interpreted_append_matches_the_reference(group, has_norms, rotates, cache_dtype, interpreted):
    style = LLAMA_NORM if group == 4 else NormStyle(1.0, False)
    arrays, rotary, norms = append_case(5, 2 * group, 2, 24 if group == 5 else 16, cache_dtype, style)
    call = partial(append, *arrays, rotary if rotates else None, norms if has_norms else None, 0.5)
    want = call(backend="reference")
    with APPEND.using(kernels(interpreted)):
        got = call()
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got[:2], want[:2])
    jax.tree.map(close, got[2].key_scales, want[2].key_scales)
    near = close if cache_dtype == jnp.float32 else mostly_close  # the interpreter rounds a few float8 values wrongly
    everything = jnp.arange(6)[None]
    jax.tree.map(near, got[2].read(everything, jnp.float32), want[2].read(everything, jnp.float32))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), want)


def test_append_rotates_and_writes_to_its_places():
    (q, k, v, cache, pages, offsets, rope), rotary, norms = append_case(5, 4, 2, 16)
    rotated, _, cache = append(q, k, v, cache, pages, offsets, rope, rotary, norms, 2.0)
    want = norm_and_rotate(q[None], k[None], rope, rotary, norms=norms)
    np.testing.assert_allclose(rotated, 2 * want[0][0], rtol=1e-6)
    for token in range(5):
        np.testing.assert_array_equal(cache.keys[pages[token], :, offsets[token]], want[1][0, token])
        np.testing.assert_array_equal(cache.values[pages[token], :, offsets[token]], v[token])
    assert int((np.abs(cache.values).sum((1, 3)) > 0).sum()) == 5


def rotated_and_written(rotary, norms, q, k, v, cache, pages, offsets, rope):
    """Return queries and the cache of `append_in_order`, by a rotation and then writes."""
    q, k = norm_and_rotate(q[None], k[None], rope, rotary, norms=norms, factor=0.5)
    return q[0], append(q[0], k[0], v, cache, pages, offsets, rope, None)[2]


def compare_rotated(arrays, rotary, norms):
    got = jax.jit(lambda *new: append_in_order(*new, rotary, norms, 0.5))(*arrays)
    want = jax.jit(partial(rotated_and_written, rotary, norms))(*arrays)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (x, y))), got, want)


@pytest.mark.parametrize(("group", "has_norms", "part"), [(4, True, 1.0), repeat(5, False, 1.0), (1, True, 0.5)])
def test_rotation_with_writes_to_the_cache_has_the_bits_of_both(group, has_norms, part, interpreted):
    from jaxglue.ops.norm_rope.triton import TritonNormRope
    from jaxglue.ops.paged_attention.triton import TritonTiledPages

    arrays, rotary, norms = append_case(5, 2 * group, 2, 24 if group == 5 else 16, part=part)
    rotation, pages = (interpreted(kind)(compute_capability=90) for kind in (TritonNormRope, TritonTiledPages))
    with NORM_ROPE.using(rotation), PAGED_ATTENTION.using(pages), APPEND.using(kernels(interpreted)):
        compare_rotated(arrays, rotary, norms if has_norms else None)


@pytest.mark.gpu
@pytest.mark.parametrize(("has_norms", "part"), [(True, 1.0), (False, 1.0), (True, 0.5)])
def test_rotation_with_writes_to_the_cache_has_the_bits_of_both_on_a_gpu(has_norms, part):
    (*new, _, pages, offsets, rope), rotary, norms = append_case(64, 32, 8, 128, part=part)
    cache, new = make_pages(65, 8, PAGE, 128, jnp.bfloat16), [x.astype(jnp.bfloat16) for x in new]
    compare_rotated((*new, cache, pages, offsets, rope), rotary, norms if has_norms else None)


def test_float8_pages_need_scales():
    case = random_case(2, 4, 2, 16, 2, cache_dtype=FP8)
    bare = KVPages(keys=case[1].keys, values=case[1].values)
    with pytest.raises(ValueError, match="scales"):
        paged_attention(case[0], bare, *case[2:4])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 32, 8, 128, 40), (1, 64, 8, 64, 300), (5, 24, 8, 128, 33), (9, 16, 8, 256, 20)])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (128, True)])
@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, FP8])
def test_kernel_matches_the_reference_on_a_gpu(sizes, window, has_sinks, cache_dtype):
    half = random_case(*sizes, dtype=jnp.bfloat16, cache_dtype=cache_dtype)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, half)
    got, want = attend(half, "triton", window, has_sinks), attend(exact, "reference", window, has_sinks)
    assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 16, 4, 256, 20), (5, 32, 8, 128, 300)])
@pytest.mark.parametrize("window", [None, 128])
def test_attention_of_several_tokens_is_that_of_each_on_a_gpu(sizes, window, monkeypatch):
    monkeypatch.setattr("jaxglue.ops.backend.UNTRIED", set())
    (S, N, K, H, pages), rows = sizes, 3
    positions = np.random.default_rng(1).integers(0, pages * PAGE - rows, S)
    _, *cached, sinks = random_case(*sizes, jnp.bfloat16, positions=positions)
    case = random_case(S * rows, N, K, H, 1, jnp.bfloat16)[0], *cached, sinks
    got, want = (attend(case, backend, window, rows=rows) for backend in ("triton", "reference"))
    assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize(("turning", "launches"), [(1.0, 2), repeat(0.25, 3)])
@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, repeat(FP8)])
def test_kernels_compile_for_a_gpu_and_write_in_place(h200, cache_dtype, turning, launches):
    """One pass norms, rotates and writes; heads of which a part turns are written by another."""
    S, N, K, H = 64, 32, 8, 128
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=h200)  # noqa: E731
    cache = jax.eval_shape(lambda: make_pages(100, K, 64, H, cache_dtype))
    cache = jax.tree.map(lambda x: of(*x.shape, dtype=x.dtype), cache)
    rotary = Rotary(RopeConfig(rope_theta=100.0, partial_rotary_factor=turning), H)
    ints = partial(of, dtype=jnp.int32)

    def step(q, k, v, cache, tables, positions, weights, sinks):
        rope = RopeTables((rotary,), (rope_tables(positions[None], rotary.config, H),))
        pages, offsets = tables[jnp.arange(S), positions // 64], positions % 64
        q, _, cache = append(q, k, v, cache, pages, offsets, rope, rotary, HeadNorms(*weights, 1e-6))
        return paged_attention(q, cache, tables, positions, window=128, sinks=sinks), cache

    new = of(S, N, H), of(S, K, H), of(S, K, H)
    with tracing_for((9, 0)):
        jitted = jax.jit(step, donate_argnums=3)
        program = jitted.lower(*new, cache, ints(S, 8), ints(S), (of(H), of(H)), of(N)).compile()
    text = program.as_text()
    assert text.count("triton_kernel_call_ffi") == launches
    assert "scatter(" not in text
    assert not [line for line in text.splitlines() if " copy(" in line and "[100,8,64" in line], "the cache is copied"


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, FP8])
def test_a_token_attended_as_it_is_written_equals_two_passes_on_a_gpu(cache_dtype):
    S, N, K, H, pages = 64, 32, 8, 128, 20
    positions = np.random.default_rng(1).integers(0, pages * PAGE, S, dtype=np.int32)
    case = random_case(S, N, K, H, pages, jnp.bfloat16, cache_dtype, positions)
    _, cache, tables, positions, _ = case
    (q, k, v, _, _, _, rope), rotary, norms = append_case(S, N, K, H)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    rows = jnp.arange(S)
    places = tables[rows, positions // PAGE], positions % PAGE, rope, rotary, norms, 1.0
    call = AppendAndAttendCall(
        append=AppendCall(dtype=q.dtype, cache=cache, rotary=rotary, style=norms.style),
        attend=PagedCall(dtype=q.dtype, cache=cache),
        query_shape=q.shape,
        pages=pages,
    )
    assert APPEND_AND_ATTEND.load(call) is not None
    got, written = append_and_attend(q, k, v, cache, *places, tables, positions)
    with APPEND_AND_ATTEND.using(None):
        want, expected = append_and_attend(q, k, v, cache, *places, tables, positions)
    difference = np.linalg.norm(np.asarray(got - want, np.float32)) / np.linalg.norm(np.asarray(want, np.float32))
    assert difference < 0.01
    for array, other in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(other, np.float32))
