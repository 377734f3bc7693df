"""The plan's panel, shown before training."""

import jax

from jaxglue.ops.attention import ATTENTION, AttentionShape
from jaxglue.ops.backend import BackendChoice, compute_capability
from jaxglue.ops.moe import GROUPED_MATMUL
from jaxglue.ops.norm_rope import NORM_ROPE
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.segments import FEW_DOCUMENTS, LONG_DOCUMENT
from jaxglue.planner.gpus import GIB
from jaxglue.planner.memory import resident_bytes
from jaxglue.planner.workload import abstract_parts, parameter_counts
from jaxglue.sharding.mesh import AUTO
from jaxglue.sharding.plan import plan_sharding
from jaxglue.sharding.rules import Layout
from jaxglue.training.optimizer_config import warmup_steps
from jaxglue.training.row_length import row_text
from jaxglue.training.setup import Setup
from jaxglue.training.shared_prompt import refuse_shared_prompt

_STORED = {
    "none": "",
    **{how: f", linear layers of the decoder layers in {how}" for how in FORMATS[1:]},
    "fp8_stored": ", linear layers of the decoder layers stored in fp8 (e4m3)",
    "fp8_trained": ", linear layers of the decoder layers multiplied in fp8 (e4m3)",
    "fp8": ", linear layers of the decoder layers stored and multiplied in fp8 (e4m3)",
}
_HEAD = ", the output projection multiplied in it too"
_NAMES = {
    "adamw": "AdamW",
    "muon": "Muon for the layers' matrices, AdamW for the rest",
    "adafactor": "Adafactor",
    "lion": "Lion",
}


def plan_rows(setup: Setup) -> dict[str, object]:
    """Return the panel's rows, title → content."""
    model, data = setup.config.model, setup.config.data
    total, trained = parameter_counts(setup.workload)
    run, rows = setup.config.run, row_text(data.row_tokens, setup.model)
    rotation = NORM_ROPE.choose(compute_capability(), model.compute_dtype)
    return {
        "model": f"{model.model} ({setup.model.model_type}, {total:,} parameters)",
        "method": f"{model.method}, {trained:,} parameters train ({trained / total:.2%})",
        "objective": _objective(setup),
        "data": setup.data.report,
        "batch": f"{run.gradient_accumulation_steps} × {run.batch_size} rows of {rows}",
        "optimizer": _optimizer(setup),
        "steps": _steps(setup),
        "dtype": f"{model.compute_dtype}{_STORED[setup.model.quantize]}{_HEAD * setup.model.fp8_head}",
        "remat": setup.remat,
        "attention": _attention(setup),
        "rotation": f"{rotation.name}: {rotation.reason}",
        **_experts(setup),
        **_devices(setup),
        "memory": _memory(setup),
        "output": run.output,
    }


def _steps(setup: Setup) -> str:
    if setup.data.stream:
        return f"{setup.total_steps:,}"
    epoch = setup.batches.steps_per_epoch
    return f"{setup.total_steps:,} ({epoch:,} an epoch, {setup.total_steps / epoch:.2f} epochs)"


def _objective(setup: Setup) -> str | None:
    """Describe an objective other than supervised training, and whether its answers' prompt is computed once."""
    objective = setup.config.objective
    if objective.kind.supervised:
        return None
    title = setup.workload.objective.title
    if objective.kind.answers is None:
        return title
    copied = refuse_shared_prompt(setup.config, setup.model)
    prompts = f"each answer has a copy of its prompt: {copied}" if copied else "two answers share their prompt"
    return f"{title}; {prompts}{_reference(setup)}"


def _reference(setup: Setup) -> str:
    """Describe when the reference runs, if the objective has one."""
    objective = setup.config.objective
    if not objective.kind.needs_reference:
        return ""
    how = "runs beside every step" if setup.workload.reference else "is computed once, before training"
    return f"; the reference {how}{' (auto)' if objective.reference_cache == 'auto' else ''}"


def _optimizer(setup: Setup) -> str:
    optimizer, method = setup.config.optimizer, setup.config.model.method
    default = (
        f" (default of --method {method})" if optimizer.learning_rate == setup.config.default_learning_rate else ""
    )
    rise = f"{optimizer.schedule} after {warmup_steps(optimizer, setup.total_steps):,} warm-up steps"
    moments = {"float32": "", "8bit": " with 8-bit moments"}.get(
        optimizer.moments, f" with {optimizer.moments} moments"
    )
    return f"{_NAMES[optimizer.optimizer]}{moments}, learning rate {optimizer.learning_rate:g}{default}, {rise}"


def _memory(setup: Setup) -> str:
    size = resident_bytes(setup.workload).total(setup.remat.weights) / GIB
    each = " on each GPU" if setup.mesh.devices > 1 else ""
    return f"{size:.2f} GiB for weights, gradients and optimizer{each}; activations on top"


def _experts(setup: Setup) -> dict[str, object]:
    if (moe := setup.model.moe) is None:
        return {}
    choice = GROUPED_MATMUL.choose(compute_capability(), setup.config.model.compute_dtype)
    stored = ", in MXFP4" if moe.mxfp4 else ""
    served = f"{moe.num_experts_per_tok} of {moe.num_experts} for each token{stored}"
    return {"experts": f"{served}; grouped matmul by {choice.name}: {choice.reason}"}


def _devices(setup: Setup) -> dict[str, object]:
    kinds: dict[str, object] = {"devices": ", ".join(sorted({device.device_kind for device in jax.devices()}))}
    workload, mesh = setup.workload, setup.mesh
    if mesh.devices == 1:
        return kinds
    sharding = plan_sharding(
        Layout(mesh.abstract, workload.dtype),
        setup.model,
        *abstract_parts(workload)[1:],
        tokens=workload.tokens,
        gradient_accumulation_steps=workload.gradient_accumulation_steps,
    )
    auto = " (auto)" if setup.config.run.mesh == AUTO else ""
    return kinds | {"mesh": f"{mesh}{auto}; {sharding}", "communication": sharding.communication}


def _attention(setup: Setup) -> str:
    """Return the backends of most batches, and of those with mostly long documents."""
    usual = _attention_backend(setup, None)
    text = f"{usual.name}: {usual.reason}"
    if setup.config.data.row_tokens < LONG_DOCUMENT:
        return text
    few, many = (_attention_backend(setup, slots) for slots in (FEW_DOCUMENTS, FEW_DOCUMENTS + 1))
    rows = {f"up to {FEW_DOCUMENTS}": few} | ({"more": many} if setup.batches.max_segments > FEW_DOCUMENTS else {})
    for count, choice in rows.items():
        if choice.name != usual.name:
            documents = f"rows of {count} documents, mostly of {LONG_DOCUMENT:,} tokens or more"
            text += f"; {choice.name} for {documents}: {choice.reason}"
    return text


def _attention_backend(setup: Setup, long_slots: int | None) -> BackendChoice:
    """Return the backend of usual batches, or of those with long documents and up to so many slots."""
    long = long_slots is not None
    windows, slots = setup.model.layer_windows, setup.batches.max_segments
    shape = AttentionShape(
        dtype=setup.config.model.compute_dtype,
        head_dim=setup.model.head_dim,
        query_heads=setup.model.num_attention_heads,
        kv_heads=setup.model.num_key_value_heads,
        seq_len=setup.config.data.row_tokens,
        segment_slots=min(slots, long_slots or slots),
        long=long,
        forked=setup.workload.objective.answers is not None and not refuse_shared_prompt(setup.config, setup.model),
        window=None if long and None in windows else next((window for window in windows if window), None),
    )
    return ATTENTION.choose(compute_capability(), shape, backend=setup.remat.attention)
