"""Check this checkout on a machine with a GPU; print one table and keep it as JSON.

    python benchmarks/gpu_check.py                        # everything but faults
    python benchmarks/gpu_check.py --parts tiny export    # some parts
    python benchmarks/gpu_check.py --parts faults         # 20 kills over 500 steps
    python benchmarks/gpu_check.py --parts tiny speed --record benchmarks/results/gpu_check.json

Parts:
    tests     all tests marked gpu
    tiny      100 steps of three families: losses as recorded, equal to the bit after kill -9, and with offloaded
              activations and weights in host memory
    export    an adapter read again gives the same logits, and its merged export nearly
    overlap   the test of copies under computation, which needs the GPU for itself
    drift     30 steps of Qwen3-0.6B's shape from B = 0: losses by our kernels in bf16 beside those in float32 without
    speed     tokens/s and memory of Qwen3-0.6B's shape, as recorded on this kind of GPU
    faults    a run with offload, streamed weights and NF4, killed again and again, equals an undisturbed one
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from check_runs import CASES, FAULTS, LORA, ROOT, Runs, block_means, difference, fastest_steps
from measure import provenance, table, write_json, write_results

from jaxglue.engine.compiler import STEP_OPTIONS

RECORDED = ROOT / "benchmarks/results/gpu_check.json"
CHATS = ROOT / "scripts/quickstart/chats.jsonl"
OVERLAP = "tests/benchmarks/test_traces.py::test_copies_run_under_computation"
TOGETHER_TESTS = ["-n", "6", "--dist", "worksteal", "--durations", "30"]
STEPS, KILLS = 100, 2
SEEDS = (0, 1, 2)
"""The first is checked; the spread of all is the tolerance of its losses."""
SPEED_BAND, MEMORY_BAND = 0.08, 0.03
MERGED_KL = 1e-3
"""Nats a token between an adapter and its merged export, whose weights are rounded to bfloat16 once more."""
DRIFT = 1e-2
"""Largest relative difference of a loss in bf16 from the same in float32."""
SPEED_CASES = {
    "dots": {**LORA, "remat": "dots"},
    "offload, streamed": {**LORA, "remat": "offload", "weights": "host"},
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    check: str
    found: str
    expected: str
    ok: bool


@dataclass
class Check:
    """Settings shared by the parts."""

    runs: Runs
    device: str
    recorded: dict
    record: Path | None
    """File to add values to that the record lacks."""
    workers: int
    kills: int
    steps: int
    fresh: dict = field(default_factory=lambda: {"losses": {}, "speed": {}})
    """Values to record."""


def run_tests(check: Check) -> list[Row]:
    """Run all tests for GPUs but that of the overlap."""
    return [_pytest(check, "tests", ["-m", "gpu", *TOGETHER_TESTS, "--deselect", OVERLAP, *gpu_test_files()])]


def run_overlap(check: Check) -> list[Row]:
    """Run the test of the overlap by itself."""
    return [_pytest(check, "overlap", [OVERLAP])]


def gpu_test_files() -> list[str]:
    """Return the files with tests for GPUs: others take long to import."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "pytest.mark.gpu" in path.read_text()]


def _pytest(check: Check, part: str, arguments: list[str]) -> Row:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    # As in training: XLA's choice among Triton's matmuls takes longer than all tests.
    options = " ".join(f"--{name}={str(value).lower()}" for name, value in STEP_OPTIONS.items())
    environment = check.runs.environment | {"XLA_FLAGS": f"{options} {os.environ.get('XLA_FLAGS', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = [
        line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))
    ]
    print(done.stdout[-8000:] + done.stderr[-2000:] * (done.returncode != 0), file=sys.stderr)
    summary = re.sub(r"[= ]+", " ", lines[-1]).strip() if lines else done.stderr[-200:]
    passed = done.returncode == 0 and "passed" in summary
    return Row(part, " ".join(arguments[:2]), "; ".join([summary, *failed[:5]]), "all pass", passed)


def run_tiny(check: Check) -> list[Row]:
    """Train each family; compare with the record, with killed runs and with other places of weights and activations."""
    with ThreadPoolExecutor(check.workers) as pool:
        rows = pool.map(lambda name: _check_family(check, name), CASES)
    return [row for family in rows for row in family]


def _check_family(check: Check, name: str) -> list[Row]:
    flags = CASES[name] | {"steps": check.steps}
    whole = check.runs.train(name, flags)
    with ThreadPoolExecutor() as pool:
        killed = pool.submit(_killed_row, "tiny", check, name, flags, KILLS, whole)
        moved = None if flags.get("method") == "full" else pool.submit(_moved_row, check, name, flags, whole)
    rows = [_loss_row(check, name, whole), *(row.result() for row in (killed, moved) if row)]
    if check.record and _known_losses(check, name)[1] is None:
        _record_losses(check, name, flags, whole)
    return rows


def _moved_row(check: Check, name: str, flags: dict, whole: Path) -> Row:
    moved = check.runs.train(f"{name}-moved", flags | {"remat": "offload", "weights": "host"})
    return _equal_row("tiny", f"{name} offloaded, streamed", whole, moved)


def _equal_row(part: str, name: str, expected: Path, found: Path) -> Row:
    other = difference(expected, found)
    return Row(part, name, other or "equal", "equal to the bit", not other)


def _killed_row(part: str, check: Check, name: str, flags: dict, kills: int, whole: Path | Future[Path]) -> Row:
    killed, count, resumes = check.runs.train_with_kills(f"{name}-killed", flags, kills)
    undisturbed = whole if isinstance(whole, Path) else whole.result()
    row = _equal_row(part, f"{name}, {count} kills, {resumes} resumes", undisturbed, killed)
    return replace(row, ok=row.ok and count == kills and resumes > 0)


def _known_losses(check: Check, name: str) -> tuple[str, dict | None]:
    """Return the recorded losses of this kind of device, else of the CPU."""
    device = check.device if name in check.recorded.get(check.device, {}).get("losses", {}) else "cpu"
    return device, check.recorded.get(device, {}).get("losses", {}).get(name)


def _loss_row(check: Check, name: str, folder: Path) -> Row:
    device, known = _known_losses(check, name)
    means = block_means(folder)
    if known is None:
        return Row(
            "tiny", f"{name} losses", f"{means[0]:.3f} … {means[-1]:.3f}", "not recorded", check.record is not None
        )
    off = max(abs(a - b) for a, b in zip(means, known["means"], strict=False))
    return Row(
        "tiny",
        f"{name} losses",
        f"off by {off:.1e}",
        f"{known['tolerance']:.1e} of {device}",
        off <= known["tolerance"],
    )


def _record_losses(check: Check, name: str, flags: dict, first: Path) -> None:
    others = [check.runs.train(f"{name}-seed{seed}", flags | {"seed": seed}) for seed in SEEDS[1:]]
    means = [block_means(folder) for folder in (first, *others)]
    tolerance = max(statistics.stdev(block) for block in zip(*means, strict=True))
    check.fresh["losses"][name] = {"means": means[0], "tolerance": tolerance}


def run_export(check: Check) -> list[Row]:
    """Train a base and an adapter on it, merge, and compare next-token distributions."""
    runs, short = check.runs, {"steps": 60}
    base = runs.train("export-base", CASES["llama-full"] | short) / "run/model"
    adapted = {"model": base, "learning-rate": 1e-2, "remat": "full"}
    adapter = runs.train("export-adapter", adapted | short) / "run/adapter"
    merged = runs.folder("export-merged") / str(time.time_ns())
    runs.python("scripts/export.py", "--adapter", adapter, "--base", base, "--output", merged)
    kl = json.loads(runs.python("benchmarks/check_export.py", base, adapter, merged))
    learned = kl["base"] > 5 * MERGED_KL
    return [
        Row("export", "adapter read again", f"KL {kl['again']:.1e}", "KL 0", kl["again"] == 0),
        Row("export", "merged", f"KL {kl['merged']:.1e} (base {kl['base']:.1e})", f"KL < {MERGED_KL}",
            learned and kl["merged"] < MERGED_KL),
    ]  # fmt: skip


def run_drift(check: Check) -> list[Row]:
    """Compare the losses of training in bf16, by our kernels and by plain JAX, with those in float32."""
    return drift_rows(json.loads(check.runs.python("benchmarks/drift.py")))


def drift_rows(result: dict) -> list[Row]:
    """Return a line for the kernels and, for comparison, one for plain JAX."""
    first, *_, last = result["losses"]["float32"]
    learned = f"of losses {first:.2f} … {last:.2f}"
    return [
        Row("drift", f"{result['shape']}, {name}", f"{drift:.1e} {learned}", f"< {DRIFT}", drift < DRIFT)
        for name, drift in result["drift"].items()
    ]


def run_speed(check: Check) -> list[Row]:
    """Measure tokens/s and peak memory of a real shape."""
    rows = []
    for name in SPEED_CASES:
        folder = _train_for_speed(check, name, 40)
        summary = json.loads((folder / "run/summary.json").read_text())
        values = {"tokens/s": fastest_steps(folder), "peak GB": summary["peak_memory_gb"]}
        known = check.recorded.get(check.device, {}).get("speed", {}).get(name)
        if known is None:
            check.fresh["speed"][name] = values
        bands = {"tokens/s": SPEED_BAND, "peak GB": MEMORY_BAND}
        rows += [_band_row(f"{name}, {key}", values[key], known and known[key], bands[key], check) for key in values]
    return rows


def warm_up(check: Check) -> None:
    """Compile the programs of the part speed, which meets any error again."""
    for name in SPEED_CASES:
        _train_for_speed(check, name, 1)


def _train_for_speed(check: Check, name: str, steps: int) -> Path:
    tiny = check.device == "cpu"
    # Ten steps with a checkpoint would time the checkpoint.
    sizes = {"seq-len": 128 if tiny else 8192, "batch-size": 1, "steps": steps, "save-every": 10 * steps}
    family = {"family": "llama" if tiny else "qwen3-0.6b"}
    return check.runs.train(f"speed-{name.partition(',')[0]}", {**SPEED_CASES[name], **family, **sizes})


def _band_row(name: str, value: float, known: float | None, band: float, check: Check) -> Row:
    if known is None:
        return Row("speed", name, f"{value:,.2f}", f"not recorded on {check.device}", True)
    inside = abs(value - known) <= band * known
    return Row("speed", name, f"{value:,.2f}", f"{known:,.2f} ± {band:.0%}", inside)


def run_faults(check: Check) -> list[Row]:
    """Kill a run with NF4, streamed weights and offloaded activations; compare with an undisturbed one."""
    flags = FAULTS | {"steps": check.steps if check.device == "cpu" else 500}
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(check.runs.train, "faults", flags)
        return [_killed_row("faults", check, "faults", flags, check.kills, whole)]


PARTS: dict[str, Callable[[Check], list[Row]]] = {
    "tests": run_tests,
    "tiny": run_tiny,
    "export": run_export,
    "overlap": run_overlap,
    "drift": run_drift,
    "speed": run_speed,
    "faults": run_faults,
}
TOGETHER = ("tests", "tiny", "export")
"""Parts that do not disturb each other; the others run alone, one after another."""


def run_part(name: str, check: Check) -> list[Row]:
    """Run one part; an error is its result."""
    begun = time.monotonic()
    try:
        rows = PARTS[name](check)
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        rows = [Row(name, "run", str(error).splitlines()[0][:100], "no error", False)]
    if check.record:
        record(check.record, check)
    print(f"{format_rows(rows)}\n{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return rows


def format_rows(rows: list[Row]) -> str:
    """Return the rows as a table."""
    return table([{**asdict(row), "ok": "yes" if row.ok else "NO"} for row in rows])


def run_parts(names: list[str], check: Check) -> list[Row]:
    """Run parts, together where they may, and return their rows in the order of the names."""
    with ThreadPoolExecutor() as pool:
        together = {name: pool.submit(run_part, name, check) for name in names if name in TOGETHER}
        if together and "speed" in names:
            pool.submit(warm_up, check)
    done = {name: future.result() for name, future in together.items()}
    return [row for name in names for row in done.get(name) or run_part(name, check)]


def find_device(runs: Runs) -> str:
    """Return the kind of the first GPU, or cpu, from a process that gives it back."""
    return runs.python("-c", "import jax; print(jax.devices()[0].device_kind)")


def record(path: Path, check: Check) -> None:
    """Add this device's fresh values to the record of all kinds."""
    entry = check.recorded.get(check.device, {})
    merged = entry | {key: {**entry.get(key, {}), **values.copy()} for key, values in check.fresh.items()}
    write_json(path, check.recorded | {check.device: merged})


def record_run(path: Path, device: str, rows: list[Row], seconds: float) -> None:
    """Note when and at which commit this kind of device was last checked, and with what outcome."""
    recorded = json.loads(path.read_text()) if path.exists() else {}
    told = {key: value for key, value in provenance(device).items() if key != "gpu"}
    run = {"last check": {"checks": len(rows), "hold": sum(row.ok for row in rows), "seconds": round(seconds)}}
    write_json(path, recorded | {device: recorded.get(device, {}) | told | run})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[name for name in PARTS if name != "faults"])
    parser.add_argument("--scratch", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--json", type=Path, help="where to keep the table, by default in the scratch folder")
    parser.add_argument("--record", type=Path, metavar="FILE", help=f"add what {RECORDED.name} lacks")
    parser.add_argument("--workers", type=int, default=4, help="tiny families at a time")
    parser.add_argument("--kills", type=int, default=20, help="of the part faults")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the tiny runs")
    args = parser.parse_args()
    runs = Runs(args.scratch)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    check = Check(runs, find_device(runs), recorded, args.record, args.workers, args.kills, args.steps)
    begun = time.monotonic()
    rows = run_parts(args.parts, check)
    print(format_rows(rows))
    wrong = sum(not row.ok for row in rows)
    print(f"{check.device}: {len(rows) - wrong} of {len(rows)} checks hold, {time.monotonic() - begun:.0f} s")
    if args.record:
        record_run(args.record, check.device, rows, time.monotonic() - begun)
    write_results(args.json or args.scratch / "report.json", [asdict(row) for row in rows], gpu=check.device)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
