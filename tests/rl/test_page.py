"""The page of rollouts holds all of a run in one file, with texts of models as data."""

import json
import re

from jaxglue.rl.page import PAGE, write_page
from jaxglue.rl.record import LINES

HOSTILE = "</script><img src=x onerror=alert(1)><!-- <script>\u2028 {{DATA}} DATA"


def test_hostile_answers_stay_data(tmp_path):
    line = {"step": 3, "origin": "a:1", "prompt": HOSTILE, "answer": HOSTILE, "rewards": {"<b>": None}}
    line |= {"advantage": 0.5, "tokens": 2, "ended": False, "log_probs": [-1.0, None]}
    (tmp_path / LINES).write_text(json.dumps(line) + "\n")
    write_page(tmp_path, [{"step": 3, "reward": 0.25, "rewards/<b>/mean": 1.0, "unknown": 2.0}])
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
