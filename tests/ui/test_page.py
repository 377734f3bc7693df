"""The page as one file: it runs its own program alone, and texts of models and data are text in it."""

import json
import re
import shutil
import subprocess

import pytest
from run_folders import HOSTILE

from jaxglue.ui.page import PANELS, static_page, to_json, write_page
from jaxglue.ui.run_files import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WORDS = {
    "plan": "loss, first → last",
    "curves": "learning_rate|grad_norm",
    "rollouts": "first and last step",
    "samples": "before training",
    "exports": "jaxglue export --gguf q4_k_m --adapter",
}
"""What each panel without a server shows."""


def test_data_cannot_end_the_script_that_holds_them(runs):
    page = static_page([read_run(run).as_json() for run in runs])
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert "<" not in data and [run["name"] for run in json.loads(data)] == ["sft", "dpo", "grpo"]
    assert json.loads(data)[2]["rollouts"][0]["answer"] == HOSTILE[0]
    assert "default-src 'none'; script-src 'sha256-" in page and "unsafe" not in page


def test_numbers_that_json_lacks_are_null():
    assert to_json({"a": [float("nan"), float("inf"), 1.5, True, None]}) == '{"a": [null, null, 1.5, true, null]}'


def test_a_run_gets_its_page(runs):
    assert write_page(runs[0]).read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("panel", sorted(WORDS))
def test_panels_show_and_run_nothing_of_their_data(runs, tmp_path, panel):
    page = tmp_path / "page.html"
    page.write_text(static_page([read_run(run).as_json() for run in runs]), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    shown = subprocess.run([*command, f"file://{page}#{panel}"], capture_output=True, text=True, timeout=120).stdout
    main = shown.partition("<main")[2].partition("</main>")[0]
    assert re.search(WORDS[panel], main) and "<title>sft, dpo, grpo</title>" in shown
    assert "<script" not in main and 'onerror="' not in re.sub(r"&lt;.*?&gt;", "", main)


def test_every_panel_has_a_file():
    assert set(WORDS) | {"rows", "chat", "reliability"} == set(PANELS)  # the last of runs of decisions alone
