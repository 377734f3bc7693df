"""Recipes of TRL and axolotl for answers that the model writes in training."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxglue.settings.dialects.defaults import UNSLOTH, program_of
from jaxglue.settings.dialects.values import Nested

_NAMES = {
    *("reward_funcs", "num_generations", "max_completion_length", "steps_per_generation", "generation_batch_size"),
    *("importance_sampling_level", "mask_truncated_completions", "scale_rewards"),
}
"""Settings that such recipes alone have."""
_COMPARED = ("dpo", "ipo", "kto", "orpo", "simpo", "reward")
"""Objectives of answers in the rows, some of whose settings have such names, too."""
_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
_SEPARATE = "gdpo"
"""axolotl's name of GRPO whose rewards are normalized each by itself."""
_LOSS = "dapo"
"""TRL's default."""
_UNSLOTH_LOSS = "bnpo"
_UNSLOTH_DAPO = {"mask_truncated_completions": True, "epsilon_high": 0.28}
"""Settings that Unsloth gives TRL's loss of this name, whatever the recipe says."""
_GENERATIONS = 8
"""TRL's default."""
_REWARDS = {
    **dict.fromkeys(("accuracy_reward", "accuracy"), "math"),
    "think_format_reward": "regex?pattern=^<think>(?!.*<think>)(.*?)</think>.*$",
}
"""Our rewards by TRL's."""
_SCALES = {True: "group", False: "none", "True": "group", "False": "none"}
_WHOLE: dict[str, tuple[Any, ...]] = {"top_p": (1, None), "top_k": (0, -1, None), "min_p": (0, None)}
"""Settings that leave tokens out of sampling, with the values that leave none out."""
_BATCH, _STEPS, _PARTS = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"


def with_rollouts(recipe: Mapping[str, Any], where: str, objective: str | None = None) -> Nested:
    """Return the recipe with our objective, rewards and sizes in place of TRL's, if it asks for such answers.

    A step of TRL has as many answers as its batches on one GPU; its own table in a recipe of axolotl is `trl`.

    Args:
        recipe: flat settings.
        where: the beginning of errors.
        objective: named beside the recipe.

    Raises:
        ValueError: a value without a counterpart; begins with `where` and the key.
    """
    values = dict(recipe)
    if isinstance(nested := values.get("trl"), dict):
        values = {**{key: value for key, value in values.items() if key != "trl"}, **nested}
    if not _NAMES & values.keys():
        return dict(recipe)
    if (objective or values.get("objective", values.get("rl"))) in _COMPARED:
        if "max_completion_length" in values:  # in TRL the bound of a pair's answers
            values.setdefault("max_prompt_length", values.pop("max_completion_length"))
        return values
    try:
        of_unsloth = program_of(recipe) is UNSLOTH
        if of_unsloth and "objective" not in values:
            values |= _UNSLOTH_DAPO if values.setdefault("loss_type", _UNSLOTH_LOSS) == "dapo" else {}
        values |= _objective(values)
        values |= _sizes(values, whole_groups=of_unsloth)
        if funcs := values.pop("reward_funcs", None):
            values["reward"] = _rewards(funcs, values.pop("reward_weights", None))
        if "epsilon" in values:
            values["epsilon_low"] = values.pop("epsilon")
        if (scale := values.get("scale_rewards")) in _SCALES:
            values["scale_rewards"] = _SCALES[scale]
        if values.pop("vllm_importance_sampling_correction", True) is False:
            values["importance_sampling_mode"] = "none"
        values = {name: value for name, value in values.items() if value not in _WHOLE.get(name, ())}
        if (penalty := values.pop("repetition_penalty", 1)) not in (1, None):
            raise ValueError(
                f"repetition_penalty: {penalty!r:.100} changes the distribution whose log-probabilities are trained: "
                "leave it out, or write 1"
            )
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    return values


def _objective(values: Nested) -> Nested:
    """Take the loss out of the values, and return the objective."""
    ours, theirs = values.get("objective"), values.pop("rl", None)
    loss = values.pop("loss_type", ours if ours in _LOSSES else None)
    level = values.pop("importance_sampling_level", "token")
    if theirs == _SEPARATE:
        theirs = "grpo"
        values.setdefault("multi_objective_aggregation", "normalize_then_sum")
    if (named := ours or theirs) not in (None, *_LOSSES):
        return {"objective": named}
    if loss not in (None, *_LOSSES):
        raise ValueError(f"loss_type: expected {' | '.join(_LOSSES)}, got {loss!r:.100}")
    if level == "sequence" and loss == "grpo":
        return {"objective": "gspo"}
    return {"objective": loss or _LOSS, **({} if level == "token" else {"importance_sampling_level": level})}


def _sizes(values: Nested, *, whole_groups: bool) -> Nested:
    """Take sizes of batches out of the values, and return the answers and optimizer steps of a generation.

    With `whole_groups` a batch that would hold part of a group of answers is one group, as Unsloth makes it.
    """
    batch, accumulated = values.pop(_BATCH, values.pop("micro_batch_size", None)), values.pop(_STEPS, 1)
    parts = values.pop(_PARTS, accumulated)
    count = values.get("num_generations", 1 if values.get("objective") == "distill" else _GENERATIONS)
    if not all(
        isinstance(size, int) and size > 0 for size in (1 if batch is None else batch, accumulated, parts, count)
    ):
        raise ValueError(f"{_BATCH}, {_STEPS}, {_PARTS}, num_generations: expected whole numbers above 0")
    if parts % accumulated:
        raise ValueError(f"{_PARTS}: expected a multiple of {_STEPS}, {accumulated}, got {parts}")
    if whole_groups and batch is not None and batch * accumulated % count:
        batch = count
    found = {_PARTS: parts // accumulated}
    if "generation_batch_size" not in values and batch is not None:
        unit = count * found[_PARTS]
        found["generation_batch_size"] = -(-batch * parts // unit) * unit  # on several GPUs of TRL's it is more
    return found


def _rewards(functions: Any, weights: Any) -> list[str]:
    """Return names of rewards with their weights; functions of modules are those of files."""
    names = [functions] if isinstance(functions, str) else functions
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"reward_funcs: expected names of functions, got {names!r:.100}")
    return with_weights([_REWARDS.get(name, _of_file(name)) for name in names], weights)


def with_weights(names: Sequence[str], weights: Any) -> list[str]:
    """Return names of rewards with TRL's `reward_weights`; raise ValueError for others than a number for each."""
    weights = [1.0] * len(names) if weights is None else weights
    if not isinstance(weights, list) or not all(isinstance(weight, int | float) for weight in weights):
        raise ValueError(f"reward_weights: expected numbers, got {weights!r:.100}")
    if len(weights) != len(names):
        raise ValueError(f"reward_weights: expected one for each of {len(names)} functions, got {len(weights)}")
    return [_weighted(name, weight) for name, weight in zip(names, weights, strict=True)]


def _of_file(name: str) -> str:
    module, dot, function = name.rpartition(".")
    return name if not dot or ":" in name or "/" in name else f"{module.replace('.', '/')}.py:{function}"


def _weighted(name: str, weight: float) -> str:
    return name if weight == 1 else f"{name}{'&' if '?' in name else '?'}weight={weight:g}"
