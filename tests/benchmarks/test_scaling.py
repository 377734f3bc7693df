"""Cases of several GPUs side by side: what becomes of those that fail, hang or find no time; and the targets."""

import argparse
import json
import math
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

ROW = """
import json, subprocess, sys, time
row = {"ms": 2, "tokens_per_second": 500}
"""
CASES = {
    "8b-lora:data=1": ROW + "print(json.dumps(row))",
    "8b-full:fsdp=2": ROW + "print(json.dumps(row)); print('{\"ms'); sys.exit('    @ 0x1 main\\nout of memory')",
    "70b-lora:fsdp=2": ROW
    + """
row["child"] = subprocess.Popen(["sleep", "60"]).pid
print(json.dumps(row), flush=True)
time.sleep(60)
""",
}
"""Scripts in the place of the benchmark's."""


@pytest.fixture
def run(monkeypatch):
    import scaling

    monkeypatch.setattr(scaling, "command_of", lambda name, args: [sys.executable, "-S", "-c", CASES[name]])

    def run(*cases, json=None, **options):
        given = {"suite": "hgx", "tiny": True, "limit": 30.0, "budget": math.inf, "json": json, **options}
        return {row.get("case"): row for row in scaling.run_all(list(cases), ["0", "1"], argparse.Namespace(**given))}

    return run


def test_a_failing_case_leaves_the_others(run, tmp_path):
    failed, whole = run("8b-full:fsdp=2", "8b-lora:data=1", json=tmp_path / "a.json").values()
    assert failed["ms"] == 2 and failed["error"] == "exit 1: out of memory"
    assert whole["ms"] == 2 and "error" not in whole
    stored = json.loads((tmp_path / "a.json").read_text())["results"]
    assert len(stored["rows"]) == 2 and [row["found"] for row in stored["targets"]].count("not run") == 4


def test_a_case_over_its_limit_is_killed_with_its_children(run):
    row = run("70b-lora:fsdp=2", limit=3.0)["70b-lora:fsdp=2"]
    assert "killed after 3 s" in row["error"]
    deadline = time.monotonic() + 10
    while psutil.pid_exists(row["child"]) and psutil.Process(row["child"]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline


def test_cases_beyond_the_budget_are_named(run):
    rows = run("70b-lora:fsdp=2", "8b-lora:data=1", budget=1.0)
    assert "killed" in rows["70b-lora:fsdp=2"]["error"]
    assert rows["8b-lora:data=1"]["not_run"].startswith("not begun within")


def test_a_long_document_passes_in_tiles_through_all_layers_wanted(monkeypatch):
    import scaling_step

    from jaxglue.planner.gpus import find_gpu
    from jaxglue.sharding.mesh import MeshShape

    monkeypatch.setattr(scaling_step, "device_gpu", lambda device: find_gpu("H200"))
    monkeypatch.setattr(scaling_step.jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    setting = scaling_step.Setting(**scaling_step.MODELS["half-million"] | {"layers": 4})  # whole rows: through two
    work, policies = scaling_step.fit(setting, MeshShape())
    assert work.config.num_hidden_layers == len(policies) == 4 and work.tile


@pytest.mark.parametrize(("gpus", "experts"), [(2, "expert=2"), (4, "data=2,expert=2"), (8, "data=4,expert=2")])
def test_the_suite_fits_its_gpus(gpus, experts):
    from scaling import gpus_of
    from scaling_suite import hgx_cases

    cases = hgx_cases(gpus)
    assert max(map(gpus_of, cases)) == gpus and f"30b-a3b-lora:{experts}" in cases
    assert len(set(cases)) == len(cases)


def test_verdicts_say_what_was_not_measured():
    from scaling_suite import verdicts

    layers = {"layers": 8, "of_layers": 36}
    rows = [
        {"case": "8b-lora:data=4", "ms": 1, "efficiency": 0.96},
        {"case": "8b-full:fsdp=4", "ms": 1, "mfu": 0.5, **layers},
        {"case": "30b-a3b-lora:data=2,expert=2", "ms": 1, "efficiency": None},
        {"case": "kill:data=4", "ended_s": 1.0, "named_by": 3, "error": "exit -9, killed after 100 s: "},
    ]
    found = [(row["found"], row["met"]) for row in verdicts(rows, 4)]
    assert found == [
        ("96.0% of one GPU's rate", "yes"),
        ("50.0% of the peak FLOP/s, of 8 of 36 layers", "–"),
        ("nothing to compare with", "–"),
        ("failed", "no"),
        ("not run", "–"),
    ]
