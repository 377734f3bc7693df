"""Time the export of a published shape's random weights to GGUF, whole and by step, and its host memory.

    python benchmarks/gguf_export.py --shape qwen3-8b --scratch /dev/shm/gguf --json FILE

Weights are in the page cache. Steps are timed alone, one after another: together they overlap.
"""

import argparse
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import psutil
from inputs import make_model
from measure import table, write_results
from shapes import SHAPES

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf.gguf.export import export_gguf
from jaxglue.hf.gguf.layout import file_tensors
from jaxglue.hf.gguf.vocabulary import vocabulary_metadata
from jaxglue.hf.merge import MergedTensors
from jaxglue.ops.quant.k_quants import BLOCK_BYTES, SUPER_BLOCK, quantize_super_blocks

_BLOCKS = 1 << 14


@contextmanager
def peak_memory():
    """Yield a list that gets this process's largest own memory above the beginning's, in bytes, at the end.

    Mapped files are not counted: they are the page cache.
    """
    process, stop = psutil.Process(), threading.Event()

    def own() -> int:
        info = process.memory_info()
        return info.rss - info.shared

    first = largest = own()

    def sample() -> None:
        nonlocal largest
        while not stop.wait(0.02):
            largest = max(largest, own())

    found: list[int] = []
    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found.append(largest - first)


def seconds(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def steps(folder: Path, scratch: Path, values: int, written: int) -> list[dict]:
    """Return the seconds of each step alone."""
    tensors = MergedTensors(folder)
    matrices = [tensor for tensor in file_tensors(tensors.config, tensors) if len(tensor.shape) > 1]
    block = np.ones((_BLOCKS, SUPER_BLOCK), next(iter(tensors.specs.values())).dtype)
    on_device = jax.device_put(block).block_until_ready()

    def copy() -> None:
        for tensor in matrices:
            for read in tensor.pieces():
                jax.device_put(read()).block_until_ready()

    def quantize(kind: str) -> float:
        quantize_super_blocks(on_device, kind).block_until_ready()
        return seconds(lambda: [quantize_super_blocks(on_device, kind).block_until_ready() for _ in range(8)]) / 8

    def write() -> None:
        chunk = np.ones(1 << 26, np.uint8)
        with (scratch / "written").open("wb") as file:
            for _ in range(written // len(chunk)):
                file.write(chunk)

    found = [
        {"step": "tokens and merges", "s": seconds(lambda: vocabulary_metadata(load_tokenizer(folder), 151936, {2}))},
        {"step": "read and copy to the device", "s": seconds(copy)},
    ]
    for kind in BLOCK_BYTES:
        scale = values / on_device.size
        found.append({"step": f"quantize all to {kind}", "s": quantize(kind) * scale})
    found.append({"step": "write", "s": seconds(write)})
    (scratch / "written").unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="decoder layers, by default the published number")
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for model and file")
    parser.add_argument("--runs", type=int, default=2, help="exports; the first compiles")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}
    folder = args.scratch / args.shape
    if not folder.exists():
        make_model(folder, shape)
    for path in folder.glob("*.safetensors"):  # into the page cache
        with path.open("rb") as file:
            while file.read(1 << 26):
                pass
    rows, size, values = [], 0, 0
    for run in range(args.runs):
        output = args.scratch / "out"
        shutil.rmtree(output, ignore_errors=True)
        with peak_memory() as memory:
            begin = time.perf_counter()
            tensors = MergedTensors(folder)
            file = export_gguf(tensors, tensors.config, load_tokenizer(folder), {2}, args.type, output)
            taken = time.perf_counter() - begin
        size, values = file.stat().st_size, sum(spec.size for spec in tensors.specs.values())
        name = "export, with compilation" if run == 0 else "export"
        rows.append({"step": name, "s": taken, "own memory, GiB": round(memory[0] / 2**30, 2)})
    rows += steps(folder, args.scratch, values, size)
    rows = [{"step": row["step"], "s": round(row["s"], 2), "GiB": row.get("own memory, GiB", "")} for row in rows]
    print(f"{args.shape}: {values / 1e9:.2f}B values to {size / 2**30:.2f} GiB of {args.type}\n")
    print(table(rows))
    if args.json:
        write_results(args.json, rows)


if __name__ == "__main__":
    main()
