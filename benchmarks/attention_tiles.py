"""Time the Triton kernels of packed attention with heads of 256 by their tiles, the table's first.

python benchmarks/attention_tiles.py --json benchmarks/results/attention_tiles.json

Tiles are block_m/block_n/warps/stages; with k, dk and dv load keys through TMA into registers. A set of tiles compiles
in a thread; its results are compared with those of the table's tiles, which tests compare with float32, and its kernels
are timed one by one in a profile.
"""

import argparse
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from attention import Heads, random_inputs, visible_pairs
from measure import log_normal_lengths, table, write_results
from traces import kernel_milliseconds

from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles, kernel_tiles
from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.segments import BatchKind, pack_segments

HEADS = Heads(N=16, K=8, H=256)
TOKENS, CALLS = 16_384, 8
DOCUMENTS = {"log-normal": log_normal_lengths(TOKENS, 26), "one": [TOKENS]}
PASSES = ("forward", "dq", "dk", "dv")
SETS = [
    ("64/32/4/3", "64/32/4/2", "32/64/4/2/k", "32/64/4/2/k"),
    ("64/64/4/2", "64/32/4/1", "16/64/4/3/k", "32/128/8/3/k"),
    ("64/32/4/2", "128/32/8/2", "32/128/8/2/k", "32/64/4/3/k"),
    ("128/32/8/3", "64/16/4/4", "16/128/8/3/k", "64/128/8/2/k"),
    ("64/64/4/1", "64/16/4/2", "32/64/4/1/k", "32/128/8/2/k"),
]
"""Tiles of the kernels of the forward pass, dq, dk and dv."""


def parse_tiles(text: str) -> AttentionTiles:
    """Read a kernel's tiles."""
    block_m, block_n, warps, stages, *rest = text.split("/")
    sizes = {"block_m": int(block_m), "block_n": int(block_n), "num_warps": int(warps), "num_stages": int(stages)}
    return AttentionTiles(**sizes, k_descriptor=rest == ["k"])


def tiles_text(tiles: AttentionTiles) -> str:
    """Write a kernel's tiles."""
    sizes = tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages
    return "/".join(map(str, sizes)) + "/k" * tiles.k_descriptor


def sets() -> list[AttentionKernelTiles]:
    """Return the table's tiles, and the others."""
    others = (map(parse_tiles, texts) for texts in SETS)
    return [
        kernel_tiles((9, 0), HEADS.H),
        *(AttentionKernelTiles(forward=f, dq=q, dkdv=k, dv=v) for f, q, k, v in others),
    ]


def compiled(tiles: AttentionKernelTiles, arguments: tuple, softcap: float | None):
    """Return the compiled forward and backward pass, or the reason why the tiles do not fit the GPU."""
    from jaxglue.ops.attention.triton import TritonAttention

    spec = FlashSpec(backend=TritonAttention(compute_capability=90, tiles=tiles), window=None, softcap=softcap)

    @jax.jit
    def both(q, k, v, dout, segments):
        out, pull = jax.vjp(lambda *qkv: flash_attention(spec, *qkv, None, segments), q, k, v)
        return out, *pull(dout)

    try:
        return both.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0][:120]


def times(step, arguments: tuple) -> list[float]:
    """Return the milliseconds of each pass's kernel."""
    jax.block_until_ready([step(*arguments) for _ in range(2)])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([step(*arguments) for _ in range(CALLS)])
        found = kernel_milliseconds(folder)
    return [
        sum(ms for name, ms in found.items() if name.startswith(each)) / CALLS for each in map("{}_".format, PASSES)
    ]


def difference(got, expected) -> float:
    """Return the largest norm of a result's difference over the norm of the expected one."""
    norms = [
        jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32))
        for a, b in zip(got, expected, strict=True)
    ]
    return float(max(norms))


def rows(softcap: float | None) -> Iterator[dict]:
    """Yield the times of each set for each distribution of lengths."""
    (q, k, v), _, dout = random_inputs(HEADS, TOKENS)
    packed = {
        name: jax.device_put(pack_segments([lengths], seq_len=TOKENS, kind=BatchKind(False, 32)))
        for name, lengths in DOCUMENTS.items()
    }
    arguments = q, k, v, dout, packed["log-normal"]
    with ThreadPoolExecutor() as pool:
        steps = list(pool.map(partial(compiled, arguments=arguments, softcap=softcap), sets()))
    for name, segments in packed.items():
        pairs, first = visible_pairs(DOCUMENTS[name], None), None
        for tiles, step in zip(sets(), steps, strict=True):
            texts = [tiles_text(each) for each in (tiles.forward, tiles.dq, tiles.dkdv, tiles.dv) if each is not None]
            row = {"documents": name, "softcap": softcap, "tiles": " ".join(texts)}
            if isinstance(step, str):
                yield row | dict.fromkeys((*PASSES, "difference", "TFLOP/s"), step)
                continue
            got = step(q, k, v, dout, segments)
            first = got if first is None else first
            spent = times(step, (q, k, v, dout, segments))
            rate = 14 * pairs * HEADS.N * HEADS.H / sum(spent) / 1e9
            row |= dict(zip(PASSES, (round(ms, 4) for ms in spent), strict=True))
            yield row | {"difference": f"{difference(got, first):.1e}", "TFLOP/s": round(rate)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--softcaps", type=float, nargs="*", default=[], help="measured after none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for softcap in (None, *args.softcaps):
        for row in rows(softcap):
            results.append(row)
            print(*row.values(), sep="  ", flush=True)
            if args.json:
                write_results(args.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
