"""The fingerprint by which a resumed run is known to continue the same one, and differences of settings, key by key."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxglue.files.regular_file import file_digest
from jaxglue.hf.folder_digest import adapter_digest, folder_digest
from jaxglue.hf.hub import model_path
from jaxglue.hf.identity import weights_digest
from jaxglue.models.config import DecoderConfig, describe_as_earlier
from jaxglue.settings.config import NONE, stable_repr
from jaxglue.settings.recipe import as_dict, defaults_of, read_tables
from jaxglue.settings.secrets import masked
from jaxglue.training.run import Run

_DIGESTED = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope"),
    *("attention_bias", "mlp_bias", "initializer_range", "layer_windows", "moe", "quantize", "scores", "fp8_head"),
    *("fp8_experts", "num_experts", "num_experts_per_tok", "sparse_layers", "norm_topk_prob", "mxfp4", "rope_type"),
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
)
"""Fields of a model in the digests of earlier checkpoints, which have no mapping by field; none is ever added here."""
HELD_OUT = "held_out_rows"
_MAY_CHANGE = (
    "steps",
    f"inputs.{HELD_OUT}",
    *(f"rollouts.reward_{limit}" for limit in ("timeout", "memory", "workers")),
    "rollouts.teacher_server",
    "rollouts.exact_sampling",
)
"""Entries of a fingerprint in which a resumed run may differ: its length, held-out rows, limits of functions, where
servers are, and what may name the choice of `auto`, which the state of the rows holds."""
_PER_START = ("run.resume", "run.overwrite", "run.explain")
"""Settings of one start of a run, not of the run."""
_DIGESTS = {
    "data": " (digests of the rows' tokens: files, tokenizer, template or settings of the data have changed, or an "
    "older version left parts of the rows unread)",
    **dict.fromkeys(
        (f"inputs.{name}" for name in ("teacher", "adapter", "new_tokens")),
        " (digests: what lies at this path has changed)",
    ),
}
"""Explanations of entries whose values are digests."""
_SHOWN = 80
"""Longest value shown, in characters."""


def fingerprint(run: Run) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the one that it continues, JSON-able.

    `defaults` holds those of optional settings, by which versions that lack a setting compare (`differences`).
    """
    config = run.recorded
    groups: dict[str, Any] = {"model": run.model, "optimizer": config.optimizer}
    if config.model.method == "lora":
        groups["lora"] = config.lora
    if not config.objective.kind.supervised:
        groups["objective"] = config.objective
    if run.rollouts is not None:
        groups["rollouts"] = config.rollouts
    return {
        "weights": "random" if config.model.random_weights else weights_digest(config.model.folder),
        "data": run.data.fingerprint,
        "seed": config.data.seed,
        "method": config.model.method,
        "router_losses": list(config.model.router_losses or ()),
        "neftune_alpha": config.model.neftune_alpha,
        "dtype": str(config.model.compute_dtype),
        "adapter": config.model.adapter and str(config.model.adapter),
        "inputs": _inputs(run),
        "lora": None,
        "objective": None,
        "rollouts": None,
        "steps": run.schedule.total_steps,
        "batch": {
            "gradient_accumulation_steps": config.run.gradient_accumulation_steps,
            "batch_size": config.run.batch_size,
            "seq_len": config.data.row_tokens,
            **({"documents_per_step": config.run.documents_per_step} if config.run.documents_per_step else {}),
        },
        **({"draft": _draft(run)} if run.draft and run.draft.when == "with" else {}),
        **{name: as_dict(group) for name, group in groups.items()},
        "defaults": {name: defaults_of(group) for name, group in groups.items()},
        "model_digest": model_digest(run.model),
    }


def _draft(run: Run) -> dict[str, Any]:
    """Return the settings of the draft head whose weights the checkpoints hold."""
    assert run.draft is not None
    lora = run.draft.lora
    return {"when": run.draft.when, "rank": lora and lora.rank, "learning_rate": run.draft.optimizer.learning_rate}


def _inputs(run: Run) -> dict[str, str]:
    """Return the digests of further inputs that are named by a path, without those that tell in the data's."""
    config = run.recorded
    teacher, adapter, tokens = config.rollouts.teacher, config.model.adapter, config.model.new_tokens
    digests = {} if teacher in (None, "base") else {"teacher": folder_digest(model_path(teacher))}
    digests |= {} if adapter is None else {"adapter": adapter_digest(adapter)}
    digests |= {} if tokens is None else {"new_tokens": file_digest(tokens)[:16]}
    return digests | ({} if run.data.eval is None else {HELD_OUT: run.data.eval.fingerprint})


def model_digest(model: DecoderConfig) -> str:
    """Return the digest that stands for a model in earlier checkpoints, whichever fields it has been given since."""
    return hashlib.sha256(describe_as_earlier(stable_repr(model, _DIGESTED)).encode()).hexdigest()[:16]


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Return "saved …, now …" for each entry in which two nested dictionaries differ, by dotted key."""
    pairs = _differing(saved, json.loads(json.dumps(current)))
    return {key: f"saved {_shown(old)}, now {_shown(new)}" for key, old, new in pairs}


def fingerprint_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Return the differences of two fingerprints.

    A setting that one side's version did not have is no difference where the other side has its default, and a model
    saved as a digest is compared by its digest.
    """
    old, new = dict(saved), dict(current)
    old_defaults, new_defaults = (values.pop("defaults", {}) for values in (old, new))
    old, old_defaults = _with_current_names(old), _with_current_names(old_defaults)
    old, old_defaults = (_without_other_kinds(values, new, new_defaults) for values in (old, old_defaults))
    if "inputs" not in old:  # of earlier versions, which did not read them
        new.pop("inputs", None)
    _, digest = (values.pop("model_digest", None) for values in (old, new))
    if digest and isinstance(old.get("model"), str):
        new["model"] = digest
    return differences(_filled(old, new_defaults), _filled(new, old_defaults))


def _without_other_kinds(
    saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings of an earlier version, which had those of all kinds: without others', and defaults in full."""
    result = dict(saved)
    for group in ("objective", "optimizer"):
        table, now = saved.get(group), current.get(group)
        if isinstance(table, dict) and isinstance(now, dict):
            result[group] = {
                name: defaults[group][name] if value == NONE != now[name] and name in defaults[group] else value
                for name, value in table.items()
                if name in now
            }
    return result


_MOVED = {
    **{"attention_output_bias": ("attention", "output_bias"), "head_norms": ("attention", "head_norms")},
    **{"attention_scale": ("attention", "scale"), "attention_softcap": ("attention", "softcap")},
    **{"embedding_multiplier": ("scales", "embedding"), "residual_multiplier": ("scales", "residual")},
    **{"logit_divisor": ("scales", "logit_divisor"), "logit_softcap": ("scales", "logit_softcap")},
}
"""Groups of a model's settings, and names there, by those of earlier versions, which had no groups."""
_SHAPE = ("layer_shapes", "shared_width", "per_layer")
"""Settings of a family alone, in earlier versions all models'."""


def _with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of earlier versions' models under today's names."""
    model = settings.get("model")
    if not isinstance(model, dict):
        return dict(settings)
    earlier = (*_MOVED, *_SHAPE, "delta", "latent")
    named = {name: value for name, value in model.items() if name not in earlier}
    for name in _MOVED.keys() & model.keys():
        group, today = _MOVED[name]
        named[group] = {**named.get(group, {}), today: model[name]}
    if model.get("layer_shapes"):
        named["family_shape"] = {name: model[name] for name in _SHAPE}
    if isinstance(latent := model.get("latent"), dict):
        named["mixers"] = [latent] * model["num_hidden_layers"]
    if isinstance(delta := model.get("delta"), dict):
        sizes = {name: value for name, value in delta.items() if name != "layers"}
        named["mixers"] = [sizes if linear else {} for linear in delta["layers"]]
    if isinstance(moe := named.get("moe"), dict) and "mxfp4" in moe:  # experts' only format
        named["moe"] = {name: value for name, value in moe.items() if name != "mxfp4"}
        named["moe"]["quantize"] = "mxfp4" if moe["mxfp4"] else "none"
    return {**settings, "model": named}


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming each entry that may not change in which a resumed run differs from the saved one."""
    found = {key: text for key, text in fingerprint_differences(saved, current).items() if key not in _MAY_CHANGE}
    if found:
        raise ValueError(
            "cannot resume, this run differs from the one that wrote the checkpoint:\n"
            + "\n".join(f"  {key}: {text}{_DIGESTS.get(key, '')}" for key, text in found.items())
            + "\nUse the saved values, or start a new run in another output folder."
        )


def changed_settings(recipe: Path, run: Run) -> dict[str, str]:
    """Return the settings that differ from a run's `config.toml`; none if it cannot be read."""
    try:
        saved = read_tables(recipe)
    except (OSError, ValueError):
        return {}
    settings = run.recorded.shared
    now, defaults = masked(as_dict(settings), os.environ), defaults_of(settings)
    found = differences(_without_other_kinds(_filled(saved, defaults), now, defaults), now)
    return {key: text for key, text in found.items() if key not in _PER_START}


def _filled(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with absent ones at their defaults, in groups too."""
    groups = [key for key in settings if isinstance(settings[key], dict) and isinstance(defaults.get(key), dict)]
    return {**defaults, **settings, **{key: _filled(settings[key], defaults[key]) for key in groups}}


def _differing(
    saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in {**saved, **current}:
        old, new = saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differing(old, new, f"{prefix}{key}.")
        elif old != new:
            yield prefix + key, old, new


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "given"
    text = "none" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
