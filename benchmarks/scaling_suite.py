"""Cases and targets of `scaling.py --suite hgx`: all GPUs of a host, or some with `--gpus`."""

from collections.abc import Callable
from dataclasses import dataclass

ENDED_WITHIN_S, SAME_LOSSES = 5.0, 1e-5


@dataclass(frozen=True)
class Target:
    """A goal for the row of a case."""

    case: str
    text: str
    found: Callable[[dict], str]
    """Describes the row's value."""
    met: Callable[[dict], bool | None]
    """Returns whether a row meets the goal; None where it has no value for it."""


def hgx_targets(gpus: int) -> list[Target]:
    """Return the goals on `gpus` GPUs."""
    return [
        _at_least(f"8b-lora:data={gpus}", "efficiency", 0.95, "{:.1%} of one GPU's rate"),
        _at_least(f"8b-full:fsdp={gpus}", "mfu", 0.45, "{:.1%} of the peak FLOP/s"),
        _at_least(f"30b-a3b-lora:{_experts(gpus)}", "efficiency", 0.80, "{:.1%} of two GPUs' rate"),
        Target(
            f"kill:data={gpus}",
            f"named by all within {ENDED_WITHIN_S:.0f} s; equal when resumed, within {SAME_LOSSES:.0e} on half",
            lambda row: f"{row['ended_s']:.1f} s, {row['resumed_on_all']}, {row['resumed_on_half']:.0e}",
            lambda row: _survives(row, gpus),
        ),
        _at_least(f"70b-lora:fsdp={gpus}", "tokens_per_second_per_gpu", 1500, "{:,.0f} tokens/s a GPU"),
    ]


def _experts(gpus: int) -> str:
    return f"data={gpus // 2},expert=2" if gpus > 3 else "expert=2"


def hgx_cases(gpus: int) -> list[str]:
    """Return the cases that the targets need: those of fewer GPUs first, as they run side by side; the longest last."""
    cases = ["8b-lora:data=1", "30b-a3b-lora:expert=2", *(target.case for target in hgx_targets(gpus))]
    return list(dict.fromkeys(cases))


def verdicts(results: list[dict], gpus: int) -> list[dict]:
    """Return a row for every target: the value found, and whether it meets the goal."""
    rows = {row["case"]: row for row in results}
    return [_verdict(target, rows.get(target.case, {})) for target in hgx_targets(gpus)]


def _verdict(target: Target, row: dict) -> dict:
    if not row.keys() & {"ms", "resumed_on_half"}:
        found, met = ("failed", False) if "error" in row else ("not run", None)
    else:
        found, met = target.found(row), None if is_shortened(row) else target.met(row)
    if is_shortened(row):
        found += f", of {row['layers']} of {row['of_layers']} layers"
    verdict = {True: "yes", False: "no", None: "–"}[met]
    return {"case": target.case, "target": target.text, "found": found, "met": verdict}


def is_shortened(row: dict) -> bool:
    """Return whether a row measures fewer layers than the model has."""
    return "layers" in row and row["layers"] < row["of_layers"]


def _at_least(case: str, key: str, least: float, text: str) -> Target:
    def found(row: dict) -> str:
        return "nothing to compare with" if row.get(key) is None else text.format(row[key])

    def met(row: dict) -> bool | None:
        return None if row.get(key) is None else row[key] >= least

    return Target(case, "≥ " + text.format(least), found, met)


def _survives(row: dict, gpus: int) -> bool:
    named = row["named_by"] == gpus - 1 and row["ended_s"] <= ENDED_WITHIN_S
    return named and row["resumed_on_all"] == "equal" and row["resumed_on_half"] <= SAME_LOSSES
