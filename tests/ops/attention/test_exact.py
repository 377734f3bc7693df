"""One order of sums over keys: packed rows, in any layout, and pages give a query the same bits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.ops.attention import ATTENTION, packed_attention
from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles, kernel_tiles, key_tile
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.paged_attention import PAGED_ATTENTION, PagedCall, make_pages, paged_attention
from jaxglue.ops.segments import aligned, pack_forks

K, H, PAGE = 2, 16, 64
FORKS = [(37, 45, 3, 70), (5, 9), (0, 20, 1), (64, 33, 64)]
"""Tokens of beginnings and of their continuations."""


class Text(NamedTuple):
    """A continuation with its beginning: queries, keys and values [tokens, heads, H], and the beginning's tokens."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    fork: int


def texts(forks, group, dtype=np.float32, head_dim=H) -> list[list[Text]]:
    """Draw the continuations of each beginning, which they share."""
    rng, found = np.random.default_rng(0), []
    heads = (K * group, K, K)
    for shared, *sizes in forks:
        common = [rng.standard_normal((shared, n, head_dim)).astype(dtype) for n in heads]
        found.append([])
        for size in sizes:
            own = [rng.standard_normal((size, n, head_dim)).astype(dtype) for n in heads]
            found[-1].append(Text(*(np.concatenate(pair) for pair in zip(common, own, strict=True)), shared))
    return found


def packed(
    groups: list[list[Text]], sinks, tile: int, window: int | None = None, *, exact: bool = True
) -> list[np.ndarray]:
    """Return attention's output of each continuation's own tokens, in the order of the groups, from one packed row."""
    forks = [(group[0].fork, *(len(text.q) - text.fork for text in group)) for group in groups]
    T = aligned(sum(aligned(size, tile) for fork in forks for size in fork) + 1, 64)
    rows = [np.zeros((T, *part.shape[1:]), part.dtype) for part in groups[0][0][:3]]
    begin, spans = 0, []
    for group in groups:
        fork = group[0].fork
        for row, part in zip(rows, group[0][:3], strict=True):
            row[begin : begin + fork] = part[:fork]
        begin += aligned(fork, tile)
        for text in group:
            spans.append(slice(begin, begin + len(text.q) - fork))
            for row, part in zip(rows, text[:3], strict=True):
                row[spans[-1]] = part[fork:]
            begin += aligned(len(text.q) - fork, tile)
    segments = jax.device_put(pack_forks([forks], seq_len=T, tile=tile))
    out = packed_attention(*(jnp.asarray(row[None]) for row in rows), segments, window=window, sinks=sinks, exact=exact)
    return [np.asarray(out)[0, span] for span in spans]


def in_pages(groups: list[list[Text]], sinks, window: int | None = None) -> list[np.ndarray]:
    """Return attention's output of each continuation's own tokens, each as the last one of a sequence in pages."""
    every = [text for group in groups for text in group]
    pages = [-(-len(text.q) // PAGE) for text in every]
    order = np.random.default_rng(1).permutation(sum(pages)) + 1
    cache, tables, first = make_pages(len(order) + 1, K, PAGE, every[0].q.shape[2], every[0].q.dtype), [], 0
    for text, count in zip(every, pages, strict=True):
        own, first = order[first : first + count], first + count
        at = np.arange(len(text.q))
        cache = cache.write(jnp.asarray(text.k), jnp.asarray(text.v), own[at // PAGE], at % PAGE)
        tables.append(np.pad(own, (0, max(pages) - count)))
    counts = [len(text.q) - text.fork for text in every]
    positions = np.concatenate([np.arange(text.fork, len(text.q)) for text in every])
    queries = np.concatenate([text.q[text.fork :] for text in every])
    of_each = np.repeat(np.array(tables), counts, axis=0), np.repeat([text.fork for text in every], counts)
    rows = (jnp.asarray(x, jnp.int32) for x in (of_each[0], positions, of_each[1]))
    tables, positions, forks = rows
    options = {"window": window, "sinks": sinks, "forks": forks}
    out = paged_attention(jnp.asarray(queries), cache, tables, positions, **options)
    return np.split(np.asarray(out), np.cumsum(counts)[:-1])


def layouts(groups):
    """Return the groups in other orders, with the continuations of each in other orders, and alone."""
    turned = [group[::-1] for group in groups[::-1]]
    alone = [[text] for group in groups for text in group]
    return turned, alone


def assert_equal(groups, sinks, tile, window=None) -> list[np.ndarray]:
    """Compare each continuation's output in all layouts and in pages, and return it."""
    want = packed(groups, sinks, tile, window)
    turned, alone = layouts(groups)
    for other, backwards in ((packed(turned, sinks, tile, window), True), (packed(alone, sinks, tile, window), False)):
        for own, again in zip(want, other[::-1] if backwards else other, strict=True):
            np.testing.assert_array_equal(own, again)
    for own, paged in zip(want, in_pages(groups, sinks, window), strict=True):
        np.testing.assert_array_equal(own, paged)
    return want


@pytest.mark.parametrize(
    ("group", "has_sinks", "dtype", "head_dim", "window"),
    [
        repeat(4, True, np.float32, H, None),
        repeat(1, False, jnp.bfloat16, H, None),
        (2, True, np.float32, 32, 24),
        repeat(1, False, np.float32, 128, 40),
        repeat(2, False, np.float32, 128, None),
    ],
)
def test_reference_gives_a_query_the_same_bits_in_any_row_and_in_pages(group, has_sinks, dtype, head_dim, window):
    """In float32, as rounding to bfloat16 would hide most sums of another order."""
    groups = texts(FORKS, group, dtype, head_dim)
    sinks = jnp.asarray(np.random.default_rng(2).standard_normal(K * group), jnp.float32) if has_sinks else None
    assert_equal(groups, sinks, key_tile(head_dim), window)


@pytest.mark.parametrize(("head_dim", "window"), [repeat(16, None), (64, None), (16, 30)])
def test_tiles_attend_as_the_reference_does(head_dim, window):
    groups = texts(FORKS, 2, head_dim=head_dim)
    sinks, tile = jnp.asarray([1.0, -2.0, 0.5, 3.0]), key_tile(head_dim)
    plain = packed(groups, sinks, tile, window, exact=False)
    for own, other in zip(packed(groups, sinks, tile, window), plain, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_tiles_that_begin_elsewhere_change_bits():
    groups = texts(FORKS, 2)
    unaligned = [packed(rows, None, 1) for rows in (groups, layouts(groups)[1])]
    assert any((own != other).any() for own, other in zip(*unaligned, strict=True))


@pytest.fixture
def tiles():
    own = AttentionTiles(block_m=16, block_n=key_tile(H), num_warps=4, num_stages=1)
    return AttentionKernelTiles(forward=own, dq=own, dkdv=own)


@pytest.fixture
def products_in_float64(monkeypatch):
    """Let Triton's interpreter multiply so that no order of sums changes a bit, as NumPy's of float32 has several."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self, a, b, d, *_):
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@repeats_parts_of("test_reference_gives_a_query_the_same_bits_in_any_row_and_in_pages")
@pytest.mark.usefixtures("products_in_float64")
@pytest.mark.parametrize(
    ("group", "has_sinks", "window"), [(2, True, 24), repeat(4, True, None), repeat(1, False, None)]
)
def test_interpreted_kernels_give_a_query_the_same_bits_in_any_row_and_in_pages(
    group, has_sinks, window, tiles, interpreted, interpreted_backend
):
    from jaxglue.ops.paged_attention.triton import TritonTiledPages

    groups = texts([(90, 6, 2)], group)
    sinks = jnp.asarray(np.random.default_rng(2).standard_normal(K * group), jnp.float32) if has_sinks else None
    rows = interpreted_backend(tiles=tiles, compute_capability=80, aligned=True)
    pages = interpreted(TritonTiledPages)(tiles=tiles.forward, compute_capability=80)
    with ATTENTION.using(rows), PAGED_ATTENTION.using(pages):
        kernels = assert_equal(groups, sinks, key_tile(H), window)
    for own, reference in zip(kernels, packed(groups, sinks, key_tile(H), window), strict=True):
        np.testing.assert_allclose(own, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_are_read_in_the_tiles_of_packed_rows(head_dim):
    assert kernel_tiles((9, 0), head_dim).forward.block_n == key_tile(head_dim)
    call = PagedCall(dtype=jnp.bfloat16, cache=make_pages(2, K, 64, head_dim, jnp.bfloat16), forked=True)
    assert PAGED_ATTENTION.choose((9, 0), call).name == "tiles"


@pytest.mark.parametrize("window", [None, repeat(128)])
def test_pages_in_tiles_compile(window, h200):
    cache = make_pages(9, 8, 64, 128, jnp.bfloat16)
    shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200)  # noqa: E731
    numbers = jnp.zeros(4, jnp.int32)
    arguments = jnp.zeros((4, 32, 128), jnp.bfloat16), cache, jnp.zeros((4, 8), jnp.int32), numbers, numbers
    with tracing_for((9, 0)):
        call = jax.jit(
            lambda q, cache, tables, positions, forks: paged_attention(
                q, cache, tables, positions, forks=forks, window=window
            )
        )
        compiled = call.lower(*jax.tree.map(shaped, arguments)).compile()
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1


def test_packed_windows_in_tiles_compile(h200):
    segments = pack_forks([[(101, 45, 3)]], seq_len=256, tile=key_tile(64))
    shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200)  # noqa: E731
    heads = [jnp.zeros((1, 256, n, 64), jnp.bfloat16) for n in (8, 2, 2)]
    with tracing_for((9, 0)):
        call = jax.jit(lambda q, k, v, segments: packed_attention(q, k, v, segments, window=128, exact=True))
        compiled = call.lower(*jax.tree.map(shaped, (*heads, segments))).compile()
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "group", "has_sinks", "window"),
    [(128, 4, False, None), (64, 8, True, None), (64, 8, True, 128), (256, 2, False, None), (256, 2, False, 100)],
)
def test_kernels_give_a_query_the_same_bits_in_any_row_and_in_pages(head_dim, group, has_sinks, window):
    groups = texts([(237, 145, 83), (5, 90), (700, 300, 41, 64)], group, jnp.bfloat16, head_dim)
    sinks = jnp.asarray(np.random.default_rng(2).standard_normal(K * group), jnp.float32) if has_sinks else None
    assert_equal(groups, sinks, key_tile(head_dim), window)
