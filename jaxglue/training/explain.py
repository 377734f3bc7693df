"""Reasons for a run's automatic choices (`--explain`): those of its plan, its mesh, its reference, and its kernels."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jaxglue.engine.layer_forms import explain_forms
from jaxglue.generation.decoded_experts import choose_decoded_experts
from jaxglue.generation.pages import MOST_SLOTS
from jaxglue.models.family import find_family
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.ops.attention import ATTENTION
from jaxglue.ops.backend import BackendChoice, compute_capability
from jaxglue.ops.cross_entropy import CROSS_ENTROPY, CrossEntropyCall
from jaxglue.ops.moe import GROUPED_MATMUL, GroupedCall
from jaxglue.ops.norm_rope import LLAMA_NORM, NORM_ROPE, NormCall
from jaxglue.ops.segments import FEW_DOCUMENTS, LONG_DOCUMENT, BatchKind
from jaxglue.planner.attention import attention_shape
from jaxglue.planner.explain import Reason
from jaxglue.planner.programs import abstract_input
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.training.remat import reference_seconds

if TYPE_CHECKING:
    from jaxglue.training.run import Run

_FLAGS = {"fp8": "--matmul fp8"}
"""Flags by which a barred backend serves."""


def run_reasons(run: "Run") -> dict[str, Reason]:
    """Explain a run's automatic choices, by the name of the setting; those of the plan are in `run.remat.reasons`."""
    kernels = kernel_reasons(
        run.workload,
        attention=run.remat.attention,
        slots=run.batches.max_segments,
        why_copied=run.why_copied,
        any_dtype=run.asked.dtype == "auto",
        any_attention=run.workload.attention == "auto",
    )
    return {**run.remat.reasons, **dict(_reference_reason(run)), **kernels}


def kernel_reasons(
    workload: Workload, *, attention: str, slots: int, why_copied: str, any_dtype: bool, any_attention: bool
) -> dict[str, Reason]:
    """Explain the choices of dtype, prompts and backends on this GPU, or on that of `tracing_for`.

    Args:
        workload: of the run.
        attention: its backend in the plan.
        slots: segments in a row, at most.
        why_copied: why each answer has a copy of its prompt; empty where answers share it.
        any_dtype, any_attention: they were not named.
    """
    model, dtype, capability = workload.config, workload.dtype, compute_capability()
    reasons = {}
    if any_dtype:
        reasons["dtype"] = Reason(choice=str(dtype), limit="the device: bfloat16 on GPUs, float32 on CPUs")
    if workload.objective.answers is not None:
        reasons["prompts"] = _prompt_reason(why_copied)
    if any_attention:
        reasons |= dict(_attention_reasons(workload, attention, slots, why_copied))
    choices = {"rotation": rotation_choice(workload), **layer_forms(workload), **mixer_choices(workload)}
    if model.moe is not None:
        activation = find_family(model.model_type).parts.experts.activation
        choices["experts"] = GROUPED_MATMUL.choose(capability, GroupedCall(dtype=dtype, activation=activation))
        sampled = isinstance(workload.objective, RolloutObjective)
        if sampled and (decoded := _decoded_experts(workload)) is not None:
            choices["experts in sampling"] = decoded
    loss = CrossEntropyCall(dtype=dtype, vocab_size=model.vocab_size, softcap=model.scales.logit_softcap)
    choices["loss"] = CROSS_ENTROPY.choose(capability, loss)
    reasons |= {title: _backend_reason(choice) for title, choice in choices.items()}
    return reasons


def _decoded_experts(workload: Workload) -> BackendChoice | None:
    """Return how experts are multiplied while answers are sampled, as many at a time as any device decodes."""
    return choose_decoded_experts(*abstract_parts(workload), workload.config, workload.dtype, MOST_SLOTS)


def layer_forms(workload: Workload) -> dict[str, BackendChoice]:
    """Return how the first layer and its projections are computed, by title."""
    graphdefs, *trees = abstract_parts(workload)
    trainable, frozen = (tree["layers"][0] for tree in trees)
    choices = explain_forms(graphdefs.layers[0], trainable, frozen, *abstract_input(workload))
    if workload.mesh.tensor > 1 or workload.mesh.context > 1:
        del choices["layers"]  # they run stage by stage, or by tiles
    return choices


def rotation_choice(workload: Workload) -> BackendChoice:
    """Return the backend of rotary embeddings and norms of heads."""
    interleaved = any(rotary.config.interleaved for rotary in workload.config.rotaries)
    parts = find_family(workload.config.model_type).parts
    style = LLAMA_NORM if parts.head_norms == "none" else parts.norm
    return NORM_ROPE.choose(compute_capability(), NormCall(dtype=workload.dtype, style=style, interleaved=interleaved))


def mixer_choices(workload: Workload) -> dict[str, BackendChoice]:
    """Return the backends of what layers have in place of attention, by title."""
    mixers = workload.config.mixer_kinds
    return {
        title: choice
        for mixer in mixers
        for title, choice in mixer.backends(compute_capability(), workload.dtype).items()
    }


def attention_choice(
    workload: Workload, *, attention: str, slots: int, why_copied: str, long_slots: int | None = None
) -> BackendChoice:
    """Return attention's backend for usual batches, or for those with long documents and up to so many slots."""
    long, model = long_slots is not None, workload.config
    windows, kind = model.layer_windows, BatchKind(long, min(slots, long_slots or slots))
    window = None if long and None in windows else next(filter(None, windows), None)
    shape = attention_shape(
        model,
        workload.dtype,
        workload.seq_len,
        kind,
        window=window,
        forked=workload.objective.forks and not why_copied,
        split=workload.mesh.context > 1,
    )
    return ATTENTION.choose(compute_capability(), shape, backend=attention)


def long_attention_choices(
    workload: Workload, *, attention: str, slots: int, why_copied: str
) -> Iterator[tuple[str, BackendChoice]]:
    """Yield rows, described, whose documents are mostly long, with the backend that they have in place of the usual."""
    if workload.seq_len < LONG_DOCUMENT:
        return
    choose = partial(attention_choice, workload, attention=attention, slots=slots, why_copied=why_copied)
    usual = choose()
    counts = {f"up to {FEW_DOCUMENTS}": FEW_DOCUMENTS, "more": FEW_DOCUMENTS + 1}
    for count, most in counts.items():
        if count == "more" and slots <= FEW_DOCUMENTS:
            continue
        choice = choose(long_slots=most)
        if choice.name != usual.name:
            yield f"rows of {count} documents, mostly of {LONG_DOCUMENT:,} tokens or more", choice


def _backend_reason(choice: BackendChoice, flag: str | None = None) -> Reason:
    limit = f"an obstacle: {choice.reason}" if choice.barred else f"preference: {choice.reason}"
    change = _FLAGS.get(choice.barred, f"{choice.barred} serves without the first obstacle") if choice.barred else None
    if change is None and flag and choice.runner_up:
        change = f"{flag} {choice.runner_up}"
    return Reason(choice=choice.name, limit=limit, runner_up=choice.runner_up, change=change)


def _attention_reasons(workload: Workload, attention: str, slots: int, why_copied: str) -> Iterator[tuple[str, Reason]]:
    usual = attention_choice(workload, attention="auto", slots=slots, why_copied=why_copied)
    if attention != "auto":
        limit = "the GPU's memory: workspace of other kernels would take too much of it"
        yield "attention", Reason(choice=attention, limit=limit, runner_up=usual.name, change="shorter rows")
        return
    yield "attention", _backend_reason(usual, "--attention")
    long = long_attention_choices(workload, attention="auto", slots=slots, why_copied=why_copied)
    for index, (rows, choice) in enumerate(long, start=1):
        reason = _backend_reason(choice, "--attention")
        yield f"long documents {index}", replace(reason, choice=f"{reason.choice} for {rows}")


def _prompt_reason(obstacle: str) -> Reason:
    if obstacle:
        return Reason(choice="a copy for each answer", limit=f"an obstacle: {obstacle}")
    return Reason(choice="shared by two answers", limit="preference: tokens are computed once", runner_up="copies")


def _reference_reason(run: "Run") -> Iterator[tuple[str, Reason]]:
    """Explain when an objective's reference runs, where that was not given."""
    if not run.objective.needs_reference or run.asked.reference_cache != "auto":
        return
    names = {True: "beside every step", False: "once, before training"}
    choice, other, flag = names[run.workload.reference], names[not run.workload.reference], "--reference-cache"
    if run.lora is None or run.base.adapter is not None:
        yield "reference", Reason(choice=choice, limit="the start: the reference is not the frozen weights alone")
    elif times := reference_seconds(run.workload, run.remat):
        in_step, alone = (f"{1e3 * seconds:,.0f} ms" for seconds in times)
        limit = f"time: {run.epochs:.2f} × {in_step} a step beside, {alone} for a pass of its own"
        yield "reference", Reason(choice=choice, limit=limit, runner_up=other, change=f"{flag}, other epochs")
    else:
        limit = f"time: both passes take the same, and the steps read each document {run.epochs:.2f} times"
        yield "reference", Reason(choice=choice, limit=limit, runner_up=other, change=f"{flag}, other epochs")
