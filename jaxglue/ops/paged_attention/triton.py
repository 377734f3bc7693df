"""Launches of the Triton kernels, and their tiles."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Float

from jaxglue.ops import backend
from jaxglue.ops.attention.kernels import AttentionKernelSpec
from jaxglue.ops.attention.tiles import AttentionTiles, kernel_tiles
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.norm_rope import LLAMA_NORM, HeadNorms
from jaxglue.ops.norm_rope.triton import head_blocks, head_spec
from jaxglue.ops.paged_attention import kernels, latent_kernels, tiled_kernels
from jaxglue.ops.paged_attention.latent import LatentPages
from jaxglue.ops.paged_attention.pages import KVPages

_PROGRAMS = 264
"""Programs that fill a GPU: few sequences are split among that many."""
_LONGEST = 4096
"""Tokens from which a share is split, so that one long sequence does not keep the others waiting."""


_LATENT_HEADS, _LATENT_TOKENS = 32, 32
"""Heads of a program over latents, whose sums are wide, and tokens in a step."""
_LATENT_SPLITS = 64
"""Most programs that share a sequence's latents: to add up the wide sums of more takes longer than to read more."""
_COMBINED = 128
"""Columns of the shares that a program adds up; those of latents, 512, with all shares would not fit its registers."""
_VALUES = 8192
"""Values of keys in a step, so that wide heads fit into shared memory."""
_AHEAD_STAGES = 3
"""Stages of tiles of a token whose pages are known before: a multiprocessor has place for three programs."""
_FEWEST = 16
"""Tokens of a warp in a step: the least that tensor cores multiply."""


@dataclass(frozen=True, kw_only=True)
class PagedTiles:
    """How a program reads pages."""

    tokens: int
    """Keys of a warp in a step; those of all warps are at most a page's."""
    num_warps: int
    """Four, of 16 tokens each, take 1.5 times as long: Triton orders shared memory so that a warp's reads conflict."""
    num_stages: int = 3

    def constants(self, page: int, H: int, G: int) -> dict[str, int]:
        """Return a kernel's blocks for pages and heads of these sizes."""
        warps = min(self.num_warps, page // _FEWEST)
        tokens = min(self.tokens, page // warps, max(_FEWEST, _VALUES // H // warps))
        return {"BLOCK_T": tokens, "WARPS": warps, "BLOCK_G": max(8, triton.next_power_of_2(G))}


FEW_PROGRAMS, FEW_FP8_PROGRAMS = (PagedTiles(tokens=32, num_warps=2, num_stages=stages) for stages in (2, 4))
"""Tiles of fewer programs than `_MANY`, as measured on an H200 with heads of 128: all must run at once, and with more
stages shared memory in 16 bits holds two programs a multiprocessor, where 64 sequences of 8 heads are four."""
MANY_PROGRAMS, MANY_FP8_PROGRAMS = PagedTiles(tokens=32, num_warps=1), PagedTiles(tokens=64, num_warps=1)
_MANY = 1024


@dataclass(frozen=True, kw_only=True)
class TritonPagedAttention(Launcher):
    """`paged_attention` and `append` by our own kernels."""

    tiles: PagedTiles | None = None
    """Tiles; None takes those that suit the call."""
    plain: bool = False
    """Whether kernels do without instructions that the interpreter lacks."""

    def attend(
        self, q, cache: KVPages, tables, positions, *, window: int | None, sinks, softcap: float | None, rows: int = 1
    ):
        """See `paged_attention`."""
        (M, N, H), (_, K, page, _), (S, P) = q.shape, cache.keys.shape, tables.shape
        splits, least = _splits(S * K, P, page)
        G, tiles = N // K, self._tiles(S * K * splits, cache)
        sizes = {"P": P, "K": K, "G": G, "H": H, "PAGE": page, "WINDOW": window or 0, "SPLITS": splits, "LEAST": least}
        columns = triton.next_power_of_2(H)
        constants = sizes | {"SCALE": H**-0.5, "CAP": softcap or 0.0, "BLOCK_H": columns, "PLAIN": self.plain}
        constants |= tiles.constants(page, columns, rows * G) | {"ROWS": rows}
        shape = (M, N, H) if splits == 1 else (M, K, splits, G, H)
        out_type = jax.ShapeDtypeStruct(shape, q.dtype if splits == 1 else jnp.float32)
        lse_type = jax.ShapeDtypeStruct((1,) if splits == 1 else (M, K, splits, G), jnp.float32)
        arrays = q, cache.keys, cache.values, cache.key_scales, cache.value_scales, tables, positions
        cost = KernelCost(kind=KernelKind.ATTENTION_FORWARD)
        out, lse = self._launch(
            kernels.paged_kernel,
            (*arrays, sinks),
            (out_type, lse_type),
            (S * K, splits),
            constants,
            constants["WARPS"],
            tiles.num_stages,
            cost=cost,
        )
        return out if splits == 1 else self._combine(out, lse, sinks, q)

    def _tiles(self, programs: int, cache: KVPages) -> PagedTiles:
        if self.tiles is not None:
            return self.tiles
        few, many = FEW_FP8_PROGRAMS, MANY_FP8_PROGRAMS
        if cache.key_scales is None:
            few, many = FEW_PROGRAMS, MANY_PROGRAMS
        return few if programs < _MANY else many

    def append_and_attend(
        self, q, k, v, cache: KVPages, pages, offsets, turns, norms, tables, positions, *, window, sinks, softcap
    ):
        """See `append_and_attend`: one launch."""
        (S, N, H), (_, K, page, _) = q.shape, cache.keys.shape
        G, (cos, sin), tiles = N // K, turns or (None, None), self._tiles(S * K, cache)
        constants = {"P": tables.shape[1], "K": K, "G": G, "H": H, "PAGE": page, "WINDOW": window or 0}
        constants |= {"SCALE": H**-0.5, "CAP": softcap or 0.0, "ROTATES": turns is not None, **_norm_constants(norms)}
        constants |= tiles.constants(page, H, G) | {"PLAIN": self.plain}
        written, out = _written(cache), jax.new_ref(jax.lax.empty(q.shape, q.dtype))
        q_weight, k_weight = (None, None) if norms is None else norms.weights
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "q_weight": q_weight,
            "k_weight": k_weight,
            "cos": cos,
            "sin": sin,
            "pages": pages,
            "offsets": offsets,
            "tables": tables,
            "positions": positions,
            "sinks": sinks,
            **written,
            "out": out,
        }
        cost = KernelCost(kind=KernelKind.ATTENTION_FORWARD)
        kernel, compiled = kernels.append_attend_kernel, (constants["WARPS"], tiles.num_stages)
        self._launch(kernel, arrays, (), (S * K,), constants, *compiled, cost=cost)
        return jax.freeze(out), _frozen(written)

    def attend_latents(self, q, cache: LatentPages, tables, positions, *, rank: int, scale: float):
        """See `latent_attention`."""
        (S, N, W), (_, page, _), P = q.shape, cache.tokens.shape, tables.shape[1]
        heads = min(max(16, triton.next_power_of_2(N)), _LATENT_HEADS)
        groups = triton.cdiv(N, heads)
        splits, least = _splits(S * groups, P, page)
        splits = min(splits, _LATENT_SPLITS)
        constants = {"P": P, "N": N, "TURNING": W - rank, "RANK": rank, "PAGE": page, "SPLITS": splits, "LEAST": least}
        constants |= {"SCALE": scale, "BLOCK_N": heads, "BLOCK_R": max(16, triton.next_power_of_2(rank))}
        constants |= {"BLOCK_E": max(16, triton.next_power_of_2(W - rank)), "BLOCK_T": min(_LATENT_TOKENS, page)}
        types = (
            jax.ShapeDtypeStruct(*(((S, N, rank), q.dtype) if splits == 1 else ((S, 1, splits, N, rank), jnp.float32))),
            jax.ShapeDtypeStruct((1,) if splits == 1 else (S, 1, splits, N), jnp.float32),
        )
        arrays, cost = (q, cache.tokens, tables, positions), KernelCost(kind=KernelKind.ATTENTION_FORWARD)
        grid = S * groups, splits
        out, lse = self._launch(latent_kernels.latent_kernel, arrays, types, grid, constants, 4, 3, cost=cost)
        return out if splits == 1 else self._combine(out, lse, None, jax.ShapeDtypeStruct((S, N, rank), q.dtype))

    def _combine(self, parts, lse, sinks, q) -> Float[Array, "S N H"]:
        S, K, splits, G, H = parts.shape
        constants = {"K": K, "G": G, "H": H, "SPLITS": splits}
        columns = min(triton.next_power_of_2(H), _COMBINED)
        constants |= {"BLOCK_S": triton.next_power_of_2(splits), "BLOCK_H": columns}
        out_type, cost = shape_dtype_of(q), KernelCost(kind=KernelKind.ROWS)
        arrays = parts, lse, sinks
        return self._launch(
            kernels.combine_kernel, arrays, (out_type,), (S * K, G, triton.cdiv(H, columns)), constants, cost=cost
        )[0]

    def append(self, q, k, v, cache: KVPages, pages, offsets, turns, norms: HeadNorms | None):
        """See `append`; `turns` are cosines and sines, or None for no rotation."""
        (T, N, H), K = q.shape, k.shape[1]
        G, (cos, sin) = N // K, turns or (None, None)
        q_weight, k_weight = (None, None) if norms is None else norms.weights
        constants = {"K": K, "G": G, "H": H, "PAGE": cache.page, "ROTATES": turns is not None, **_norm_constants(norms)}
        constants |= {"BLOCK_G": triton.next_power_of_2(G), "BLOCK_H": triton.next_power_of_2(H // 2)}
        written, outs = _written(cache), [jax.new_ref(jax.lax.empty(x.shape, x.dtype)) for x in (q, k)]
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "q_weight": q_weight,
            "k_weight": k_weight,
            "cos": cos,
            "sin": sin,
            "pages": pages,
            "offsets": offsets,
            **written,
            "q_out": outs[0],
            "k_out": outs[1],
        }
        cost = KernelCost(kind=KernelKind.ROWS, bytes=2 * sum(x.size * x.dtype.itemsize for x in (q, k, v)))
        self._launch(kernels.append_kernel, arrays, (), (T, K), constants, 1, cost=cost)
        q, k = map(jax.freeze, outs)
        return q, k, _frozen(written)


@dataclass(frozen=True, kw_only=True)
class TritonTiledPages(Launcher):
    """`paged_attention` with `forks` by our own kernel, in the tiles of training's."""

    tiles: AttentionTiles | None = None
    """Tiles; None takes those of `kernel_tiles`, whose keys are `key_tile`."""

    def attend(
        self, q, cache: KVPages, tables, positions, forks, *, window: int | None = None, sinks, softcap: float | None
    ):
        """See `paged_attention`."""
        (S, N, H), (_, K, page, _) = q.shape, cache.keys.shape
        tiles = self.tiles or kernel_tiles((self.compute_capability // 10, self.compute_capability % 10), H).forward
        spec = AttentionKernelSpec(
            T=1,
            S=tables.shape[1] * page,
            K=K,
            V=K,
            G=N // K,
            P=N // K,
            H=H,
            values=H,
            width=triton.next_power_of_2(H),
            scale=H**-0.5,
            window=window or 0,
            forks=True,
            softcap=softcap,
            has_sinks=sinks is not None,
            block_m=tiles.block_m,
            block_n=tiles.block_n,
        )
        arrays = q, cache.keys, cache.values, tables, positions, forks, q if sinks is None else sinks
        ahead = tiles.block_n <= page and "pages looked up a tile before" not in backend.UNTRIED
        constants = {"TABLE": tables.shape[1], "PAGE": page, "AHEAD": ahead, "spec": spec}
        stages = _AHEAD_STAGES if ahead and self.tiles is None else tiles.num_stages
        compiled, cost = (tiles.num_warps, stages), KernelCost(kind=KernelKind.ATTENTION_FORWARD)
        out = (shape_dtype_of(q),)
        return self._launch(tiled_kernels.tiled_kernel, arrays, out, (S * K,), constants, *compiled, cost=cost)[0]

    def append(self, q, k, v, cache: KVPages, pages, offsets, turns, norms: HeadNorms | None):
        """Return rotated queries and the cache of `append_in_order`; `turns` are cosines and sines."""
        (T, N, H), K, (cos, sin) = q.shape, k.shape[1], (x.reshape(len(q), -1) for x in turns)
        eps, style = (None, LLAMA_NORM) if norms is None else (norms.eps, norms.style)
        constants = {"N": N, "K": K, "PAGE": cache.page, "WIDTH": triton.next_power_of_2(H), **head_blocks(N, K)}
        constants["spec"] = head_spec(H, 2 * cos.shape[-1], eps, style)
        written, out = _written(cache), jax.new_ref(jax.lax.empty((T, N * H), q.dtype))
        weights = (cos, cos) if norms is None else norms.weights  # unused without a norm
        rows = [x.reshape(T, -1) for x in (q, k, v)]
        arrays = (*rows, *weights, cos, sin, pages, offsets, written["keys"], written["values"], out)
        cost = KernelCost(kind=KernelKind.ROWS, bytes=2 * sum(x.size * x.dtype.itemsize for x in rows))
        self._launch(tiled_kernels.rotate_append_kernel, arrays, (), (T,), constants, cost=cost)
        return jax.freeze(out).reshape(q.shape), _frozen(written)


def _written(cache: KVPages) -> dict[str, jax.Ref | None]:
    """Return references to a cache's arrays, which a kernel writes, by name; None for those that it has not."""
    return {
        name: None if (array := getattr(cache, name)) is None else jax.new_ref(array)
        for name in ("key_scales", "value_scales", "keys", "values")
    }


def _frozen(written: dict[str, jax.Ref | None]) -> KVPages:
    """Return the cache after its references were written."""
    arrays = {name: jax.freeze(ref) for name, ref in written.items() if ref is not None}
    return KVPages(**arrays)


def _norm_constants(norms: HeadNorms | None) -> dict[str, float | bool]:
    """Return the constants of norms, of whose styles `APPEND` refuses all that these do not tell."""
    style = LLAMA_NORM if norms is None else norms.style
    eps = 0.0 if norms is None else norms.eps
    return {"EPS": eps, "OFFSET": style.offset, "ROUNDS_FIRST": style.rounds_first}


def is_split(programs: int, pages: int, page: int) -> bool:
    """Return whether several programs share a sequence's pages."""
    return _splits(programs, pages, page)[0] > 1


def _splits(programs: int, pages: int, page: int) -> tuple[int, int]:
    """Return the shares of a sequence's pages, and the fewest pages of a share.

    Few sequences are split to fill the GPU; otherwise shares are long, as each takes another program to sum them.
    """
    long = -(-_LONGEST // page)
    filling = -(-_PROGRAMS // programs)
    if filling > 1:
        return min(pages, max(filling, -(-pages // long))), 1
    return -(-pages // long), long
