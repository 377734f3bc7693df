"""The page of rollouts holds all of a run in one file, with texts of models as data."""

import json
import math
import os
import re
import shutil
import subprocess

import pytest

from jaxglue.rl.page import PAGE, write_page
from jaxglue.rl.record import LINES

HOSTILE = "</script><img src=x onerror=alert(1)><!-- <script>\u2028 {{DATA}} DATA"


def test_hostile_answers_stay_data(tmp_path):
    line = {"step": 3, "origin": "a:1", "prompt": HOSTILE, "answer": HOSTILE, "rewards": {"<b>": None}}
    line |= {"advantage": 0.5, "tokens": 2, "ended": False, "log_probs": [-1.0, None]}
    (tmp_path / LINES).write_text(json.dumps(line) + "\n")
    write_page(
        tmp_path,
        [{"step": 3, "reward": 0.25, "rewards/<b>/mean": 1.0, "unknown": 2.0}, {"step": 4, "reward": math.inf}],
    )
    page = (tmp_path / PAGE).read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    found = json.loads(data)
    assert found["rollouts"][0]["answer"] == HOSTILE and "log_probs" not in found["rollouts"][0]
    assert found["metrics"] == {"reward": [[3, 0.25]], "rewards/<b>/mean": [[3, 1.0]]}
    assert page.count("<script") == 2 and "<img" not in page


def test_only_the_latest_answers_are_on_the_page(tmp_path):
    line = {"step": 1, "origin": "", "prompt": "", "answer": "", "rewards": {}, "log_probs": []}
    (tmp_path / LINES).write_text("".join(json.dumps(line | {"step": step}) + "\n" for step in range(2100)))
    write_page(tmp_path, [])
    found = json.loads(re.findall(r'id="data">(.*?)</script>', (tmp_path / PAGE).read_text(), re.DOTALL)[0])
    assert found["left"] == 100 and found["rollouts"][0]["step"] == 100


BROWSER = os.environ.get("JAXGLUE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="neither JAXGLUE_CHROMIUM nor PATH names a Chromium")
def test_a_browser_shows_charts_and_the_answers_that_are_searched(tmp_path):
    lines = [
        {"step": 1, "origin": "a:1", "prompt": [{"role": "user", "content": HOSTILE}], "answer": "a first"},
        {"step": 2, "origin": "a:2", "prompt": "two", "answer": f"a second {HOSTILE}"},
    ]
    rest = {"rewards": {"exact": 0.5}, "advantage": -0.5, "tokens": 2, "ended": True, "log_probs": []}
    (tmp_path / LINES).write_text("".join(json.dumps(line | rest) + "\n" for line in lines))
    write_page(tmp_path, [{"step": step, "reward": step / 4, "kl": 0.0} for step in (1, 2)])

    def shown(search: str) -> str:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
        command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'user'}", f"file://{tmp_path / PAGE}{search}"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return re.sub(r"<script.*?</script>", "", found, flags=re.DOTALL)

    everything, searched = shown(""), shown("#a%20SECOND")
    assert everything.count("<polyline") == 2 and everything.count("<article>") == 2
    assert "2 answers" in everything and "&lt;/script&gt;&lt;img src=x" in everything and "<img" not in everything
    assert searched.count("<article>") == 1 and "a:2" in searched and "a first" not in searched
