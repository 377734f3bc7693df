"""Run tasks of lm-evaluation-harness: `jaxglue evaluate --adapter runs/first/adapter --tasks hellaswag,gsm8k`.

Or measure a model that answers in one pass: `jaxglue evaluate --adapter runs/mine/adapter --data test.jsonl`.
"""

from typing import Any

from jaxglue.files.json_file import write_json
from jaxglue.serve.config import EvaluateConfig
from jaxglue.serve.harness import run_tasks
from jaxglue.terminal.lines import echo


def main(config: EvaluateConfig) -> None:
    """Print a line for each metric, and write all to --output."""
    if config.data:
        _measure(config)
        return
    found = run_tasks(config)
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            error = metrics.get(f"{metric}_stderr,{kind}")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                echo(f"{task}  {metric}  {value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else ""))
    if config.output is not None:
        write_json(
            config.output, _plain({key: found.get(key) for key in ("results", "versions", "n-shot", "n-samples")})
        )
        echo(f"wrote {config.output}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _measure(config: EvaluateConfig) -> None:
    from jaxglue.generation.diagram import draw_reliability
    from jaxglue.serve.measured import measure_rows

    measured = measure_rows(config)
    for name, value in measured.values.items():
        echo(f"{measured.kind}  {name}  {value:.4f}")
    if config.output is not None:
        bins = {"reliability": [list(each) for each in measured.bins]} if measured.bins else {}
        write_json(config.output, {"kind": measured.kind, **measured.values, **bins})
        echo(f"wrote {config.output}")
    if config.diagram is not None:
        draw_reliability(measured.bins, config.diagram)
        echo(f"wrote {config.diagram}")
