"""The mesh of a run: the given one, or the first candidate whose plan fits the GPUs' memory."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxglue.distributed import Processes
from jaxglue.engine.residency import format_weights
from jaxglue.models.config import DecoderConfig
from jaxglue.planner.explain import Reason
from jaxglue.planner.plan import DoesNotFit
from jaxglue.planner.workload import Workload
from jaxglue.sharding.mesh import AUTO, MeshShape
from jaxglue.training.checks import check_mesh, why_rows_stay_whole
from jaxglue.training.config import TrainConfig
from jaxglue.training.remat import RematChoice, choose_remat
from jaxglue.training.workload import make_workload


def agree_on_mesh(
    config: TrainConfig,
    model: DecoderConfig,
    document_lengths: tuple[int, ...],
    processes: Processes,
    steps: int | None = None,
    *,
    has_data: bool = True,
) -> tuple[Workload, RematChoice]:
    """Return process 0's choice on every process: programs must be the same, and GPUs' free memory may differ.

    The arguments are those of `choose_mesh`.
    """
    if processes.is_main:
        workload, remat = choose_mesh(config, model, document_lengths, steps, has_data=has_data)
        settings: dict[str, Any] = {
            "remat": remat.remat,
            "weights": format_weights(remat.weights),
            "attention": remat.attention,
        }
        settings |= {"tile": remat.tile, "layers_per_program": remat.layers_per_program}
        processes.all_gather_object({"mesh": str(workload.mesh), "settings": settings})
        return workload, remat
    chosen = processes.all_gather_object(None)[0]
    settings = chosen["settings"]
    mesh = MeshShape.parse(chosen["mesh"])
    workload = make_workload(config, model, document_lengths, mesh, has_data=has_data)
    placed = replace(workload, attention=settings["attention"], tile=settings["tile"])
    remat = choose_remat(replace(config.model, **settings), placed)
    return replace(workload, host_embeddings=remat.host_embeddings), remat


def choose_mesh(
    config: TrainConfig,
    model: DecoderConfig,
    document_lengths: tuple[int, ...],
    steps: int | None = None,
    *,
    has_data: bool = True,
) -> tuple[Workload, RematChoice]:
    """Return the workload on the run's mesh, or on the first of `auto`'s candidates that fits, with its remat policy.

    Args:
        config: of the run.
        model: its architecture.
        document_lengths: of `Workload`.
        steps: of the run, about; None for many.
        has_data: of `make_workload`.

    Raises:
        ValueError: the mesh does not fit the devices, the batch or the model.
        DoesNotFit: nothing fits the GPUs' memory.
    """
    devices = jax.device_count()
    if devices > 1 and config.model.embeddings == "host":
        raise ValueError("--embeddings host is for one GPU: leave it out, or split the table with --mesh fsdp=…")
    full = config.model.method == "full"
    shapes = [MeshShape.parse(config.run.mesh)] if config.run.mesh != AUTO else _candidates(model, devices, full=full)
    kind = config.objective.kind
    tried = kind.answers is None and not kind.needs_rollouts  # no GPU has run pairs and rollouts in split rows
    if config.run.mesh == AUTO and tried and not why_rows_stay_whole(config, model):
        shapes = _with_split_rows(shapes, config, devices, full=full)
    for shape in shapes:
        check_mesh(config, model, shape, devices=devices)
    workload_of = partial(make_workload, config, model, document_lengths, has_data=has_data)
    explain, refused = config.run.explain, []
    for shape in shapes:
        workload = workload_of(shape)
        try:
            remat = choose_remat(config.model, workload, steps, explain=explain)
        except DoesNotFit as error:
            if shape is shapes[-1]:
                raise
            refused.append(str(error))
            continue
        if explain and config.run.mesh == AUTO:
            others = list(map(workload_of, shapes[shapes.index(shape) + 1 :]))
            reason = _mesh_reason(config, shape, refused, others)
            remat = replace(remat, reasons={"mesh": reason, **remat.reasons})
        return replace(workload, host_embeddings=remat.host_embeddings), remat
    raise AssertionError("no candidate")


def _mesh_reason(config: TrainConfig, chosen: MeshShape, refused: list[str], others: list[Workload]) -> Reason:
    """Explain a mesh by those before it, which do not fit, and by the next, as its plan predicts it."""
    if chosen.devices == 1:
        return Reason(choice="one GPU", limit="the machine: it has no other", change="more GPUs")
    order = "the order for full fine-tuning, parts alone" if config.model.method == "full" else "copies before parts"
    limit, runner_up = f"preference: {order}", None
    if refused:
        limit = f"the GPU's memory: {'; '.join(refused)}"
    elif chosen.context > 1:
        limit = f"the rows: --batch-size {config.run.batch_size} for {chosen.devices} GPUs"
    for workload in others[:1]:
        try:
            runner_up = f"{workload.mesh}: {choose_remat(config.model, workload)}"
        except DoesNotFit as error:
            runner_up = f"{workload.mesh}: {error}"
    return Reason(choice=str(chosen), limit=limit, runner_up=runner_up, change="--mesh, or the memory named")


def _with_split_rows(shapes: list[MeshShape], config: TrainConfig, devices: int, *, full: bool) -> list[MeshShape]:
    """Return the candidates among which the rows divide, and after them those with ever more GPUs to a row.

    Rows are split where there are fewer of them than GPUs, or where whole ones do not fit.
    """
    sizes = [size for size in range(2, devices + 1) if devices % size == config.data.row_tokens % size == 0]
    axes = ("fsdp",) if full else ("data", "fsdp")
    split = [MeshShape(**{axis: devices // size}, context=size) for size in sizes for axis in axes]
    dividing = [shape for shape in (*shapes, *split) if config.run.batch_size % shape.batch_shards == 0]
    return list(dict.fromkeys(dividing)) or shapes


def _candidates(model: DecoderConfig, devices: int, *, full: bool) -> list[MeshShape]:
    """Return candidates: for adapters, copies of the weights, then parts; for full fine-tuning, parts.

    Experts are spread over as few devices as they fit, since tokens then travel the least.
    """
    experts = math.gcd(devices, model.moe.num_experts if model.moe else 1)
    if full:
        return [MeshShape(expert=experts, fsdp=devices // experts)]
    sizes = [size for size in range(2, experts + 1) if experts % size == 0]
    spread = [MeshShape(expert=size, data=devices // size) for size in sizes]
    return [MeshShape(data=devices), *(spread or [MeshShape(fsdp=devices)])]
