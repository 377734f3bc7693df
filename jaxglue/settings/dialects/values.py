"""Settings of other programs whose values differ from ours in kind."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxglue.settings.config import Kind
from jaxglue.settings.dialects.data_sets import data_sets

Nested = dict[str, Any]
"""Values by groups and fields, those of groups one level down."""
_STAGES: dict[Any, dict[str, str]] = {
    **{stage: {} for stage in (None, "sft", "pt")},
    **{stage: {"objective": stage} for stage in ("dpo", "kto")},
    "rm": {"objective": "reward"},
}
"""Settings by LLaMA-Factory's stages."""
_PREFERENCE_LOSSES: dict[Any, dict[str, str]] = {
    **{loss: {} for loss in (None, "sigmoid")},
    **{loss: {"objective": loss} for loss in ("ipo", "orpo", "simpo")},
    "hinge": {"loss_type": "hinge"},
}
"""Further settings by the losses of its stage dpo."""


def with_objective(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe with our objective in place of LLaMA-Factory's `stage` and `pref_loss`.

    Raises:
        ValueError: another stage or loss; begins with `where` and the key.
    """
    values = dict(recipe)
    for key, known in (("stage", _STAGES), ("pref_loss", _PREFERENCE_LOSSES)):
        value = values.pop(key, None)
        if not isinstance(value, str | None) or value not in known:
            expected = " | ".join(str(name) for name in known if name)
            raise ValueError(f"{where}{key}: expected {expected}, got {value!r:.100}")
        values |= known[value]
    return values


def _adapter(value: Any) -> Nested:
    if value not in ("lora", "qlora"):
        raise ValueError(f"expected lora | qlora, got {value!r:.100}")
    return {"model": {"method": "lora", **({"quantize": "nf4"} if value == "qlora" else {})}}


def _steps(value: Any) -> Nested:
    """Return the steps; -1 leaves them to the epochs."""
    return {} if value == -1 else {"run": {"steps": Kind(scalar=int).read(value)}}


def _schedule(value: Any) -> Nested:
    """Return the schedule; the names of variants with a floor and a warm-up stand for ours, which have both."""
    names = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
    return {"optimizer": {"schedule": names.get(value, value)}}


def _schedule_settings(value: Any) -> Nested:
    if not isinstance(value, dict) or value.keys() - {"min_lr_rate"}:
        raise ValueError(f"expected min_lr_rate alone, got {value!r:.100}")
    return {"optimizer": {"min_lr_ratio": value.get("min_lr_rate", 0.0)}}


def _special_tokens(value: Any) -> Nested:
    """Return axolotl's eos token; packed rows need no padding token."""
    if not isinstance(value, dict) or value.keys() - {"pad_token", "eos_token"}:
        raise ValueError(
            f"the tokenizer's own are used but for eos_token, got {value!r:.100}: leave out the others if it has them, "
            "or save one that does"
        )
    return {"data": {"eos_token": value["eos_token"]}} if value.get("eos_token") is not None else {}


def _warmup(value: Any) -> Nested:
    """Return the warm-up, of which numbers below 1 are shares."""
    is_share = isinstance(value, float) and 0 < value < 1
    return {"optimizer": {"warmup_ratio" if is_share else "warmup_steps": value}}


def _wandb(value: Any) -> Nested:
    """Return the project; an empty one is none."""
    if value in (None, ""):
        return {}
    if not isinstance(value, str):
        raise ValueError(f"expected a name, got {value!r:.100}")
    return {"run": {"log_project": value}}


def _reward_model(value: Any) -> Nested:
    if not isinstance(value, bool):
        raise ValueError(f"expected true | false, got {value!r:.100}")
    return {"objective": {"objective": "reward"}} if value else {}


def _only(*values: Any) -> Callable[[Any], Nested]:
    """Return the reader of a setting that has the value of all runs here."""

    def read(value: Any) -> Nested:
        if value not in values:
            raise ValueError(f"expected {' | '.join(map(str, values))}, got {value!r:.100}")
        return {}

    return read


CONVERTERS: dict[str, Callable[[Any], Nested]] = {
    "adapter": _adapter,
    "datasets": data_sets("data"),
    "test_datasets": data_sets("eval_data"),
    "max_steps": _steps,
    "warmup_steps": _warmup,
    "reward_model": _reward_model,
    "wandb_project": _wandb,
    "num_labels": _only(1),
    "metric_for_best_model": _only("eval_loss", "loss", None),
    "greater_is_better": _only(False, None),
    "lr_scheduler": _schedule,
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_settings,
    "special_tokens": _special_tokens,
}
"""Readers of settings whose values differ in kind."""
