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
    met: Callable[[dict], bool]


def hgx_targets(gpus: int) -> list[Target]:
    """Return the goals on `gpus` GPUs; the first number of a row is what they are measured against."""
    return [
        _at_least(f"8b-lora:data={gpus}", "efficiency", 0.95, "{:.1%} of one GPU's rate"),
        _at_least(f"8b-full:fsdp={gpus}", "mfu", 0.45, "{:.1%} of the peak FLOP/s"),
        _at_least(f"30b-a3b-lora:data={gpus // 2},expert=2", "efficiency", 0.80, "{:.1%} of two GPUs' rate"),
        _at_least(f"70b-lora:fsdp={gpus}", "tokens_per_second_per_gpu", 1500, "{:,.0f} tokens/s a GPU"),
        Target(
            f"kill:data={gpus}",
            f"named by all within {ENDED_WITHIN_S:.0f} s; equal when resumed, within {SAME_LOSSES:.0e} on half",
            lambda row: f"{row['ended_s']:.1f} s, {row['resumed_on_all']}, {row['resumed_on_half']:.0e}",
            lambda row: _survives(row, gpus),
        ),
    ]


def hgx_cases(gpus: int) -> list[str]:
    """Return the cases that the targets need, those of fewer GPUs first, as they run side by side."""
    base = ["30b-a3b-lora:expert=2"] if gpus > 2 else []
    return ["8b-lora:data=1", *base, *(target.case for target in hgx_targets(gpus))]


def verdicts(results: list[dict], gpus: int) -> list[dict]:
    """Return a row for every target: what was found, and whether it is met."""
    rows = {row["case"]: row for row in results}
    return [_verdict(target, rows.get(target.case, {})) for target in hgx_targets(gpus)]


def _verdict(target: Target, row: dict) -> dict:
    if "error" in row or not row:
        return {"case": target.case, "target": target.text, "found": "failed", "met": "no"}
    return {
        "case": target.case,
        "target": target.text,
        "found": target.found(row),
        "met": "yes" if target.met(row) else "no",
    }


def _at_least(case: str, key: str, least: float, text: str) -> Target:
    def value(row: dict) -> float:
        return row.get(key) or 0.0

    return Target(case, "≥ " + text.format(least), lambda row: text.format(value(row)), lambda row: value(row) >= least)


def _survives(row: dict, gpus: int) -> bool:
    named = row["named_by"] == gpus - 1 and row["ended_s"] <= ENDED_WITHIN_S
    return named and row["resumed_on_all"] == "equal" and row["resumed_on_half"] <= SAME_LOSSES
