"""Measure LoRA end to end: a model folder and 10,000 generated chats, through `scripts/train.py`.

    python benchmarks/finetune.py --shapes qwen3-0.6b qwen3-8b --scratch /dev/shm/jaxglue

Each shape runs twice: with an empty compilation cache, then with the filled one.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from measure import write_results

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN = {"tiny": 512, "qwen3-0.6b": 8192, "qwen3-8b": 16384}


def run(*command: str) -> None:
    print("$", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


def measure(shape: str, args: argparse.Namespace) -> list[dict]:
    """Return one result per run: start-up by stage, tokens/s, MFU and peak memory."""
    folder, cache = args.scratch / shape, args.scratch / f"{shape}-xla"
    run("benchmarks/inputs.py", "--shape", shape, "--output", str(folder), "--chats", str(args.chats))
    results = []
    for compilation in ("cold", "warm"):
        output = args.scratch / f"{shape}-run"
        flags = {
            "--model": folder,
            "--data": args.scratch / "chats.jsonl",
            "--seq-len": SEQ_LEN.get(shape, 8192),
            "--steps": args.steps,
            "--output": output,
            "--cache-dir": args.scratch / "tokens",
            "--compilation-cache": cache,
        }
        pairs = [str(part) for flag in flags.items() for part in flag]
        run("scripts/train.py", *pairs, "--overwrite", "--log-every", "5", *args.train_flags)
        summary = json.loads((output / "summary.json").read_text())
        numbers = {name: value for name, value in summary.items() if not isinstance(value, str)}
        results.append({"shape": shape, "compilation": compilation, **numbers})
    shutil.rmtree(folder)
    return results


def table(results: list[dict]) -> str:
    rows = [
        "| model | compilation | start-up s | of which | tokens/s | MFU | peak GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in r["startup_seconds"].items())
        mfu = "-" if r["mfu"] is None else f"{r['mfu']:.1%}"
        total = sum(r["startup_seconds"].values())
        rows.append(
            f"| {r['shape']} | {r['compilation']} | {total:.1f} | {stages} | {r['tokens_per_second']:,.0f} "
            f"| {mfu} | {r['peak_memory_gb']:.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["tiny"])
    parser.add_argument("--scratch", type=Path, required=True, help="a folder with room for the weights")
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("train_flags", nargs="*", help="further flags for scripts/train.py, after --")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    results = [result for shape in args.shapes for result in measure(shape, args)]
    print(table(results))
    if args.json:
        write_results(args.json, results)  # only now: two processes cannot both hold most of the GPU's memory


if __name__ == "__main__":
    main()
