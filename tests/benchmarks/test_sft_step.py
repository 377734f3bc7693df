"""Every engine reads the same batches; ours trains on them."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from selection import repeats_parts_of


@pytest.fixture
def prepared(tmp_path):
    """(row, files) of the tiny row with three batches."""
    import sft_step

    return sft_step.ROWS["tiny"], sft_step.Inputs(tmp_path, ["tiny"], warm_up=1, steps=2).prepare("tiny")[0]


def test_a_document_never_predicts_the_next_ones_first_token(prepared):
    import sft_ours

    row, files = prepared
    with np.load(files["batches"]) as stored:
        tokens, lengths = stored["tokens"], stored["lengths"]
    assert (lengths.sum(1) == row.tokens).all()
    batches = sft_ours.read_batches(files["batches"])
    assert len({batch.segments.cu_seqlens.shape for batch in batches}) == 1
    for batch, ids, sizes in zip(batches, tokens, lengths, strict=True):
        start = 0
        for size in sizes[sizes > 0]:
            assert (batch.targets[0, start : start + size - 1] == ids[start + 1 : start + size]).all()
            assert batch.loss_weights[0, start : start + size].tolist() == [1.0] * (size - 1) + [0.0]
            start += size


def test_ours_alone_draws_its_weights_with_experts_in_their_format(tmp_path):
    import sft_ours
    import sft_step

    from jaxglue.ops.quant.nf4 import NF4

    files, _ = sft_step.Inputs(tmp_path, ["tiny experts NF4"], warm_up=0, steps=1).prepare("tiny experts NF4")
    assert not [*files["model"].glob("*.safetensors")]
    flags = [word for name in ("model", "adapter", "batches") for word in (f"--{name}", str(files[name]))]
    args = sft_ours.parse([*flags, "--quantize", "nf4"])
    _, trainable, frozen = sft_ours.load(args, sft_ours.settle_config(args), None)
    assert isinstance(frozen["layers"][0]["mlp"]["experts"]["down_proj"]["weight"].rows, NF4)
    assert trainable["layers"][0]["mlp"]["experts"]["down_proj"]["lora_A"].shape == (8, 16, 64)
    tokens = np.array(frozen["embed_tokens"]["weight"])
    assert 0.9 < tokens.std() < 1.1  # routers tell them apart


def test_mixtures_are_compared_at_equal_active_flops():
    import sft_step

    measured = {"qwen3-30b-a3b": (100.0, 50.0), "glm-4.7-flash": (120.0, 80.0)}
    rows = [
        {"row": row, "engine": "ours", "tokens": 1, "flops": flops, "ms": ms, "kernels": 1}
        for row, (flops, ms) in measured.items()
    ]
    failed = {"row": "gemma-4-26b-a4b", "engine": "ours", "error": "x"}
    beside = [[*row.values()][-1] for row in sft_step.summary([*rows, failed])]
    assert beside == ["1.00", "0.75", "-"]
    assert len({len(row) for row in sft_step.summary([*rows, failed])}) == 1


@repeats_parts_of("test_ours_alone_draws_its_weights_with_experts_in_their_format")
@pytest.mark.long
def test_ours_learns_and_results_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    import sft_step

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setitem(sft_step.ROWS, "tiny", replace(sft_step.ROWS["tiny"], tokens=128))
    flags = ["--rows", "tiny", "--engines", "ours", "--scratch", str(tmp_path), "--warm-up", "1", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["sft_step.py", *flags, "--json", str(tmp_path / "out.json")])
    sft_step.main()
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(result["losses"]) == 4 and len(result["ms_all"]) == 1
    assert result["losses"][0] == pytest.approx(np.log(2048), rel=0.05)
    assert "| tiny | ours |" in capsys.readouterr().out
    assert not Path(tmp_path / "tiny").exists()  # weights are large


def test_intervals_in_medians_are_whole_ones(monkeypatch):
    """The host takes 3 s to dispatch a step, and the GPU 10 s to compute one, from its dispatch on at the earliest."""
    import sft_ours

    now, free, ready = 0.0, 0.0, {}

    def step(batch):
        nonlocal now, free
        free = ready[batch] = max(now, free) + 10
        now += 3
        return 0.5, batch

    def wait(value):
        nonlocal now
        now = max(now, free if value is run.trainable else ready[value] if isinstance(value, int) else free)

    monkeypatch.setattr(sft_ours.time, "perf_counter", lambda: now)
    monkeypatch.setattr(sft_ours.jax, "block_until_ready", wait)
    run = SimpleNamespace(trainable=None, step=step)
    assert sft_ours.train(run, [*range(6)], 2)["ms_all"] == pytest.approx([10_000.0, 10_000.0])


@repeats_parts_of("test_one_program_trains_as_several_do")
def test_one_program_with_its_update_gives_the_steps_of_apart_ones(prepared):
    import sft_ours

    from jaxglue.engine.policy import PRESETS

    _, files = prepared
    flags = [word for name in ("model", "adapter", "batches") for word in (f"--{name}", str(files[name]))]
    args, losses = sft_ours.parse(flags), []
    config, batches = sft_ours.settle_config(args), sft_ours.read_batches(files["batches"])
    for one_program in (True, False):
        layers = 2 if one_program else 1
        plan = SimpleNamespace(policies=(PRESETS["none"],) * 2, weights=("device",) * 2, tile=None)
        plan.layers_per_program, plan.one_program = layers, one_program
        run = sft_ours.Run(sft_ours.load(args, config, plan), config, plan, steps=3, learning_rate=1e-2)
        losses.append([float(run.step(batch)[0]) for batch in batches])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and losses[0][0] != losses[0][-1]


def test_the_summary_says_what_a_peer_tried():
    import sft_step

    tried = [
        {"checkpointing": "offload", "ms": 3.0},
        {"checkpointing": "device", "ms": 2.0},
        {"checkpointing": "none", "error": "out of memory"},
    ]
    row = {"row": "r", "engine": "unsloth", "tokens": 100, "flops": 1.0, "ms": 2.0, "host_gib": 1.25}
    shown = sft_step.summary([row | {"checkpointing": "device", "tried": tried}])[0]
    assert shown["checkpointing"] == "device (offload 3.0 ms, none failed)" and shown["host GiB"] == "1.2"


def test_engines_share_the_seconds_of_the_budget(tmp_path, monkeypatch, capsys):
    import sft_step

    clock, limits = iter([0.0, 4.0, 9.0, 10.0]), []  # begun, then before each engine

    class Engine:
        def __getattr__(self, name):
            return lambda *given: {"error": "x"} if name == "result" else limits.extend(given * (name == "allow"))

    monkeypatch.setattr(sft_step.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sft_step, "start", lambda *given: Engine())
    flags = ["--rows", "tiny", "--engines", "ours", "unsloth", "peft", "--scratch", str(tmp_path), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["sft_step.py", *flags, "--limit", "5", "--budget", "10"])
    sft_step.main()
    assert limits == [5.0, 1.0] and "tiny, peft: not begun within 10 s" in capsys.readouterr().out


def test_engines_take_turns_and_import_before(tmp_path, monkeypatch):
    import sft_step

    said = []

    class Engine:
        def __init__(self, name):
            self._name = name

        def allow(self, seconds):
            said.append(f"allow {self._name}")

        def until(self, key):
            said.append(f"{self._name} {key}")

        def go_on(self):
            said.append(f"go {self._name}")

        def result(self):
            return {"peak_gib": 3.25}

        def kill(self):
            said.append(f"kill {self._name}")

    def start(engine, name, row, *_):
        said.append(f"start {engine} {row.memory_limit}")
        return Engine(engine)

    monkeypatch.setattr(sft_step, "start", start)
    flags = ["--rows", "tiny", "--engines", "ours", "peft", "liger", "--scratch", str(tmp_path), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["sft_step.py", *flags])
    sft_step.main()
    ours, peft, liger = "ours warm", "peft imported_s", "liger imported_s"
    first = ["start ours None", "allow ours", "ours seconds", "start peft None", "start liger None"]
    assert said[:9] == [*first, ours, peft, liger, "go ours"]
    assert said[9:15] == ["allow peft", peft, ours, peft, liger, "go peft"]
    assert said[-3:] == ["kill ours", "kill peft", "kill liger"]

    said.clear()
    monkeypatch.setitem(sft_step.ROWS, "tiny", sft_step.Row(shape="tiny", tokens=1024, peer_memory=True))
    monkeypatch.setattr(sys, "argv", ["sft_step.py", "--rows", "tiny", "--scratch", str(tmp_path), "--steps", "1"])
    sft_step.main()
    assert said[0] == "start unsloth None" and "start ours 3.25" in said[said.index("go unsloth") :]


def test_an_engine_waits_until_it_may_go_on():
    import sft_step

    script = "print('{\"warm\": true}', flush=True); input(); print('{\"ms\": 5.0}')"
    engine = sft_step.Engine([sys.executable, "-c", script], {}, 20)
    engine.until("warm")
    engine.go_on()
    result = engine.result()
    engine.kill()
    assert result.pop("process_s") < 20 and result == {"ms": 5.0}


def test_host_memory_leaves_out_what_other_processes_hold(tmp_path, monkeypatch):
    from peers import host

    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\nFlags:\n")
    held = {1: (0, 1), 7: (1, 2), 8: (7, 4), 9: (8, 0.5), 20: (1, 8)}  # process: (parent, GiB)
    for process, (parent, gib) in held.items():
        (tmp_path / str(process)).mkdir()
        fields = f"Name:\tpython\nPPid:\t{parent}\nRssAnon:\t{int(gib * 2**20)} kB\n"
        (tmp_path / str(process) / "status").write_text(fields)
    (tmp_path / "3").mkdir()  # ended
    files = SimpleNamespace(f_blocks=2**20, f_bfree=2**19, f_frsize=2**12)
    monkeypatch.setattr(host.os, "statvfs", lambda path: files)
    monkeypatch.setattr(host.os, "getpid", lambda: 7)
    assert host._measure(tmp_path) == (6.5, 24 - 9 - 2)


def test_only_models_that_were_made_are_deleted(prepared, tmp_path):
    import sft_step

    again = sft_step.Inputs(tmp_path, ["tiny"], warm_up=1, steps=2)
    again.prepare("tiny")
    again.done("tiny")
    assert prepared[1]["model"].exists()


def test_losses_are_compared_step_by_step():
    import sft_step

    losses = {"ours": [2.0, 1.0], "peft": [2.0, 1.25], "unsloth": [2.0, 1.25]}
    results = [{"row": "r", "engine": engine, "losses": each} for engine, each in losses.items()]
    rows = sft_step.loss_differences([*results, {"row": "r", "engine": "failed", "error": "x"}])
    assert [row["engines"] for row in rows] == ["ours, peft", "ours, unsloth", "peft, unsloth"]
    assert [row["largest relative difference"] for row in rows] == ["2.0e-01", "2.0e-01", "0.0e+00"]
    assert [row["mean"] for row in rows] == ["1.0e-01", "1.0e-01", "0.0e+00"]


@pytest.mark.parametrize(
    ("rest", "error"),
    [("raise KeyError('late')", "KeyError: 'late'"), ("import time; time.sleep(60)", "timed out")],
    ids=["raises", "hangs"],
)
def test_what_was_measured_survives_what_fails_afterwards(capfd, rest, error):
    import sft_step

    script = f"print('noise'); print('{{\"ms\": 5.0}}', flush=True); {rest}"
    result = sft_step.Engine([sys.executable, "-c", script], {}, 2).result()
    assert result["ms"] == 5.0 and error in result["error"]
    row = {"row": "r", "engine": "ours", "tokens": 100, "flops": 1.0, **result}
    assert sft_step.summary([row])[0]["tokens/s"] == "20,000"
    early = sft_step.Engine([sys.executable, "-c", "raise ValueError('early')"], {}, 9).result()
    assert early["error"].endswith("early")


def test_workers_of_an_engine_that_ended_do_not_hold_a_measurement(capfd):
    import sft_step

    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    script = f"import os, subprocess, sys; {child}; print('{{\"warm_up_s\": [3.0]}}', flush=True); os._exit(0)"
    result = sft_step.Engine([sys.executable, "-c", script], {}, 50).result()
    assert result.pop("process_s") < 40 and result == {"warm_up_s": [3.0]}
    assert "warm_up_s" in capfd.readouterr().out


def test_later_files_replace_results_when_merged(tmp_path):
    import sft_step

    rows = [("qwen3-8b NF4", "ours", 1.0), ("qwen3-8b", "unsloth", 2.0), ("qwen3-8b NF4", "ours", 3.0)]
    for index, (row, engine, ms) in enumerate(rows):
        told = {"date": f"2026-12-0{index + 1}", "command": f"run {index}", "gpu": "NVIDIA H200"}
        sft_step.write(tmp_path / f"{index}.json", [{"row": row, "engine": engine, "ms": ms, **told}])
    results = sft_step.merge(tmp_path / "all.json", [tmp_path / f"{index}.json" for index in range(3)])
    assert [(result["row"], result["ms"]) for result in results] == [("qwen3-8b", 2.0), ("qwen3-8b NF4", 3.0)]
    assert [result["command"] for result in results] == ["run 1", "run 2"]
    whole = json.loads((tmp_path / "all.json").read_text())
    assert (whole["date"], whole["command"], whole["gpu"]) == ("2026-12-03", "run 2", "NVIDIA H200")


def test_a_result_tells_when_where_and_at_which_commit_it_was_measured(tmp_path, monkeypatch):
    import measure

    monkeypatch.setattr(measure.record, "ROOT", tmp_path)
    monkeypatch.setenv("JAXGLUE_COMMIT", "0123abcd")
    measure.write_results(tmp_path / "a.json", [], gpu="NVIDIA H200")
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["commit"] == "0123abcd" and told["gpu"] == "NVIDIA H200" and told["host_memory_gib"] > 0
    assert len(told["date"]) == 10 and told["versions"]["jax"] and told["command"].startswith("python ")


def test_the_commit_of_a_changed_checkout_is_marked(tmp_path, monkeypatch):
    import subprocess

    from peers import record

    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "First"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    clean = record.commit()
    (tmp_path / "file").write_text("2")
    assert len(clean) == 8 and record.commit() == f"{clean}+"


@pytest.mark.parametrize("limit", [None, 0.5])
def test_what_a_gpu_would_run_is_planned(prepared, monkeypatch, limit):
    import jax
    import sft_ours

    from jaxglue.planner.gpus import GIB, find_gpu

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(sft_ours, "device_gpu", lambda device: find_gpu("H200"))
    files = prepared[1]
    flags = [word for name in ("model", "adapter", "batches") for word in (f"--{name}", str(files[name]))]
    args = sft_ours.parse(flags + (["--memory-limit", str(limit)] if limit else []))
    plan = sft_ours.choose(args, sft_ours.settle_config(args), sft_ours.read_batches(args.batches))
    assert plan.seconds > 0 and plan.device_bytes < (limit or 140) * GIB
