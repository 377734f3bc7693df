"""Predict whether a training run fits a GPU, and how fast it is, without GPU or weights.

jaxglue estimate --model models/Qwen3-8B --seq-len 16384 --gpu 4090
jaxglue estimate --recipe qwen3-8b-lora --gpu 4090
"""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxglue.commands.configs import EstimateConfig
from jaxglue.engine.garbage_collection import without_collection
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.hub import model_path
from jaxglue.models import with_vision
from jaxglue.models.config import DecoderConfig
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.projection.fp8 import check_fp8
from jaxglue.planner.calibration import FILES_RATE
from jaxglue.planner.device_memory import pool_gib
from jaxglue.planner.explain import Reason
from jaxglue.planner.gpus import GIB, find_gpu
from jaxglue.planner.plan import MARGIN, DoesNotFit, Plan
from jaxglue.planner.planner import Planner, embedding_places, fastest_place
from jaxglue.planner.vision import TowerCost, tower_seconds
from jaxglue.planner.workload import TowerWork
from jaxglue.sharding.mesh import AUTO, MeshShape
from jaxglue.terminal.console import Console
from jaxglue.training.checks import check_mesh, why_prompts_are_copied
from jaxglue.training.explain import kernel_reasons
from jaxglue.training.remat import Asked, explain_plan, why_not_mapped
from jaxglue.training.report import print_panel
from jaxglue.training.sampling import PROMPT, PredictedAnswers, weigh_exact
from jaxglue.training.workload import KnownRows, make_workload, normalization, read_architecture, row_text, settle
from jaxglue.vision.processor import read_processor

_SHOWN = 5
_HOST = "dispatched as beside an H200"
"""Host of estimates (`RECORDED`); a run measures its own."""
_CLEARLY_LESS = 0.7
"""Share of another plan's memory below which a slower plan is worth showing."""


def make_planner(config: EstimateConfig) -> Planner:
    """Return the planner of the configured run; raise ValueError for an unknown model or GPU, or a bad setting."""
    mesh = MeshShape.parse("data=1" if config.run.mesh == AUTO else config.run.mesh)
    folder = model_path(config.model.model, config.model.revision, weights=False)
    model = read_architecture(config, folder)
    model, tower = _seeing(config, folder, model)
    config = settle(config, model, devices=mesh.devices)
    gpu = find_gpu(config.gpu)
    if config.model.matmul == "fp8":
        check_fp8(gpu.capability)
    check_mesh(config, model, mesh, devices=mesh.devices)
    documents = (config.document_tokens,) if config.document_tokens else ()
    host_tower = config.image_size is not None and tower is None
    workload = make_workload(config, model, documents, mesh, KnownRows(host_tower=host_tower, tower=tower))
    files = 0.0 if gpu.unified or why_not_mapped(Asked.of(config), mesh) else FILES_RATE
    gpu = replace(gpu, files=files).limited(pool_gib(config.model.memory_limit, exchanges=mesh.devices > 1))
    return Planner(workload, gpu, steps=config.run.steps, layers_per_program=config.model.layers_per_program)


def _seeing(config: EstimateConfig, folder: Path, model: DecoderConfig) -> tuple[DecoderConfig, TowerWork | None]:
    """Return the model, with its tower where images are given, and the tower's work in steps, which are full of them.

    It has none where features are kept.

    Raises:
        ValueError: settings of images without their size, or a model that sees none.
    """
    trains = config.model.train_vision
    if config.image_size is None:
        if config.images is None and trains == "none":
            return model, None
        flag = f"--train-vision {trains}" if config.images is None else "--images"
        raise ValueError(f"{flag} needs the pixels of an image: add --image-size, such as --image-size 1024x768")
    height, width = _pixels(config.image_size)
    raw = read_config(folder)
    model = with_vision(replace(model, vision=None), raw, trains=trains, **normalization(folder, raw))
    if trains == "none" and config.model.image_features != "off":
        return model, None
    processor = read_processor(folder, raw, **config.data.image_limits)
    assert processor is not None
    grid = processor.bounded_grid(height, width)
    return model, TowerWork(images=1 / processor.tokens(grid), patches=grid.patches)


@without_collection()
def print_estimate(config: EstimateConfig) -> bool:
    """Print a verdict and the plans behind it; return whether the run fits."""
    planner, weights = make_planner(config), config.model.weights
    host_memory = planner.gpu.host_memory(config.host_memory_gib * GIB)
    placed = embedding_places(planner.workload, config.model.embeddings)
    planners = [planner, *map(planner.on, placed[1:])]
    rows = (each.longest_row(host_memory=host_memory, weights=weights) for each in planners)
    longest = max((row for row in rows if row), default=None)
    if config.max_seq_len and longest:
        planners = [each.with_seq_len(longest) for each in planners]
    try:
        planner, best = fastest_place(
            planners, lambda each: (each, each.resolve(config.model.remat, weights=weights, host_memory=host_memory))
        )
        verdict = _verdict(planner, best, longest)
        if note := best.in_place_of(config.model.remat):
            verdict += f"; {best.remat} {note}"
    except DoesNotFit as error:
        best, verdict = None, f"Does not fit: {error}"
    console = Console()
    console.print(verdict, style="bold green" if best else "bold red")
    fits = best is not None
    if best is not None and config.objective.kind.needs_rollouts:
        answers, fits = _sampling(config, planner, best)
        console.print(answers, style=None if fits else "bold red")
    if config.image_size is not None:
        console.print(_images(config, planner, best))
    plans = planner.plans(host_memory) if config.all else planner.fitting_plans(host_memory)
    plans = [best, *plans] if best and best not in plans else plans
    fitting = [plan for plan in plans if planner.fits(plan, host_memory)]
    first = [best] if best else []
    shown = list(worth_showing(plans)) if config.all else list(_alternatives([*first, *fitting]))[:_SHOWN]
    if shown:
        console.print(_table(planner, shown, {id(plan) for plan in fitting}, verbose=config.all))
    if config.run.explain and best is not None:
        print_panel(console, "choices", _reasons(config, planner, best, host_memory))
    return fits


def _images(config: EstimateConfig, planner: Planner, plan: Plan | None) -> str:
    """Return a line about images of the given size: their tokens, and what a frozen tower costs."""
    assert config.image_size is not None
    folder, workload = model_path(config.model.model, config.model.revision, weights=False), planner.workload
    processor = read_processor(folder, read_config(folder), **config.data.image_limits)
    assert processor is not None and workload.config.vision is not None
    height, width = _pixels(config.image_size)
    grid = processor.bounded_grid(height, width)
    cost = TowerCost(workload.config, grid.patches)
    seconds, tokens = cost.seconds(planner.gpu), processor.tokens(grid)
    line = (
        f"Images of {width:,} × {height:,} pixels become {grid.columns * processor.patch:,} × "
        f"{grid.rows * processor.patch:,}: {tokens:,} tokens, {workload.row_tokens // tokens:,} in a row of "
        f"{workload.row_tokens:,}; the tower takes {sum(cost.flops) / 1e12:.1f} TFLOP an image, ~{1e3 * seconds:.0f} ms"
    )
    steps = workload.gradient_accumulation_steps
    if workload.tower is not None:
        in_step = steps * tower_seconds(workload, planner.gpu)
        share = "" if plan is None else f", {in_step / plan.seconds:.0%} of that time"
        return f"{line} a pass and ~{1e3 * in_step:,.0f} ms in each step whose rows are full of them{share}"
    seconds_full = steps * seconds * workload.tokens / tokens
    share = "" if plan is None else f" (+{seconds_full / plan.seconds:.0%} of that time)"
    size = cost.feature_bytes(workload.dtype)
    features = f"{size / 1e6:.1f} MB of features an image in the host's memory"
    if config.images is not None:
        every = config.images
        features += f", {size * every / 1e9:,.1f} GB and {seconds * every:,.0f} s of the tower for {every:,} images"
    return f"{line}, in the first epoch alone{share}; {features}"


def _pixels(size: str) -> tuple[int, int]:
    """Return (height, width) of WIDTHxHEIGHT, or of a square's side."""
    sides = size.lower().replace("×", "x").split("x")
    if not 1 <= len(sides) <= 2 or not all(side.strip().isdecimal() and 0 < int(side) <= 2**16 for side in sides):
        raise ValueError(f"--image-size {size!r:.40}: expected WIDTHxHEIGHT in pixels, such as 1024x768")
    return int(sides[-1]), int(sides[0])


def _sampling(config: EstimateConfig, planner: Planner, plan: Plan) -> tuple[str, bool]:
    """Return a line about the answers of a step, whose keys and values take the place of training's activations, and
    whether one fits."""
    prompt, longest = config.document_tokens or PROMPT, config.rollouts.max_completion_length
    try:
        found = PredictedAnswers.of(config, planner.workload, planner.gpu, plan.weights, prompt)
    except ValueError as error:
        return f"Sampling does not fit: {error}", False
    with tracing_for(planner.gpu.capability):
        exact = weigh_exact(config, found)[1]
    line = (
        f"Sampling in turns with training: ~{found.seconds:,.0f} s for answers of all lengths, {found.cache.slots:,} "
        f"of {len(found.lengths):,} answers at a time, prompts of {prompt:,} tokens and answers of at most "
        f"{longest:,}; keys and values {found.cache.bytes / GIB:.1f} of {found.free / GIB:.1f} GiB beside the weights; "
        f"--exact-sampling auto: {exact}"
    )
    return line, True


def _reasons(config: EstimateConfig, planner: Planner, plan: Plan, host_memory: float) -> dict[str, Reason]:
    """Explain the automatic choices, as they would be on the GPU."""
    reasons = {}
    if config.run.mesh == AUTO:
        reasons["mesh"] = Reason(choice="one GPU", limit="the estimate: it asks for no more", change="--mesh data=2")
    reasons |= explain_plan(Asked.of(config), planner, plan, host_memory)
    workload = replace(planner.workload, tile=plan.tile)
    slots = max(batches.kind.slots for batches in workload.micro_batches)
    with tracing_for(planner.gpu.capability):
        kernels = kernel_reasons(
            workload,
            attention=workload.attention,
            slots=slots,
            why_copied=why_prompts_are_copied(config, workload.config),
            any_dtype=config.model.dtype == "auto",
            any_attention=config.model.attention == "auto",
        )
        return reasons | kernels


def _verdict(planner: Planner, plan: Plan, longest: int | None) -> str:
    """Return one line: memory, speed, and the longest row that would fit."""
    memory = f"{plan.device_bytes / GIB:.1f} of {planner.gpu.memory / GIB:.1f} GiB"
    each = " for each GPU" if planner.workload.mesh.devices > 1 else ""
    host = f", {plan.host_bytes / GIB:.0f} GiB of host memory{each}" if plan.host_bytes else ""
    host += ", embeddings on the host" if planner.workload.host_embeddings else ""
    host += f", {plan.mapped_bytes / GIB:.0f} GiB of weights in their files" if plan.mapped_bytes else ""
    limit = " (the model's limit)" if longest == planner.workload.config.max_position_embeddings else ""
    row = f"longest row {longest or 0:,}{limit}; compiling takes {plan.start}"
    return f"Fits: {memory}, ~{_rate(planner, plan):,.0f} tokens/s{host}; {row}"


def _alternatives(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Yield, of plans sorted by time, those that need clearly less GPU or host memory than all faster ones."""
    device = host = math.inf
    for plan in plans:
        if plan.device_bytes < _CLEARLY_LESS * device or plan.host_bytes < _CLEARLY_LESS * host:
            yield plan
        device, host = min(device, plan.device_bytes), min(host, plan.host_bytes)


def worth_showing(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Yield, of plans sorted by time, presets and those that need clearly less GPU memory than all faster ones."""
    least = math.inf
    for plan in plans:
        if plan.device_bytes < (1 - MARGIN) * least or plan.remat in PRESETS:
            yield plan
            least = min(least, plan.device_bytes)


def _table(planner: Planner, plans: Iterable[Plan], fitting: set[int], *, verbose: bool) -> Table:
    """Return a table of plans, with time and fit where it is `verbose`."""
    gpu, work = planner.gpu, planner.workload
    tokens = f"{work.batch_size} × {row_text(work.seq_len, work.config)}"
    title = f"{gpu.name}, {gpu.memory / GIB:.1f} GiB, {gpu.matmul / 1e12:.0f} TFLOP/s: {tokens}, {_HOST}"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for name in ("tokens/s", "GPU GiB", "host GiB", *(("ms/step", "fits") if verbose else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for plan in plans:
        numbers = (f"{_rate(planner, plan):,.0f}", *(f"{n / GIB:.1f}" for n in (plan.device_bytes, plan.host_bytes)))
        more = (f"{plan.seconds * 1e3:,.0f}", "yes" if id(plan) in fitting else "no") if verbose else ()
        table.add_row(*numbers, *more, str(plan).replace(",", ", "))  # spaces let lines break; the flag accepts them
    return table


def _rate(planner: Planner, plan: Plan) -> float:
    work = planner.workload
    return work.tokens * work.gradient_accumulation_steps * work.mesh.batch_shards * work.mesh.context / plan.seconds


def main(config: EstimateConfig) -> None:
    """Print the estimate; end with status 1 where the run does not fit."""
    jax.config.update("jax_platforms", "cpu")
    if not print_estimate(config):
        sys.exit(1)
