"""Checks of a run's settings against its model and its GPU."""

import logging
from collections.abc import Mapping
from typing import Any

import jax

from jaxglue.hf.loading import require_stored
from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import find_family
from jaxglue.models.lora_config import ALL_LINEAR
from jaxglue.objectives.config import DistillSettings
from jaxglue.ops.attention import ATTENTION
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.choices import SERVED
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.segments import BatchKind
from jaxglue.planner.attention import attention_shape
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training.config import TrainConfig

_log = logging.getLogger(__name__)


def check_model(config: TrainConfig, model: DecoderConfig) -> None:
    """Raise ValueError for settings that the model cannot serve, with the remedy."""
    if model.quantize != "none" == config.model.storage and not config.model.random_weights:
        require_stored(config.model.folder, model)
    _check_full_fine_tuning(config, model)
    _check_served_experts(model)
    _check_per_layer(config, model)
    check_muon(config, model)
    if config.model.embeddings == "host" and model.tie_word_embeddings and model.per_layer is None:
        raise ValueError(
            f"--embeddings host: the output projection of {config.model.model} is tied to the table, so the GPU needs "
            "it all: leave it out"
        )
    if config.model.router_losses and model.moe is None:
        raise ValueError(f"{config.model.model} has no routers: leave out --router-balance-loss and --router-z-loss")
    if config.model.router_losses and find_family(model.model_type).parts.experts.order == "sigmoid_topk":
        raise ValueError(
            f"{config.model.model} weighs experts by sigmoids, and router losses are of a softmax: leave out "
            "--router-balance-loss and --router-z-loss"
        )
    top = config.objective.distill_top_k if isinstance(config.objective, DistillSettings) else None
    if top is not None and top > model.vocab_size:
        raise ValueError(f"--distill-top-k {top} is above the {model.vocab_size:,} tokens of the model: lower it")
    if config.data.seq_len is not None and config.data.seq_len > model.max_position_embeddings:
        raise ValueError(
            f"--seq-len {config.data.seq_len} is above the model's limit of {model.max_position_embeddings} positions "
            f"(max_position_embeddings in {config.model.model}/config.json): lower --seq-len"
        )


def warn_of_peft(config: TrainConfig, model: DecoderConfig) -> None:
    """Warn of adapters that PEFT (0.21) gives to experts, under whose names other layers of some models have theirs."""
    dense = {"gate_proj", "up_proj", "down_proj", ALL_LINEAR}
    glm, deepseek = "a GLM with experts", "a DeepSeek"
    named = {"qwen3_moe": "a Qwen3-MoE", "glm4_moe": glm, "glm4_moe_lite": glm}.get(model.model_type)
    named = deepseek if model.model_type in ("deepseek_v2", "deepseek_v3") else named
    moe = model.moe
    mixed = named and moe is not None and (moe.shared_size > 0 or not all(moe.sparse_layers))
    apart = [target for target in config.lora.targets if not target.endswith(".experts.down_proj")]
    found = sorted(dense & {target.rpartition(".")[2] for target in apart})
    if mixed and found and config.model.method == "lora":
        _log.warning(
            "--targets %s: PEFT leaves out or refuses adapters on the dense feed-forward layers%s of %s: "
            "use this one with jaxglue, or merge it (jaxglue export)",
            ", ".join(found),
            " and shared experts" if moe is not None and moe.shared_size else "",
            named,
        )


def check_mesh(config: TrainConfig, model: DecoderConfig, mesh: MeshShape, *, devices: int) -> None:
    """Raise ValueError, with the remedy, when the mesh does not fit devices, rows, objective or model."""
    mesh.check(model, batch_size=config.run.batch_size, seq_len=config.data.row_tokens, devices=devices)
    if mesh.context > 1 and (refused := why_rows_stay_whole(config, model)):
        raise ValueError(f"--mesh {mesh}: context cannot split rows {refused}: use data or fsdp instead of context")


def why_rows_stay_whole(config: TrainConfig, model: DecoderConfig) -> str:
    """Return which rows cannot be split over GPUs, in words; empty where they can."""
    kind, name = config.objective.kind, config.objective.objective
    if kind.needs_teacher:
        return f"of --objective {name}, whose teacher is on one"
    if kind.reads:
        return f"of --objective {name}, whose parts are read whole"
    if kind.forks and model.recurrent:
        return f"of --objective {name} in layers of {model.recurrent}"
    return ""


def check_muon(config: TrainConfig, model: DecoderConfig) -> None:
    """Raise ValueError for Muon on adapters or experts: it orthogonalizes whole matrices."""
    name = config.optimizer.optimizer
    if not config.optimizer.kind.needs_matrices:
        return
    if config.model.method != "full":
        raise ValueError(
            f"--optimizer {name} orthogonalizes whole weight matrices, not adapters: add --method full, or choose "
            "adamw, lion or adafactor"
        )
    if model.moe:
        raise ValueError(
            f"--optimizer {name} orthogonalizes single matrices, and the experts of {config.model.model} are stacked: "
            "choose adamw, lion or adafactor"
        )


def check_dropout(folder: str, raw: Mapping[str, Any]) -> None:
    """Raise ValueError for dropout in attention or of branches, which transformers would apply in training."""
    for name in ("attention_dropout", "residual_dropout", "resid_pdrop"):
        if raw.get(name):
            raise ValueError(
                f"{name}={raw[name]} in {folder}/config.json is not supported: set it to 0 to train without"
            )


def _check_per_layer(config: TrainConfig, model: DecoderConfig) -> None:
    """Raise ValueError for training values that a model's embeddings for each layer read: they take no gradient."""
    trained = (*config.lora.modules_to_save, *config.lora.vocabulary_targets)
    whole = "embed_tokens" in trained or config.lora.trainable_token_indices
    if model.per_layer is None:
        return
    if not (config.model.method == "full" or config.model.new_tokens or whole):
        return
    raise ValueError(
        f"{config.model.model} has embeddings for each layer, which are frozen, so the tokens' must be, too: use "
        "--method lora without --new-tokens and without --modules-to-save or --targets embed_tokens or "
        "--trainable-token-indices"
    )


def _check_served_experts(model: DecoderConfig) -> None:
    """Raise ValueError where no folder of the model can hold its experts as they are trained to be served."""
    made, together = FORMATS[model.quantize], find_family(model.model_type).parts.experts.stored == "together"
    if model.moe and model.quantize in SERVED and made.label == "nvfp4" and together:
        raise ValueError(
            f"{made.flag}: folders of {model.model_type} hold all experts as one tensor, which NVFP4 cannot: use "
            "--serve-as q4_k_m"
        )


def _check_full_fine_tuning(config: TrainConfig, model: DecoderConfig) -> None:
    if config.model.method != "full":
        return
    if not FORMATS[model.quantize].trains:
        raise ValueError(
            f"{config.model.model} is quantized to {FORMATS[model.quantize].label}, and --method full cannot train "
            "quantized weights: use --method lora, or the folder of the original"
        )
    if model.moe and model.moe.quantize != "none":
        raise ValueError("--method full cannot train experts in MXFP4: add --expand-experts, or use --method lora")


def why_prompts_are_copied(config: TrainConfig, model: DecoderConfig) -> str:
    """Return why each answer has a copy of its prompt; empty where attention's kernel serves forked segments."""
    if model.recurrent and jax.process_count() > 1:
        return f"a state of {model.recurrent} follows one continuation, and rows of copies differ between processes"
    if jax.default_backend() == "cpu":
        return ""
    dtype, seq_len, kind = config.model.compute_dtype, config.data.row_tokens, BatchKind(long=False, slots=2)
    window = next(filter(None, model.layer_windows), None)
    shapes = (attention_shape(model, dtype, seq_len, kind, window=window, forked=forked) for forked in (False, True))
    try:
        plain, forked = (ATTENTION.choose(compute_capability(), s, backend=config.model.attention) for s in shapes)
    except ValueError as error:
        return str(error)
    return forked.reason if forked.name == "reference" != plain.name else ""
