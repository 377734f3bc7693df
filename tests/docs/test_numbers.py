"""Numbers of the pages and their pictures are those of the result files."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def claims():
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["claims"]


@pytest.fixture
def speeds():
    import plot_sft_step

    return plot_sft_step


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_numbers_of_a_page_are_those_of_the_files(claims, speeds, page):
    name = page.relative_to(ROOT).as_posix()
    text = speeds.without_tables(page)
    wrong = claims.problems(name, text, claims.read_claims().get(name, {}), all_numbers=name.startswith(claims.BOUND))
    assert not wrong, "python scripts/claims.py proposes entries of docs/measured/claims.toml"


def test_claims_are_of_pages_that_exist(claims):
    assert {*claims.read_claims()} <= {page.relative_to(ROOT).as_posix() for page in PAGES}


def test_tables_of_speed_are_those_of_the_files(speeds):
    for page, tables in speeds.rendered().items():
        for table in tables:
            assert table in page.read_text("utf-8"), "run python benchmarks/plot_sft_step.py"


def read_results(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["results"]


def drawn_from(picture):
    """Return what each picture should show, by its script."""
    import fp8_quality
    import plot_attention
    import plot_sft_step

    return {
        "speed": lambda: plot_sft_step.plotted(plot_sft_step.pairs(read_results("sft_step"))),
        "leaderboard": lambda: plot_sft_step.plotted_board(read_results("leaderboard")),
        "attention": lambda: plot_attention.plotted(read_results("attention")),
        "fp8": lambda: fp8_quality.plotted(read_results("fp8_quality")),
        "agent_curve": lambda: read_results("agent_curve"),
        "exact_curve": lambda: read_results("exact_curve")["curves"],
        "rl_curve": lambda: read_results("rl_curve")["curves"],
    }[picture]()


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.png")), ids=lambda path: path.stem)
def test_a_picture_was_drawn_from_the_file(picture):
    from measure import digest

    with Image.open(picture) as image:
        assert image.text["Description"] == digest(drawn_from(picture.stem)), "draw it again by its script"


def test_a_changed_digit_is_noticed(claims, monkeypatch):
    name, page = "docs/sharding.md", ROOT / "docs/sharding.md"
    load = claims._load

    monkeypatch.setattr(claims, "_load", lambda file: json.loads(json.dumps(load(file)).replace("67274", "67974")))
    wrong = claims.problems(name, page.read_text("utf-8"), claims.read_claims()[name], all_numbers=False)
    assert [line.split(": ")[2].split(" is not")[0] for line in wrong] == ["67,274", "4.05", "3.53"]


def test_summaries_of_plans_are_those_of_their_settings():
    from planner_grid import summary

    for name, group in (("planner_grid", "seed 14"), ("planner_families", "ten model types")):
        content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        recorded = content["as_planned"][group]
        assert summary(content["results"]).items() <= recorded.items()


def test_the_last_check_on_a_gpu_is_told():
    recorded = json.loads((ROOT / "benchmarks/results/gpu_check.json").read_text(encoding="utf-8"))
    gpu, record = max(((k, v) for k, v in recorded.items() if k != "cpu"), key=lambda item: item[1]["date"])
    text = " ".join((ROOT / "docs/reliability.md").read_text(encoding="utf-8").split())
    assert f"last recorded on an {gpu} on {record['date']}, commit {record['commit']}" in text


METHODS = {
    ("Qwen3", "LoRA"): "sft_step.json > results > row=qwen3-8b, engine=ours > ms",
    ("Qwen3", "QLoRA"): "sft_step.json > results > row=qwen3-8b NF4, engine=ours > ms",
    ("Qwen3", "FP8"): "fp8_alternate_h200.json > results > setting=FP8 with its head@70 > ms",
    ("Qwen3", "all weights"): "hgx_2.json > results > rows > case=8b-full:fsdp=2 > ms",
    ("Qwen3", "RL"): "rl_step_h200.json > results > 0 > step",
    ("Llama 3", "LoRA"): "sft_step.json > results > row=llama-3.1-8b, engine=ours > ms",
    ("Llama 3", "FP8"): "fp8_alternate_h200.json > results > shape=llama-3.1-8b > ms",
    ("Qwen2.5", "LoRA"): "sft_step.json > results > row=qwen2.5-7b, engine=ours > ms",
    ("Mistral", "LoRA"): "sft_step.json > results > row=mistral-7b, engine=ours > ms",
    ("Gemma 3", "LoRA"): "sft_step.json > results > row=gemma-3-12b, engine=ours > ms",
    ("Qwen3.5", "LoRA"): "sft_step.json > results > row=qwen3.5-9b, engine=ours > ms",
    ("Qwen3.5", "FP8"): "sft_step.json > results > row=qwen3.5-35b-a3b FP8 > ms",
    ("gpt-oss", "LoRA"): "moe_step.json > results > case=gpt-oss-20b, whole, MXFP4, offloaded > ms",
    ("gpt-oss", "FP8"): "fp8_moe_step.json > results > 0 > ms",
    ("DeepSeek-V2", "LoRA"): "sft_step.json > results > row=deepseek-v2-lite, engine=ours > ms",
    ("GLM-4.7-Flash", "LoRA"): "sft_step.json > results > row=glm-4.7-flash > ms",
    ("Gemma 4", "LoRA"): "sft_step.json > results > row=gemma-4-26b-a4b > ms",
}
"""Where each method that the README marks as measured was."""


def test_what_the_readme_marks_as_measured_was(claims):
    table = README.read_text("utf-8").split("## What can I train?")[1].split("\n\n")[1]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    marked = {
        (model, method)
        for models, *marks in rows
        for method, mark in zip(header[1:], marks, strict=True)
        for model in models.split(", ")
        if mark == "●"
    }
    assert marked == {*METHODS}
    assert all(claims.evaluate(source) > 0 for source in METHODS.values())


def test_the_readme_answers_three_strangers():
    text = " ".join(README.read_text("utf-8").split())
    ran = {
        content.get("gpu", "")
        for content in map(json.loads, map(Path.read_text, (ROOT / "benchmarks/results").glob("*.json")))
    }
    assert {word for gpu in ran for word in ("A100", "B200", "L40S", "RTX") if word in gpu} == set()
    assert "ran on H100 and H200 GPUs. Other GPUs are planned for, not run." in text  # which GPUs ran?
    cost = text.split("**No GPU?**")[1].split("##")[0]  # what does it cost me to try?
    assert all(words in cost for words in ("two CPU cores", "minutes", "GB", "no account", "no model"))
    undone = text.split("**Not done:**")[1].split("##")[0]  # what is not done?
    assert all(words in undone for words in ("other GPUs", "eight GPUs", "from an index"))


def test_the_readme_is_one_page():
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 80 and len(" ".join(lines).split()) < 620
