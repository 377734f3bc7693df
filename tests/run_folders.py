"""Folders of runs, made without training, with texts that a page must not take for markup."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "'\"--></style><svg/onload=alert(1)>",
    "\u2028\u2029\x00\x1b[31m\ud83d",
    "javascript:alert(1)",
)
"""Texts that would run or steer something if a page took them for markup."""


def write_lines(path: Path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder: Path, objective: str = "sft", steps: int = 20) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter").mkdir()
    (folder / "config.toml").write_text(f'[objective]\nobjective = "{objective}"\n[run]\nsteps = {steps}\n')
    summary = {"steps": steps, "first_loss": 3.0, "last_loss": 1.0, "tokens_per_second": 10.0, "seconds": 2.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    metrics = [
        {"step": step, "loss": 3 / step, "grad_norm": 1.0, "reward": step / steps} for step in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", [*metrics, {"step": steps, "eval_loss": 1.5}])
    samples = [{"step": step, "prompt": text, "answer": text} for text in HOSTILE for step in (0, steps)]
    write_lines(folder / "samples.jsonl", samples)
    if objective == "grpo":
        write_lines(folder / "rollouts.jsonl", rollouts(steps))
    return folder


def rollouts(steps: int, answers: int = 4) -> Iterator[dict[str, Any]]:
    for step in range(1, steps + 1):
        for number in range(answers):
            yield {
                **{"step": step, "origin": f"rows.jsonl:{step}", "prompt": HOSTILE[step % 5]},
                **{"answer": HOSTILE[number], "rewards": {"exact": number % 2, "none": None}},
                **{"advantage": number - 1.5, "tokens": 3, "ended": True, "log_probs": [-1.0] * 3},
            }
