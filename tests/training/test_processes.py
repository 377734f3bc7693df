"""One run in two processes: equal to one process, and the death of either is reported."""

import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from forked import Forked
from selection import repeats_parts_of
from training.one_process import train_or_die

from jaxglue.hf.adapter import load_adapter
from jaxglue.settings.recipe import to_toml
from jaxglue.training.record import read_metrics
from jaxglue.training.train import train

NEVER = -1
OPTIONS = {"steps": 4, "save_every": 2, "batch_size": 2, "gradient_accumulation_steps": 2, "eval_fraction": 0.2}


@pytest.fixture
def run_two(tmp_path):
    """run_two(config, flags of each process, step before which process 1 dies) → [(exit status, stderr)] * 2."""
    running = []

    def run(config, flags=((), ()), die_before=NEVER):
        recipe = str(tmp_path / "config.toml")
        Path(recipe).write_text(to_toml(config.shared))
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        for index in range(2):
            step = die_before if index == 1 else NEVER
            told = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(index)]
            arguments = ["--config", recipe, *told, *flags[index]]
            running.append(Forked(tmp_path / f"process {len(running)}", train_or_die, step, arguments))
        pair = running[-2:]
        died, printed, last_words = pair[1].wait(300)
        assert not [line for line in printed.splitlines() if not line.startswith("[Gloo]")]  # process 0 prints
        status, _, errors = pair[0].wait(60 if die_before >= 0 else 300)  # within a minute of a death
        return [(status, errors), (died, last_words)]

    yield run
    for forked in running:
        forked.process.kill()


def losses(folder):
    return {line["step"]: line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line}


@pytest.mark.long
def test_death_is_reported_and_any_process_count_resumes(make_config, run_two, tmp_path):
    whole = train(make_config(**OPTIONS, output=tmp_path / "whole"))
    (status, errors), (killed, last_words) = run_two(make_config(**OPTIONS), die_before=3)
    assert killed == -signal.SIGKILL, last_words
    assert status == 1
    assert f"error: process 1 on {socket.gethostname()}: died. This process stops too" in errors
    assert 2 <= max(losses(tmp_path / "run")) < 4
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    resumed = make_config(**OPTIONS, resume=True)
    assert [status for status, _ in run_two(resumed)] == [0, 0]
    assert train(make_config(**OPTIONS, output=tmp_path / "alone", resume=True)).steps == 4
    for folder in ("run", "alone"):
        assert list(losses(tmp_path / folder)) == list(range(1, 5))
        np.testing.assert_allclose([*losses(tmp_path / folder).values()], [*losses(tmp_path / "whole").values()], 2e-5)
        got, expected = (load_adapter(tmp_path / name / "adapter").tensors for name in (folder, "whole"))
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(got[name], tensor, atol=1e-4, err_msg=name)
    assert whole.steps == 4


@repeats_parts_of("test_one_program_trains_as_several_do")
@pytest.mark.long
def test_processes_take_steps_of_one_program(make_config, run_two, tmp_path):
    options = {"steps": 3, "batch_size": 2, "seq_len": 48}
    train(make_config(**options, output=tmp_path / "whole"))
    assert [status for status, _ in run_two(make_config(**options, layers_per_program=2))] == [0, 0]
    expected, got = (list(losses(tmp_path / name).values()) for name in ("whole", "run"))
    np.testing.assert_allclose(got, expected, rtol=2e-5)


@repeats_parts_of("test_disagreement_names_the_values")
def test_disagreeing_processes_both_name_the_values(make_config, run_two):
    config = make_config(**OPTIONS)
    results = run_two(config, flags=((), ("--learning-rate", "0.5")))
    for status, errors in results:
        assert status == 1
        assert "the processes disagree on the configuration:" in errors
        assert "  optimizer.learning_rate: 0.01 on process 0, 0.5 on process 1" in errors


@repeats_parts_of("test_split_rows_equal_whole_rows")
def test_processes_share_rows(make_config, run_two, tmp_path):
    options = {**OPTIONS, "batch_size": 1, "steps": 3}
    train(make_config(**options, output=tmp_path / "whole"))
    assert [status for status, _ in run_two(make_config(**options, mesh="context=2"))] == [0, 0]
    np.testing.assert_allclose([*losses(tmp_path / "run").values()], [*losses(tmp_path / "whole").values()], 1e-5)
