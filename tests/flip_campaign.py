"""Flip single bits of files that runs read again, start or resume them, and compare with undisturbed ones.

    JAX_PLATFORMS=cpu python tests/flip_campaign.py --flips 60 --seed 1
    JAX_PLATFORMS=cpu python tests/flip_campaign.py --subjects programs teacher --flips 10

Each must end with equal results, or be refused in a line that names what is damaged.
"""

import argparse
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from tiny_runs import KILLED, LAST_SAVED, End, TinyRuns, die_before, results, unequal

from jaxglue.hf.folder_digest import folder_digest

Results = dict[str, object]

_INPUTS = ("model", "teacher", "trained")
"""Folders that no run of a subject makes."""


@dataclass(frozen=True)
class Subject:
    """What is damaged, and the command that reads it again."""

    files: str
    """Pattern of the damaged files in the folder of the work."""
    kind: str
    """Of the run; "export" exports an adapter."""
    flags: str = ""
    resumed: bool = False
    """The files are damaged after a kill, before `--resume`."""
    sampled: bool = False
    """The files are a model's, of which large tensors are sampled: flips elsewhere may go unnoticed."""
    edited: bool = False
    """The files are text that users may edit, without digests: other values may be taken."""
    logs: bool = False
    """The files are records of past steps alone, without digests: weights are compared, and later losses."""


SUBJECTS = {
    "tokens": Subject("tokens/**/*", "sft"),
    "references": Subject("tokens/**/*", "dpo"),
    "features": Subject("tokens/features-*/*", "pictures-disk"),
    "programs": Subject("compiled/**/*", "sft"),
    "programs-of-answers": Subject("compiled/**/*", "grpo"),
    "adapter": Subject("trained/adapter/adapter_model.safetensors", "sft", "--adapter {work}/trained/adapter"),
    "adapter-settings": Subject(
        "trained/adapter/adapter_config.json", "sft", "--adapter {work}/trained/adapter", edited=True
    ),
    "adapter-resumed": Subject(
        "trained/adapter/*.safetensors", "sft", "--adapter {work}/trained/adapter", resumed=True
    ),
    "exported-adapter": Subject("trained/adapter/adapter_model.safetensors", "export"),
    "checkpoints": Subject("run/checkpoints/**/*", "sft", resumed=True),
    "checkpoints-of-answers": Subject("run/checkpoints/**/*", "grpo", resumed=True),
    "rollouts": Subject("run/rollouts/*", "grpo", resumed=True),
    "rollouts-of-distillation": Subject("run/rollouts/*", "distill", resumed=True),
    "records": Subject("run/*", "grpo", resumed=True, logs=True),
    "teacher": Subject("teacher/*.safetensors", "distill", resumed=True, sampled=True),
    "teacher-settings": Subject("teacher/config.json", "distill", resumed=True),
    "base": Subject("model/*.safetensors", "sft", resumed=True, sampled=True),
}


def flip_bits(runs: TinyRuns, name: str, flips: int, rng: random.Random) -> Counter:
    """Flip bits of a subject's files, one for each run; return counts of what happened.

    Raises:
        AssertionError: a run ended in another way than with equal results or a refusal.
    """
    subject, work, done = SUBJECTS[name], runs.work, Counter[str]()
    part = work / subject.files.partition("/")[0]
    intact, output = work / "intact", work / "run"
    start = _starter(runs, subject)
    for folder in (intact, output, *([] if part.name in _INPUTS else [part])):
        shutil.rmtree(folder, ignore_errors=True)
    if part.name == "trained" and not part.exists():
        end = runs.train("sft", part)
        assert end.status == 0, end.output[-3000:]
    end = start()
    assert end.status == 0, end.output[-3000:]
    whole = _results(output)
    if subject.resumed:
        shutil.rmtree(output)
        assert start(stop=die_before(LAST_SAVED + 1)).status == KILLED
        assert any((output / "checkpoints").iterdir())
        shutil.copytree(output, work / "stopped")
    shutil.copytree(part, intact)
    try:
        for _ in range(flips):
            for folder, source in ((part, intact), (output, work / "stopped")):
                shutil.rmtree(folder, ignore_errors=True)
                if source.exists():
                    shutil.copytree(source, folder)
            what = _flip(sorted(path for path in work.glob(subject.files) if path.is_file()), rng)
            print(f"  {name}: {what}: ", end="", flush=True)
            outcome = _judge(subject, start(), whole, output, (part, intact))
            done[outcome.partition(": ")[0]] += 1
            print(outcome, flush=True)
    finally:
        shutil.rmtree(part)
        intact.rename(part)
        shutil.rmtree(work / "stopped", ignore_errors=True)
    return done


def _starter(runs: TinyRuns, subject: Subject) -> Callable[..., End]:
    output = runs.work / "run"
    if subject.kind == "export":
        words = ["export", "--adapter", str(runs.work / "trained/adapter"), "--output", str(output)]
        return lambda **stop: runs.start(words, **stop)
    flags = subject.flags.replace("{work}", str(runs.work)).split()
    return lambda **stop: runs.train(subject.kind, output, *flags, **stop)


def _flip(paths: list[Path], rng: random.Random) -> str:
    """Flip a bit of one of the files that are not empty; describe where."""
    path = rng.choice([path for path in paths if path.stat().st_size])
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"{path.name}, bit {bit % 8} of byte {bit // 8:,} of {len(data):,}"


def _judge(subject: Subject, end: End, whole: Results, output: Path, parts: tuple[Path, Path]) -> str:
    """Tell how a run on damaged files ended.

    Raises:
        AssertionError: not as it should.
    """
    if end.refusal:
        assert len(end.refusal) < 2000
        return f"refused: {end.refusal[:160]}"
    assert end.status == 0, f"status {end.status}:\n{end.output[-3000:]}"
    names = unequal(whole, _results(output))
    if subject.logs:
        names = [name for name in names if name not in ("losses", "answers")]
    if not names:
        return "equal" + (", said" if "damaged" in end.output or "WARNING" in end.output else "")
    if subject.edited:
        return "other values of a text that users may edit"
    is_unsampled = subject.sampled and folder_digest(parts[0]) == folder_digest(parts[1])
    assert is_unsampled, f"silently different: {names}:\n{end.output[-2000:]}"
    return "a place that is not sampled"


def _results(output: Path) -> Results:
    if (output / "metrics.jsonl").exists():
        return results(output)
    return {path.name: path.read_bytes() for path in output.glob("*.safetensors")}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the campaign of the arguments; a subject that fails is an error with its seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--flips", type=int, default=60, help="of all subjects together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder of models, data and compiled programs")
    args = parser.parse_args(argv)
    jax.config.update("jax_compilation_cache_dir", None)  # programs lie in the work's folder
    with tempfile.TemporaryDirectory() as scratch:
        runs = TinyRuns(args.work or Path(scratch))
        for number, name in enumerate(args.subjects):
            if flips := len(range(number, args.flips, len(args.subjects))):
                done = flip_bits(runs, name, flips, random.Random(f"{args.seed} {name}"))
                print(f"{name}, seed {args.seed}: {dict(done)}", flush=True)
    print(f"{args.flips} flips, all equal or refused")


if __name__ == "__main__":
    main()
