"""Time the Triton kernels of packed attention with heads of 256 by their tiles, the table's first.

    python benchmarks/attention_tiles.py --json benchmarks/results/attention_tiles.json
    python benchmarks/attention_tiles.py --images --json benchmarks/results/attention_images.json

Tiles are block_m/block_n/warps/stages; with k, dk and dv load keys through TMA into registers, with late a loop's last
matmul runs a tile late, and r is a limit of registers. A set of tiles compiles in a thread; its results are compared
with those of the table's tiles, which tests compare with float32, and its kernels are timed one by one in a profile.

With --images the heads are a vision tower's, of 72, whose patches see all of their image: in one tile of 128 columns,
and in two parts. Times are those of all kernels of a pass; a rate is that of 4·N²·72 FLOPs for each image of N patches
and head forward, and 2.5 times that backward.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from attention import Heads, random_inputs, visible_pairs
from measure import log_normal_lengths, table, write_results
from traces import kernel_milliseconds

from jaxglue.ops.attention import tiles as attention_tiles
from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles, kernel_tiles
from jaxglue.ops.attention.vjp import AttentionBackend, FlashSpec, flash_attention
from jaxglue.ops.segments import BatchKind, PackedSegments, both_ways, pack_segments, segment_bucket

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
TOWER = Heads(N=16, K=16, H=72)
IMAGE_SETS = [
    ("64/32/4/4", "64/32/4/4", "32/64/4/3"),
    ("64/128/4/2", "128/64/8/3", "64/128/8/2"),
    ("128/128/8/2", "64/128/4/2", "64/128/8/3/k"),
    ("64/64/4/2/late", "64/64/4/2/late", "64/64/4/3/k"),
]
"""Tiles of the kernels of the forward pass, dq, and of dk and dv, beside the table's."""
IMAGE_COLUMNS = "forward ms", "both ms", "dq ms", "dkdv ms", "TFLOP/s forward", "TFLOP/s both", "difference"


def parse_tiles(text: str) -> AttentionTiles:
    """Read a kernel's tiles."""
    block_m, block_n, warps, stages, *rest = text.split("/")
    sizes = {"block_m": int(block_m), "block_n": int(block_n), "num_warps": int(warps), "num_stages": int(stages)}
    registers = next((int(part[1:]) for part in rest if part.startswith("r")), None)
    return AttentionTiles(**sizes, registers=registers, late="late" in rest, k_descriptor="k" in rest)


def tiles_text(tiles: AttentionTiles) -> str:
    """Write a kernel's tiles."""
    sizes = tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages
    limit = "" if tiles.registers is None else f"/r{tiles.registers}"
    return "/".join(map(str, sizes)) + "/late" * tiles.late + limit + "/k" * tiles.k_descriptor


def sets() -> list[AttentionKernelTiles]:
    """Return the table's tiles, and the others."""
    others = (map(parse_tiles, texts) for texts in SETS)
    return [
        kernel_tiles((9, 0), HEADS.H),
        *(AttentionKernelTiles(forward=f, dq=q, dkdv=k, dv=v) for f, q, k, v in others),
    ]


def all_tiles(tiles: AttentionKernelTiles) -> str:
    """Write the tiles of all kernels."""
    return " ".join(tiles_text(each) for each in (tiles.forward, tiles.dq, tiles.dkdv, tiles.dv) if each is not None)


def triton(tiles: AttentionKernelTiles) -> AttentionBackend:
    """Return the Triton kernels with these tiles."""
    from jaxglue.ops.attention.triton import TritonAttention

    return TritonAttention(compute_capability=90, tiles=tiles)


def compiled(backend: AttentionBackend, arguments: tuple, softcap: float | None = None):
    """Return the compiled forward and backward pass, or the reason why they do not fit the GPU."""
    spec = FlashSpec(backend=backend, window=None, softcap=softcap)

    @jax.jit
    def both(q, k, v, dout, segments):
        out, pull = jax.vjp(lambda *qkv: flash_attention(spec, *qkv, None, segments), q, k, v)
        return out, *pull(dout)

    try:
        return both.lower(*arguments).compile()
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]


def times(step, arguments: tuple) -> dict[str, float]:
    """Return the milliseconds of each kernel."""
    jax.block_until_ready([step(*arguments) for _ in range(2)])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([step(*arguments) for _ in range(CALLS)])
        return {name: ms / CALLS for name, ms in kernel_milliseconds(folder).items()}


def of_passes(found: dict[str, float], passes: tuple[str, ...]) -> dict[str, float]:
    """Return the milliseconds of each pass's kernel."""
    return {each: round(sum(ms for name, ms in found.items() if name.startswith(f"{each}_")), 4) for each in passes}


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
        steps = list(pool.map(partial(compiled, arguments=arguments, softcap=softcap), map(triton, sets())))
    for name, segments in packed.items():
        pairs, first = visible_pairs(DOCUMENTS[name], None), None
        for tiles, step in zip(sets(), steps, strict=True):
            row = {"documents": name, "softcap": softcap, "tiles": all_tiles(tiles)}
            if isinstance(step, str):
                yield row | dict.fromkeys((*PASSES, "difference", "TFLOP/s"), step)
                continue
            got = step(q, k, v, dout, segments)
            first = got if first is None else first
            spent = of_passes(times(step, (q, k, v, dout, segments)), PASSES)
            rate = 14 * pairs * HEADS.N * HEADS.H / sum(spent.values()) / 1e9
            row |= spent
            yield row | {"difference": f"{difference(got, first):.1e}", "TFLOP/s": round(rate)}


def image_segments(lengths: list[int], slots: int) -> PackedSegments:
    """Return the bounds of images' patches, as kernels read them."""
    packed = pack_segments([lengths], seq_len=sum(lengths), kind=BatchKind(False, slots))
    return both_ways(jax.device_put(packed), None)


def image_steps(arguments: tuple) -> dict[str, Any]:
    """Return compiled passes by kernels, those of heads in one part first."""
    with patch.object(attention_tiles, "MOST_PARTED", 0):
        whole = kernel_tiles((9, 0), TOWER.H)
        steps = {f"in one part, {all_tiles(whole)}": compiled(triton(whole), arguments)}
    others = (map(parse_tiles, texts) for texts in IMAGE_SETS)
    tiles = [
        kernel_tiles((9, 0), TOWER.H),
        kernel_tiles((9, 0), TOWER.H, long=True),
        *(AttentionKernelTiles(forward=f, dq=q, dkdv=k) for f, q, k in others),
    ]
    with ThreadPoolExecutor() as pool:
        parted = pool.map(lambda each: compiled(triton(each), arguments), tiles)
        return steps | {f"in two, {all_tiles(each)}": step for each, step in zip(tiles, parted, strict=True)}


def image_rows(heads: Heads, tokens: int) -> Iterator[dict]:
    """Yield the times of each set of tiles for each row of images."""
    (q, k, v), _, dout = random_inputs(heads, tokens)
    images = {f"{tokens // n} of {n}": [n] * (tokens // n) for n in (64, 256, 1024, 4096) if n <= tokens}
    images["uneven"] = log_normal_lengths(tokens, max(2, tokens // 680))
    first: dict[str, Any] = {}
    most = segment_bucket(max(map(len, images.values())))
    rows = {name: image_segments(lengths, most) for name, lengths in images.items()}
    steps = image_steps((q, k, v, dout, rows["uneven"]))
    for (name, segments), (kernels, step) in itertools.product(rows.items(), steps.items()):
        row = {"images": name, "kernels": kernels}
        if isinstance(step, str):
            yield row | dict.fromkeys(IMAGE_COLUMNS, step)
            continue
        expected = first.setdefault(name, step(q, k, v, dout, segments))
        off = f"{difference(step(q, k, v, dout, segments), expected):.1e}"
        found = times(step, (q, k, v, dout, segments))
        work = 4 * sum(n * n for n in images[name]) * heads.N * heads.H / 1e9
        forward = sum(ms for kernel, ms in found.items() if kernel.startswith("forward_"))
        spent = {
            "forward": round(forward, 4),
            "both": round(sum(found.values()), 4),
            **of_passes(found, ("dq", "dkdv")),
        }
        rates = work / forward if forward else 0, 3.5 * work / spent["both"]
        yield row | dict(zip(IMAGE_COLUMNS, (*spent.values(), *map(round, rates), off), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--softcaps", type=float, nargs="*", default=[], help="measured after none")
    parser.add_argument("--images", action="store_true", help="heads of a vision tower, in both directions")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    texts = itertools.chain.from_iterable(rows(softcap) for softcap in (None, *args.softcaps))
    for row in image_rows(TOWER, TOKENS) if args.images else texts:
        results.append(row)
        print(*row.values(), sep="  ", flush=True)
        if args.json:
            write_results(args.json, results)
    print(table(results))


if __name__ == "__main__":
    main()
