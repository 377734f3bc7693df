"""What other programs do where their recipe says nothing, read in their sources.

A recipe that leaves a setting out means the program's default for it, which is not ours.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxglue.settings.config import plain_fields
from jaxglue.settings.dialects.values import Nested

_PAIRS = ("dpo", "ipo", "kto", "orpo", "simpo")
_SCORED = ("reward", "classify")
READ = ("embed", "rerank", "rerank_score")
"""Objectives whose texts are read, not continued."""
_POLICY_GRADIENTS = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "luspo", "vespo", "rloo")
_TRAINER: Nested = {
    "optimizer": {
        **{"optimizer": "adamw", "schedule": "linear", "warmup_ratio": 0.0, "weight_decay": 0.0, "clip_norm": 1.0},
        **{"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    },
    "run": {"epochs": 3},
    "data": {"seed": 42, "eval_fraction": 0.0},
}
"""Settings of transformers' Trainer, under all but torchtune."""
_POLICY_GRADIENT = {"importance_sampling_mode": "sequence_mask", "use_bias_correction_kl": False}
"""TRL's settings of losses of answers written in training that differ from ours."""
_CPO = {"simpo": {"rpo_alpha": 1.0}}
"""The supervised loss beside SimPO's that TRL's trainer of CPO adds."""


@dataclass(frozen=True, kw_only=True)
class ForeignProgram:
    """Another program's settings where a recipe names none."""

    name: str
    version: str
    source: str
    """Repository and files that were read."""
    settings: Nested
    """Values by our groups and fields."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Those of the group `lora`, with adapters alone."""
    alpha_by_rank: float | None = None
    """Alpha divided by the rank, where the adapter's default follows it."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Peak learning rates by objective; empty where the program asks for one."""
    full_learning_rate: float | None = None
    """Peak learning rate where all weights train; None where it is that of adapters."""
    objective: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of the group `objective`, by objective."""
    batch: int = 8
    """Documents, or packed rows, in a micro-batch on each GPU."""
    accumulation: int = 1
    """Micro-batches in an optimizer step."""
    documents: int | None = None
    """Documents in an optimizer step, where the accumulation follows it."""
    rows: str | None = None
    """The longest document, in words, where the program's default depends on the model."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Remarks on defaults, by their names, that follow them in print."""
    drops_out_nothing: tuple[str, ...] = ()
    """Objectives whose trainers switch all dropout off, the adapters' too."""

    def missing(self, values: Nested, flags: Mapping[str, Any]) -> str:
        """Return the names of settings that the program demands, and translated values and flags lack."""
        model, lora = values.get("model", {}), values.get("lora", {})
        has_rate = self.learning_rates or "learning_rate" in {**self.settings["optimizer"], **flags}
        names = [] if has_rate or "learning_rate" in values.get("optimizer", {}) else ["learning_rate"]
        if model.get("method") == "lora" and "adapter" not in model and "rank" not in self.adapter:
            names += [name for name in ("rank", "alpha") if name not in {**lora, **flags}]
        return ", ".join(names)

    def fill(self, values: Nested, known: Mapping[str, type]) -> Iterator[str]:
        """Add the defaults of absent settings that the groups have; yield a text for each, such as "epochs 3"."""
        objective = values.get("objective", {}).get("objective", "sft")
        objective = "sft" if objective == "dft" else objective  # a loss of the same trainer
        is_adapted = values.get("model", {}).get("method", "lora") == "lora"
        groups = {**self.settings}
        if objective in self.objective:
            groups["objective"] = self.objective[objective]
        if is_adapted and "adapter" not in values.get("model", {}):
            groups["lora"] = self._adapter(values.get("lora", {}), objective)
        rate = self.learning_rates.get(objective)
        if not is_adapted and self.full_learning_rate is not None:
            rate = self.full_learning_rate
        if rate is not None:
            groups["optimizer"] = {"learning_rate": rate, **groups.get("optimizer", {})}
        for group, settings in ((group, groups[group]) for group in groups if group in known):
            table = values.setdefault(group, {})
            for name, value in settings.items():
                if (
                    name in plain_fields(known[group])
                    and name not in table
                    and not (_OTHERS.get(name, set()) & table.keys())
                ):
                    table[name] = value
                    yield f"{name} {' '.join(value) if isinstance(value, tuple) else value}{self.remarks.get(name, '')}"

    def _adapter(self, table: Mapping[str, Any], objective: str) -> dict[str, Any]:
        settings = dict(self.adapter)
        if self.alpha_by_rank is not None:
            settings["alpha"] = self.alpha_by_rank * table.get("rank", settings["rank"])
        if objective in self.drops_out_nothing:
            settings["dropout"] = 0.0
        if any("experts" in name for name in table.get("targets", ())):
            del settings["exclude"]
        return settings


_OTHERS = {"warmup_ratio": {"warmup_steps"}, "eval_fraction": {"eval_data"}, "epochs": {"steps"}}
"""Settings by whose presence the default of another has no meaning."""
_PEFT_TARGETS = ("q_proj", "v_proj")
"""Layers that PEFT adapts in models with such names where a recipe names none."""
_PEFT_EXCLUDES = ("experts",)
"""Matrices that transformers 5 holds as parameters, which PEFT's targets, names of modules, leave out."""
AXOLOTL = ForeignProgram(
    name="axolotl",
    version="0.18.0",
    source="axolotl-ai-cloud/axolotl: src/axolotl/utils/schemas, src/axolotl/core/builders",
    settings={
        "optimizer": {**_TRAINER["optimizer"], "schedule": "cosine", "warmup_ratio": 0.03},
        "run": {"epochs": 1},
        "data": {**_TRAINER["data"], "seq_len": 512, "overlong": "drop"},
    },
    adapter={"dropout": 0.0, "targets": _PEFT_TARGETS, "exclude": _PEFT_EXCLUDES},
    objective={**dict.fromkeys(_POLICY_GRADIENTS, _POLICY_GRADIENT), **_CPO},
    batch=1,
    remarks={"warmup_ratio": " (at most 100 steps there)"},
    drops_out_nothing=(*_PAIRS, "reward"),
)
LLAMA_FACTORY = ForeignProgram(
    name="LLaMA-Factory",
    version="0.9.5",
    source="hiyouga/LLaMA-Factory: src/llamafactory/hparams",
    settings={
        "optimizer": _TRAINER["optimizer"],
        "run": _TRAINER["run"],
        "data": {
            **_TRAINER["data"],
            **{"seq_len": 2048, "overlong": "truncate", "image_max_pixels": 768**2, "video_max_pixels": 256**2},
        },
    },
    adapter={"rank": 8, "dropout": 0.0, "targets": ("all-linear",), "exclude": _PEFT_EXCLUDES},
    alpha_by_rank=2.0,
    learning_rates=dict.fromkeys(("sft", *_PAIRS, *_SCORED), 5e-5),
    drops_out_nothing=_PAIRS,
)
FACTORY_V1 = ForeignProgram(
    name="LLaMA-Factory v1",
    version="0.9.6",
    source="hiyouga/LLaMA-Factory: src/llamafactory/v1/config, src/llamafactory/v1/core/base_trainer.py",
    settings={
        "optimizer": {
            **_TRAINER["optimizer"],
            **{"schedule": "constant", "weight_decay": 0.01, "learning_rate": 1e-4},
        },
        "run": _TRAINER["run"],
        "data": {**_TRAINER["data"], "seq_len": 2048, "overlong": "truncate"},
    },
    adapter={
        **{"rank": 8, "alpha": 16.0, "dropout": 0.05, "targets": ("all-linear",), "exclude": _PEFT_EXCLUDES},
    },
    batch=1,
)
_TRL_RATES = {
    "sft": 2e-5,
    "reward": 1e-4,
    **dict.fromkeys((*_PAIRS, *_POLICY_GRADIENTS), 1e-6),
}
TRL = ForeignProgram(
    name="TRL",
    version="1.10.0",
    source="huggingface/trl: trl/trainer/*_config.py, trl/trainer/model_config.py",
    settings={
        "optimizer": _TRAINER["optimizer"],
        "run": _TRAINER["run"],
        "data": {**_TRAINER["data"], "seq_len": 1024, "overlong": "truncate", "loss_on": "completion"},
        "model": {"router_balance_loss": 0.0},
    },
    remarks={"router_balance_loss": " (0.001 of mixtures there)"},
    adapter={"rank": 16, "alpha": 32.0, "dropout": 0.05, "targets": _PEFT_TARGETS, "exclude": _PEFT_EXCLUDES},
    learning_rates=_TRL_RATES,
    objective={**dict.fromkeys(_POLICY_GRADIENTS, _POLICY_GRADIENT), **_CPO},
    drops_out_nothing=(*_PAIRS, *_SCORED),
)
UNSLOTH = ForeignProgram(
    name="Unsloth",
    version="2026.8",
    source="unslothai/unsloth: unsloth/models/rl.py, unsloth/models/llama.py",
    settings={
        "optimizer": {
            **_TRAINER["optimizer"],
            **{"optimizer": "adamw_8bit", "warmup_ratio": 0.1, "weight_decay": 0.001},
        },
        "run": _TRAINER["run"],
        "data": {"seed": 3407, "eval_fraction": 0.0, "seq_len": 2048, "overlong": "truncate", "loss_on": "completion"},
    },
    adapter={"rank": 16, "alpha": 16.0, "dropout": 0.0, "targets": ("all-linear",)},
    learning_rates=dict.fromkeys(_TRL_RATES, 5e-5),
    objective={
        **{
            name: {"beta": 0.001, "importance_sampling_mode": "none", "use_bias_correction_kl": False}
            for name in _POLICY_GRADIENTS
        },
        **_CPO,
    },
    batch=4,
    accumulation=2,
    drops_out_nothing=(*_PAIRS, *_SCORED),
)
TORCHTUNE = ForeignProgram(
    name="torchtune",
    version="0.7.0",
    source="pytorch/torchtune: recipes/*.py, torchtune/models, torchtune/datasets",
    settings={
        "optimizer": {
            **{"optimizer": "adamw", "schedule": "constant", "warmup_ratio": 0.0, "weight_decay": 0.01},
            **{"clip_norm": 0.0, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "learning_rate": 1e-3},
        },
        "run": {"epochs": 1},
        "data": {"eval_fraction": 0.0, "overlong": "truncate"},
    },
    adapter={"rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": ("q_proj", "v_proj")},
    remarks={"weight_decay": " (there of norms, too)"},
    rows="documents are as long as the model's positions",
)
SWIFT = ForeignProgram(
    name="ms-swift",
    version="4.6",
    source="modelscope/ms-swift: swift/arguments, swift/trainers/arguments.py",
    settings={
        "optimizer": {**_TRAINER["optimizer"], "schedule": "cosine", "weight_decay": 0.1, "beta2": 0.95},
        "run": _TRAINER["run"],
        "data": {**_TRAINER["data"], "overlong": "drop"},
    },
    adapter={"rank": 8, "alpha": 32.0, "dropout": 0.05, "targets": ("all-linear",), "exclude": _PEFT_EXCLUDES},
    learning_rates=dict.fromkeys(("sft", *_PAIRS, *_SCORED, *READ, *_POLICY_GRADIENTS, "distill"), 1e-4),
    full_learning_rate=1e-5,
    objective={
        "simpo": {"beta": 2.0, "simpo_gamma": 1.0, "rpo_alpha": 1.0},
        "distill": {"beta": 0.5, "temperature": 0.9},
        **{
            name: {
                "beta": 0.04,
                "temperature": 0.9,
                "importance_sampling_mode": "none",
                "use_bias_correction_kl": False,
            }
            for name in _POLICY_GRADIENTS
        },
    },
    batch=1,
    documents=16,
    drops_out_nothing=(*_PAIRS, "reward", "distill"),
    rows="documents are as long as the model's positions",
)
PROGRAMS = (AXOLOTL, LLAMA_FACTORY, FACTORY_V1, TRL, UNSLOTH, TORCHTUNE, SWIFT)
_OF_SWIFT = {
    *("tuner_type", "train_type", "sft_type", "rlhf_type", "split_dataset_ratio", "val_dataset", "quant_bits"),
    *("loss_scale", "truncation_strategy"),
}
"""Settings of ms-swift that the other programs do not have."""
_OF_LLAMA_FACTORY = {"finetuning_type", "cutoff_len", "stage", "dataset_dir", "template", "lora_target", "val_size"}
"""Settings of LLaMA-Factory that the other programs do not have."""
_OF_FACTORY_V1 = {"train_dataset", "dist_config", "kernel_config", "peft_config", "quant_config", "optim_config"}
"""Settings of its v1 that the other programs do not have."""


def program_of(recipe: Mapping[str, Any]) -> ForeignProgram | None:
    """Return the program that a flat recipe is for, by the settings that it alone has; None for our own names."""
    if any(isinstance(value, dict) and "_component_" in value for value in recipe.values()):
        return TORCHTUNE
    if "base_model" in recipe:
        return AXOLOTL
    if "model" in recipe and _OF_FACTORY_V1 & recipe.keys():
        return FACTORY_V1
    if "model" in recipe and _OF_SWIFT & recipe.keys():
        return SWIFT
    if _OF_LLAMA_FACTORY & recipe.keys():
        return LLAMA_FACTORY
    if "model_name_or_path" in recipe:
        return TRL
    return UNSLOTH if "model_name" in recipe else None
