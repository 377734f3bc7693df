"""Compare what two checkouts compute: every loss, the trained weights, and the programs that XLA is given.

    python benchmarks/compare_checkouts.py OLD NEW --scratch runs/compare [--old-flags quantize=quantise …]

Each checkout trains the quickstart and tiny models of three families on the CPU, in full, with LoRA (dropout and
accumulation) and on NF4. Losses and weights must be equal to the bit, and the HLO before optimization equal but for
names and metadata. Runs of a commit are kept in the scratch folder and not repeated.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {"llama": "llama_tied_llama3", "qwen3_moe": "qwen3_moe", "gpt_oss": "gpt_oss"}
TINY = {"vocab_size": 512, "max_position_embeddings": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SHARED = {"data": "scripts/quickstart/chats.jsonl", "seq-len": 128, "steps": 20, "batch-size": 2, "log-every": 1}
METHODS = {
    "full": {"method": "full", "random-weights": True, "learning-rate": 1e-3, "dtype": "float32"},
    "lora": {"dropout": 0.1, "gradient-accumulation-steps": 2, "remat": "full"},
    "nf4": {"quantize": "nf4", "remat": "dots"},
}
SMALLEST_PROGRAM = 30
"""Instructions below which a program is host glue, not a layer."""


def own_checkout() -> dict[str, str]:
    """Return the environment variable by which a process finds this checkout's jaxglue first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


@dataclass(frozen=True)
class Case:
    name: str
    flags: dict[str, object]


def cases(models: Path) -> Iterator[Case]:
    """Return the quickstart, then each family's full run, whose result the other methods start from."""
    yield Case("quickstart", {"config": "scripts/configs/quickstart.toml", "log-every": 1})
    for family in FAMILIES:
        for method, flags in METHODS.items():
            folder = models / family if method == "full" else models / f"{family}-trained"
            if method == "nf4" and family != "llama":
                continue  # experts are not held in NF4
            if family != "llama":
                flags = {name: value for name, value in flags.items() if name != "dropout"}  # experts refuse it
            yield Case(f"{family}-{method}", {"model": folder, **SHARED, **flags})


def make_model_folders(folder: Path, tiny: dict[str, int] = TINY) -> None:
    """Write a config with the sizes of `tiny` and the quickstart's tokenizer for each family."""
    for family, golden in FAMILIES.items():
        target = folder / family
        shutil.copytree(ROOT / "scripts/quickstart/model", target, dirs_exist_ok=True)
        config = json.loads((ROOT / "tests/goldens" / golden / "config.json").read_text())
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        vocabulary = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
        sizes = {"moe_intermediate_size": 64, **tiny} | {"vocab_size": -(-vocabulary // 64) * 64, "dtype": "float32"}
        config |= {name: size for name, size in sizes.items() if name in config}
        (target / "config.json").write_text(json.dumps(config))


def run(checkout: Path, case: Case, folder: Path, renamed: dict[str, str]) -> None:
    """Train one case in one checkout; keep metrics, weights and the dumped programs."""
    command = [sys.executable, "scripts/train.py"]
    for flag, value in case.flags.items():
        name = "--" + renamed.get(flag, flag)
        command += [name] if value is True else [name, str(value)]
    command += ["--output", str(folder / "run"), "--compilation-cache", "none", "--cache-dir", str(folder / "tokens")]
    dump = f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(checkout), "XLA_FLAGS": dump}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {case.name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    (folder / "programs").mkdir()
    for path in (folder / "hlo").glob("*before_optimizations.txt"):
        path.rename(folder / "programs" / path.name)
    shutil.rmtree(folder / "hlo")
    (folder / "done").touch()


def losses(folder: Path) -> list[tuple[int, float]]:
    """Every step's loss."""
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, str]:
    """Return a digest of the tensors in each file of the result; its metadata name the base."""
    files = [path for kind in ("adapter", "model") for path in (folder / "run" / kind).glob("*.safetensors")]
    return {path.name: _tensors_digest(path.read_bytes()) for path in files}


def _tensors_digest(content: bytes) -> str:
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return sha256(json.dumps(header, sort_keys=True).encode() + content[end:]).hexdigest()


def programs(folder: Path) -> dict[str, str]:
    """Digest → module name of each program that is large enough, without names and metadata."""
    found = {}
    for path in sorted((folder / "programs").iterdir()):
        text = path.read_text()
        if text.count(" = ") >= SMALLEST_PROGRAM:
            found[sha256(normalized(text).encode()).hexdigest()] = path.name
    return found


def normalized(hlo: str) -> str:
    """Return the module's text with identifiers numbered as they appear."""
    body = hlo[re.search(r"^(%|ENTRY)", hlo, re.MULTILINE).start() :]
    body = re.sub(r", (metadata|frontend_attributes|origin)=\{[^}]*\}", "", body)
    body = re.sub(r'cost_estimate_json = "[^"]*", ', "", body)  # read by profilers alone
    numbers: dict[str, str] = {}
    body = re.sub(
        r"%?\b[A-Za-z_][\w-]*(\.[\w.-]+)+|%[\w.-]+",
        lambda m: numbers.setdefault(m[0].lstrip("%"), f"v{len(numbers)}"),
        body,
    )
    return re.sub(r"\b\w+: (?=[a-z0-9]+\[)", "", body)


def compare(name: str, old: Path, new: Path) -> bool:
    """Print one row; whether everything is equal."""
    before, after = losses(old), losses(new)
    first, second = programs(old), programs(new)
    other = Counter(second.keys()) - Counter(first.keys())
    equal = before == after, weights(old) == weights(new), not other
    words = ["equal" if same else "DIFFERENT" for same in equal]
    print(f"| {name} | {len(before)} losses {words[0]} | weights {words[1]} | {len(second)} programs {words[2]} |")
    for digest in other:
        print(f"    only in the new checkout: {second[digest]}")
    if before != after:
        pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
        print(f"    first difference: {pairs[:1]}")
    return all(equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path("runs/compare"))
    parser.add_argument("--cases", nargs="*", help="names of the cases to run, by default all")
    parser.add_argument("--old-flags", nargs="*", default=[], metavar="NEW=OLD", help="flags by their older names")
    args = parser.parse_args()
    scratch = args.scratch.resolve()
    make_model_folders(scratch / "models")
    equal = True
    for case in cases(scratch / "models"):
        if args.cases and case.name not in args.cases:
            continue
        folders = []
        for checkout, renamed in ((args.old, dict(pair.split("=") for pair in args.old_flags)), (args.new, {})):
            commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, text=True).strip()
            folders.append(scratch / commit / case.name)
            if not (folders[-1] / "done").exists():
                run(checkout.resolve(), case, folders[-1], renamed)
        if case.name.endswith("-full"):
            trained = scratch / "models" / f"{case.name.removesuffix('-full')}-trained"
            shutil.copytree(folders[0] / "run/model", trained, dirs_exist_ok=True)
        equal &= compare(case.name, *folders)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
