"""The verdict, the plans and the errors of `jaxglue estimate`."""

import json
import re
from pathlib import Path

import pytest

import jaxglue
from jaxglue.commands import estimate as command
from jaxglue.commands import main
from jaxglue.training import sampling


@pytest.fixture
def estimate(tiny_config, tmp_path, capsys):
    """estimate(*flags) → (the command's output for a tiny model, whether it fits)."""
    changes = {"model_type": "qwen3", "num_hidden_layers": 2, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | changes))

    def make(*flags):
        status = 0
        try:
            main(["estimate", "--model", str(tmp_path), "--seq-len", "256", *flags])
        except SystemExit as stop:
            status = stop.code
        return capsys.readouterr().out, status == 0

    return make


def test_verdict_comes_first_and_alternatives_follow(estimate):
    printed, fits = estimate("--gpu", "4090")
    longest = r"longest row 2,048 \(the model's limit\);\s+compiling takes \d+ s\n"
    assert re.match(r"Fits: 0\.\d of 21\.6 GiB, ~[\d,]+ tokens/s; " + longest, printed)
    assert fits and "RTX 4090, 21.6 GiB" in printed and "--remat 'none'" in printed


def test_reinforcement_learning_names_the_memory_of_its_answers(estimate):
    sizes = ("--objective", "grpo", "--generation-batch-size", "24", "--max-completion-length", "100")
    printed, fits = estimate("--gpu", "4090", *sizes)
    assert fits
    said = r"training: ~\d+ s for answers of all lengths, 24 of 24 answers at a time, prompts of 256 tokens"
    assert re.search(f"Sampling in turns with {said}", " ".join(printed.split()))
    assert "--exact-sampling auto: off, it cannot be kept: " in " ".join(printed.split())


def test_too_little_memory_for_answers_names_their_flag(estimate, monkeypatch):
    plan = sampling.plan_cache
    monkeypatch.setattr(sampling, "plan_cache", lambda *args, **options: plan(*args, **options | {"free": 1e4}))
    printed, fits = estimate("--gpu", "4090", "--objective", "grpo", "--max-completion-length", "100")
    assert not fits and re.search(r"Sampling does not fit: .* lower\s+--max-completion-length", printed, re.DOTALL)


def test_weights_that_sampling_reads_stay_on_the_gpu(estimate, capsys):
    """As in training, in every plan that is shown or named as a remedy."""
    printed, fits = estimate("--gpu", "4090", "--objective", "grpo", "--all")
    assert fits and "--weights" not in printed and "--weights" in estimate("--gpu", "4090", "--all")[0]
    printed, fits = estimate("--gpu", "4090", "--memory-limit", "0.305", "--objective", "grpo")
    assert not fits and "Does not fit" in printed and "--weights host" not in printed
    with pytest.raises(SystemExit):
        main(["estimate", "--model", ".", "--gpu", "4090", "--objective", "grpo", "--weights", "host"])
    assert "--weights host is not for --objective grpo" in capsys.readouterr().err


def test_all_prints_every_preset_without_splitting_words(estimate):
    printed, _ = estimate("--gpu", "RTX 4090", "--all")
    assert all(f"--remat '{name}'" in printed for name in ("none", "dots", "full", "offload"))
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed


def test_values_that_stay_on_the_gpu_are_named(estimate):
    printed, fits = estimate("--gpu", "4090", "--remat", "offload")
    assert fits and "full in place of offload: up to 4 MiB of a layer stay on the GPU" in " ".join(printed.split())


def test_nothing_is_moved_to_the_host_where_memory_is_one(estimate):
    printed, fits = estimate("--gpu", "spark", "--weights", "host")
    assert not fits and "of pinned host memory, which is the memory of GB10 itself" in " ".join(printed.split())
    printed, fits = estimate("--gpu", "gb200", "--weights", "host")
    assert fits and "GB200" in printed


def test_a_run_that_does_not_fit_says_so_with_a_failing_status(estimate):
    printed, fits = estimate("--gpu", "3060", "--memory-limit", "0.3")
    assert not fits
    assert re.match(r"Does not fit: --remat .* with 1 × 256 tokens needs", " ".join(printed.split()))


def test_max_seq_len_plans_for_the_longest_row(estimate):
    printed, _ = estimate("--gpu", "l4", "--max-seq-len")
    assert "1 × 2,048 tokens" in printed


def test_rows_have_the_models_positions_where_these_are_few(tmp_path, estimate, capsys):
    main(["estimate", "--model", str(tmp_path), "--gpu", "l4"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 × 2,048 tokens (all positions of the model, fewer than the default of 4,096 tokens)" in shown
    assert jaxglue.plan(tmp_path, "l4").seconds > jaxglue.plan(tmp_path, "l4", seq_len=256).seconds


def test_a_given_length_above_the_models_positions_is_refused(tmp_path, estimate):
    with pytest.raises(ValueError, match="--seq-len 4096 is above the model's limit of 2048 positions"):
        jaxglue.plan(tmp_path, "l4", seq_len=4096)


def test_training_recipe_is_read(tmp_path, capsys):
    main(["estimate", "--recipe", "quickstart", "--gpu", "a100-40"])
    assert "A100 40GB, 36.0 GiB" in capsys.readouterr().out


def test_unknown_gpu_is_refused(estimate, capsys):
    assert not estimate("--gpu", "Voodoo")[1]


def choices(printed):
    """Return the lines of --explain, by the name of the choice."""
    lines = [line.strip("│ \n") for line in printed.partition("─ choices ─")[2].splitlines()[1:-1]]
    width = re.match(r"\w+( \w+)*  +", max(lines, key=lambda line: len(line.split("  ")[0]))).end()
    found = {}
    for line in lines:
        name = line[:width].strip() if re.match(r"\S", line) else name
        found[name] = f"{found.get(name, '')} {line[width:].strip() if line[:width].strip() == name else line}".strip()
    return found


_PLAN = {"mesh", "remat", "weights", "tile", "layers per program", "dtype", "attention", "loss", "projections"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            (),
            {
                "remat": "none, .*bound by time alone; .*more memory would not help",
                "tile": "whole rows; bound by their",
            },
        ),
        (
            ("--hidden", "--memory-limit", "2.6"),
            {"remat": "bound by the GPU's memory; .*to change it: .* GiB on the GPU more, for --remat"},
        ),
        (
            ("--hidden", "--memory-limit", "2.2", "--embeddings", "auto"),
            {
                "weights": "host.*bound by the GPU's memory; runner-up: device, .*, lacks .* GiB on the GPU",
                "layers per program": "1; bound by an obstacle: weights are streamed from host memory",
                "embeddings": "(host|device); bound by ",
            },
        ),
        (
            ("--objective", "dpo", "--attention", "reference"),
            {"prompts": "shared by two answers; bound by preference: tokens are computed once; runner-up: copies"},
        ),
        (
            ("--mesh", "fsdp=2", "--batch-size", "2"),
            {"layers per program": "2; bound by time alone"},
        ),
    ],
    ids=["time", "memory", "streamed", "answers", "two GPUs"],
)
def test_explain_names_limit_runner_up_and_change_of_each_choice(estimate, tmp_path, monkeypatch, flags, expected):
    monkeypatch.setenv("COLUMNS", "400")
    if flags[:1] == ("--hidden",):
        config = json.loads((tmp_path / "config.json").read_text())
        wide = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "head_dim": 128}
        (tmp_path / "config.json").write_text(json.dumps(config | wide))
        flags = (*flags[1:], "--seq-len", "512")
    printed, fits = estimate("--gpu", "4090", "--explain", *flags)
    assert fits
    found = choices(printed)
    given = {flag.strip("-").replace("-", " ") for flag in flags}
    assert _PLAN - given <= set(found) and not (given - {"embeddings"}) & set(found)
    for name, pattern in expected.items():
        assert re.search(pattern, found[name]), found[name]
    assert all("; bound by " in line for line in found.values())


def test_nothing_is_explained_unasked(estimate):
    assert "bound by" not in estimate("--gpu", "4090")[0]


def test_images_are_counted_with_their_features(tmp_path, capsys):
    raw = json.loads((Path(command.__file__).parents[1] / "recipes/quickstart/seeing/config.json").read_text())
    raw["vision_config"] |= {"patch_size": 16, "spatial_merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    flags = ["--model", str(tmp_path), "--gpu", "H200"]
    flags += ["--seq-len", "1024", "--image-size"]
    main(["estimate", *flags, "1024x512", "--image-max-tokens", "512", "--images", "3000"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "1,024 × 512 pixels become 1,024 × 512: 512 tokens, 2 in a row of 1,024" in printed
    assert re.search(r"0\.\d GB and \d+ s of the tower for 3,000 images", printed)
    main(["estimate", *flags, "2048x1024", "--image-max-tokens", "512"])
    smaller = " ".join(capsys.readouterr().out.split())
    assert "2,048 × 1,024 pixels become 1,024 × 512: 512 tokens" in smaller and "for 3,000 images" not in smaller
    for given in (["--images", "9"], ["--train-vision", "all"]):
        with pytest.raises(SystemExit):
            main(["estimate", *flags[:-1], *given])
        error = capsys.readouterr().err
        assert given[0] in error and "add --image-size" in error


def test_towers_in_steps_are_part_of_their_time(tmp_path, capsys):
    raw = json.loads((Path(command.__file__).parents[1] / "recipes/quickstart/seeing/config.json").read_text())
    raw["vision_config"] |= {"hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "depth": 27}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def times(*flags):
        main(["estimate", "--model", str(tmp_path), "--gpu", "H200", "--seq-len", "1024", "--image-size", "64", *flags])
        printed = " ".join(capsys.readouterr().out.split())
        tower = re.search(r"~([\d,]+) ms in each step", printed)
        rate = re.search(r"~([\d,]+) tokens/s", printed)
        return tower and int(tower[1].replace(",", "")), int(rate[1].replace(",", ""))

    kept, each = times(), times("--image-features", "off")
    trains, four = times("--train-vision", "all"), times("--train-vision", "all", "--gradient-accumulation-steps", "4")
    assert kept[0] is None and trains[0] == pytest.approx(5 * each[0], abs=3)
    assert four[0] == pytest.approx(4 * trains[0], abs=3)
    assert kept[1] > each[1] > trains[1] and 1024 / trains[1] > trains[0] / 1e3
