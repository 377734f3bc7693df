"""The panels of plan and results, and `summary.json`."""

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.planner.gpus import GIB
from jaxglue.planner.memory import resident_bytes
from jaxglue.planner.workload import abstract_parts, parameter_counts
from jaxglue.sharding.mesh import AUTO
from jaxglue.sharding.plan import plan_sharding
from jaxglue.sharding.rules import Layout
from jaxglue.terminal.console import Console
from jaxglue.training.explain import attention_choice, run_reasons
from jaxglue.training.progress import format_duration
from jaxglue.training.workload import row_text

if TYPE_CHECKING:
    from jaxglue.training.run import Run

PATHS = ("adapter", "last_adapter", "checkpoints", "metrics", "curve", "page")
"""Fields of the results that name a file or folder in the run's."""
_BORDER = 6
"""Width of a panel's border and of the space between its columns."""
_HEAD = ", the output projection multiplied in it too"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The results of a run; None for results that do not exist."""

    steps: int
    first_loss: float
    last_loss: float
    """Train losses, nats per target token."""
    best_eval_loss: float | None
    best_eval_step: int | None
    tokens_per_second: float
    mfu: float | None
    peak_memory_gb: float
    seconds: float
    startup_seconds: dict[str, float]
    """Seconds by stage, up to the end of the first step."""
    adapter: Path | None
    """Folder of the trained adapter, or of the model after full fine-tuning."""
    checkpoints: Path | None
    metrics: Path
    curve: Path
    adapter_step: int | None = None
    """Step whose weights `adapter` holds; None is the last."""
    last_adapter: Path | None = None
    """Folder of the last step's weights, where `adapter` holds the best."""
    stopped_early: str | None = None
    """Why the run ended before its last step."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps whose update was left out as a spike's."""
    drafts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shares of drafts that the model accepts, sampled and greedy, by the folder's draft head and by the trained one;
    empty where none is trained."""
    first_reward: float | None = None
    last_reward: float | None = None
    """Mean rewards of the first and the last answers that the model wrote in training."""
    page: Path | None = None
    """Page of the run, which a browser shows."""


def print_panel(console: Console, title: str, rows: Mapping[str, object]) -> None:
    """Print a titled table of names and values; rows of None are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    width = max(console.width - max(map(len, rows)) - _BORDER, 1)
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, Text(_with_breaks(str(value), width)))
    console.print(Panel(table, title=title, title_align="left", expand=False))


def _with_breaks(text: str, width: int) -> str:
    """Break words wider than the column, such as paths, after their slashes."""
    words = (
        word if len(word) <= width else "\n".join(textwrap.wrap(word.replace("/", "/ "), width)).replace("/ ", "/")
        for word in text.split(" ")
    )
    return " ".join(words)


def summary_rows(summary: RunSummary) -> dict[str, object]:
    """Return the rows of the closing panel."""
    best = summary.best_eval_loss
    return {
        **_progress(summary),
        "best eval loss": best if best is None else f"{best:.4f} at step {summary.best_eval_step:,}",
        "spikes": f"{len(summary.skipped_steps)} steps left out" if summary.skipped_steps else None,
        "tokens/s": f"{summary.tokens_per_second:,.0f}",
        "drafts": _accepted(summary.drafts),
        "MFU": summary.mfu if summary.mfu is None else f"{summary.mfu:.1%}",
        "peak memory": f"{summary.peak_memory_gb:.1f} GB",
        "time": format_duration(summary.seconds),
        "stopped early": summary.stopped_early,
        _kind(summary): _with_step(summary.adapter, summary.adapter_step),
        f"last {_kind(summary)}": _with_step(summary.last_adapter, summary.steps),
        "checkpoints": summary.checkpoints,
        "metrics": summary.metrics,
        "loss curve" if summary.first_reward is None else "curves": summary.curve,
        "page": summary.page,
    }


def _accepted(drafts: Mapping[str, Mapping[str, float]]) -> str | None:
    """Describe how many drafts are accepted."""
    shares = (f"{shares['sampled']:.1%} accepted by the {name} head" for name, shares in drafts.items())
    return ", ".join(shares) or None


def _progress(summary: RunSummary) -> dict[str, str]:
    """Return the row of rewards, of which the loss tells nothing, or that of train losses."""
    steps = f"in {summary.steps:,} steps"
    if summary.first_reward is not None and summary.last_reward is not None:
        return {"reward": f"{summary.first_reward:.3g} → {summary.last_reward:.3g} {steps}"}
    return {"train loss": f"{summary.first_loss:.4f} → {summary.last_loss:.4f} {steps}"}


def _kind(summary: RunSummary) -> str:
    """Return what the exported folder holds, by its name; the summary's field is `adapter` for both."""
    return "model" if summary.adapter is not None and summary.adapter.name.startswith("model") else "adapter"


def _with_step(folder: Path | None, step: int | None) -> str | None:
    return None if folder is None else f"{folder}" + (f" (step {step:,})" if step is not None else "")


def summary_json(summary: RunSummary) -> dict[str, object]:
    """Return the results for `summary.json`, paths as text."""
    values = dataclasses.asdict(summary)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def read_summary(values: Mapping[str, Any]) -> RunSummary:
    """Return the results that `summary_json` wrote."""
    return RunSummary(**{**values, **{name: Path(values[name]) for name in PATHS if values.get(name)}})


def plan_json(run: "Run") -> dict[str, list[list[str]]]:
    """Return the plan for the run's page: its rows, and the reasons for automatic choices."""

    def shown(rows: Mapping[str, object]) -> list[list[str]]:
        return [[title, str(text)] for title, text in rows.items() if text is not None]

    return {"rows": shown(plan_rows(run)), "choices": shown(run_reasons(run))}


def plan_rows(run: "Run") -> dict[str, object]:
    """Return the panel's rows, title → content; kernels are told with `--explain`, by `run_reasons`."""
    return {
        "model": f"{run.base.name} ({run.model.model_type}, {parameter_counts(run.workload)[0]:,} parameters)",
        "method": _method(run),
        "objective": _objective(run),
        "data": run.data.report,
        "template": run.texts.template,
        "loss on": run.texts.loss_on,
        **({"answers": run.rollouts.plan.description} if run.rollouts else {}),
        **({"sampling": f"exact sampling {run.exact}"} if run.exact else {}),
        "batch": _batch(run),
        "optimizer": _optimizer(run),
        "steps": _steps(run),
        "evaluation": _evaluation(run),
        "dtype": f"{run.dtype}{_stored(run)}{_HEAD * run.model.fp8_head}",
        "remat": run.remat,
        "attention": _slow_attention(run),
        **_experts(run),
        **_devices(run),
        "memory": _memory(run),
        "output": f"{run.output.folder}, {_saves(run)}",
    }


def _method(run: "Run") -> str:
    total, trained = parameter_counts(run.workload)
    method = "full" if run.lora is None else _adapters(run.lora)
    return f"{method}; {trained:,} parameters train ({trained / total:.2%})"


def _adapters(lora: LoraConfig) -> str:
    """Describe adapters by what decides their sizes and scales."""
    parts = [f"lora, rank {lora.rank}", f"alpha {lora.alpha:g}" + " / √rank" * lora.rslora]
    parts += [f"dropout {lora.dropout:g}"] * bool(lora.dropout) + ["DoRA"] * lora.dora
    text = f"{', '.join(parts)}, on {', '.join(lora.targets)}"
    text += f" but {', '.join(lora.exclude)}" * bool(lora.exclude)
    text += f" of layers {', '.join(map(str, lora.layers))}" * bool(lora.layers)
    patterns = ", ".join([f"rank {one}" for one in lora.rank_pattern] + [f"alpha {one}" for one in lora.alpha_pattern])
    text += f", with {patterns}" * bool(patterns)
    return text + f", and {', '.join(lora.modules_to_save)} whole" * bool(lora.modules_to_save)


def _evaluation(run: "Run") -> str:
    if run.data.eval is None:
        return "none: --eval-data names held-out rows" + ", --eval-fraction a share of all" * (run.rollouts is None)
    return f"every {run.cadence.evaluate:,} steps and at the end, on the held-out rows"


def _saves(run: "Run") -> str:
    """Describe checkpoints and exported weights."""
    weights = {"last": "the last weights", "best": "the best weights", "both": "the best and the last weights"}
    saves = f"a checkpoint every {run.cadence.save:,} steps, {weights[run.output.keep]} at the end"
    stop = run.output.early_stopping
    return saves if stop is None else f"{saves}, or after {stop:,} evaluations without a lower loss"


def _batch(run: "Run") -> str:
    rows = row_text(run.rows.seq_len, run.model)
    if run.rollouts:
        return f"as many × {run.rows.batch_size} rows of {rows} as the answers fill"
    count = str(run.rows.micro_batches)
    if run.rows.documents is not None:
        count = f"{run.rows.documents:,} documents in as many as they need,"
    return f"{count} × {run.rows.batch_size} rows of {rows}"


def _steps(run: "Run") -> str:
    if run.data.stream:
        return f"{run.schedule.total_steps:,}"
    return f"{run.schedule.total_steps:,} ({run.batches.steps_per_epoch:,} an epoch, {run.epochs:.2f} epochs)"


def _stored(run: "Run") -> str:
    description = FORMATS[run.model.quantize].description
    return f", linear layers of the decoder layers {description}" if description else ""


def _objective(run: "Run") -> str | None:
    """Describe an objective other than supervised training, and whether its answers' prompt is computed once."""
    if run.objective.supervised:
        return None
    if run.objective.answers is None:
        return run.objective.title
    copied = run.why_copied
    prompts = f"each answer has a copy of its prompt: {copied}" if copied else "two answers share their prompt"
    return f"{run.objective.title}; {prompts}{_reference(run)}"


def _reference(run: "Run") -> str:
    """Describe when the reference runs, if the objective has one."""
    if not run.objective.needs_reference:
        return ""
    how = "runs beside every step" if run.workload.reference else "is computed once, before training"
    return f"; the reference {how}{' (auto)' if run.asked.reference_cache == 'auto' else ''}"


def _optimizer(run: "Run") -> str:
    optimizer = run.schedule.optimizer
    rise = f"{optimizer.schedule} after {run.schedule.warmup:,} warm-up steps"
    form = optimizer.state_format
    moments = {"float32": "", "8bit": " with 8-bit moments"}.get(form, f" with {form} moments")
    lowest = f" to {optimizer.min_lr_ratio:g} × its peak" if optimizer.min_lr_ratio else ""
    rates = {"embeddings'": optimizer.embedding_learning_rate, "B's a multiple of A's:": optimizer.lora_plus_ratio}
    rates = {name: rate for name, rate in rates.items() if rate not in (None, 1.0)}
    others = "".join(f", {name} {rate:g}" for name, rate in rates.items())
    clipping = f"clipped to norm {optimizer.clip_norm:g}" if optimizer.clip_norm else "not clipped"
    return (
        f"{optimizer.kind.title}{moments}, learning rate {optimizer.learning_rate:g}{others}, {rise}{lowest}; weight "
        f"decay {optimizer.weight_decay:g}, gradients {clipping}"
    )


def _memory(run: "Run") -> str:
    size = resident_bytes(run.workload).total(run.remat.weights) / GIB
    each = " on each GPU" if run.mesh.devices > 1 else ""
    return f"{size:.2f} GiB for weights, gradients and optimizer{each}; activations on top"


def _experts(run: "Run") -> dict[str, object]:
    if (moe := run.model.moe) is None:
        return {}
    stored = "" if moe.quantize == "none" else f", in {FORMATS[moe.quantize].label.upper()}"
    return {"experts": f"{moe.num_experts_per_tok} of {moe.num_experts} for each token{stored}"}


def _devices(run: "Run") -> dict[str, object]:
    kinds: dict[str, object] = {"devices": ", ".join(sorted({device.device_kind for device in jax.devices()}))}
    workload, mesh = run.workload, run.mesh
    if mesh.devices == 1:
        return kinds
    sharding = plan_sharding(
        Layout(mesh.abstract, workload.dtype),
        run.model,
        *abstract_parts(workload)[1:],
        tokens=workload.tokens,
        gradient_accumulation_steps=workload.gradient_accumulation_steps,
    )
    auto = " (auto)" if run.asked.mesh == AUTO else ""
    return kinds | {"mesh": f"{mesh}{auto}; {sharding}", "communication": sharding.communication}


def _slow_attention(run: "Run") -> str | None:
    """Return why a GPU computes attention without a kernel, which takes many times longer, if it does."""
    attention, slots = run.remat.attention, run.batches.max_segments
    usual = attention_choice(run.workload, attention=attention, slots=slots, why_copied=run.why_copied)
    is_slow = compute_capability() is not None and usual.name == "reference"
    return f"without a kernel: {usual.reason}" if is_slow else None
