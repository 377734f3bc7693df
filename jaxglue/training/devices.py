"""Choice of the mesh and of the remat policy on it, before weights are loaded."""

import math
from dataclasses import replace

import jax

from jaxglue.distributed import Processes
from jaxglue.engine.residency import format_weights
from jaxglue.models.config import DecoderConfig
from jaxglue.planner.plan import DoesNotFit
from jaxglue.sharding.mesh import AUTO, MeshShape
from jaxglue.training.config import TrainConfig
from jaxglue.training.remat import RematChoice, choose_remat


def choose_mesh(
    config: TrainConfig, model: DecoderConfig, document_lengths: tuple[int, ...], steps: int | None = None
) -> tuple[MeshShape, RematChoice]:
    """Return the run's mesh, or the first of `auto`'s candidates that fits, with the remat policy on it.

    Args:
        config: of the run.
        model: the model's shape.
        document_lengths: of `Workload`.
        steps: of the run, about; None for many.

    Raises:
        ValueError: the mesh does not fit the devices, the batch or the model.
        DoesNotFit: nothing fits the GPUs' memory.
    """
    devices = jax.device_count()
    if devices > 1 and config.model.embeddings == "host":
        raise ValueError("--embeddings host is for one GPU: leave it out, or split the table with --mesh fsdp=…")
    shapes = _candidates(config, model, devices) if config.run.mesh == AUTO else [MeshShape.parse(config.run.mesh)]
    for shape in shapes:
        shape.check(model, batch_size=config.run.batch_size, devices=devices)
    *others, last = shapes
    for shape in others:
        try:
            return shape, choose_remat(config, model, document_lengths, shape, steps)
        except DoesNotFit:
            continue
    return last, choose_remat(config, model, document_lengths, last, steps)


def with_global_batch(config: TrainConfig) -> TrainConfig:
    """Return the configuration with `batch_size` for all devices, if it is given for each."""
    run = config.run
    if run.per_device_batch_size is None:
        return config
    shards = jax.device_count() if run.mesh == AUTO else MeshShape.parse(run.mesh).batch_shards
    batch_size = run.per_device_batch_size * shards
    return replace(config, run=replace(run, batch_size=batch_size, per_device_batch_size=None))


def agree_on_mesh(
    config: TrainConfig,
    model: DecoderConfig,
    document_lengths: tuple[int, ...],
    processes: Processes,
    steps: int | None = None,
) -> tuple[MeshShape, RematChoice]:
    """Return process 0's choice on every process: programs must be the same, and GPUs' free memory may differ."""
    if processes.is_main:
        mesh, remat = choose_mesh(config, model, document_lengths, steps)
        processes.all_gather_object(
            [str(mesh), remat.remat, format_weights(remat.weights), remat.attention, remat.tile]
        )
        return mesh, remat
    chosen, remat_text, weights, attention, tile = processes.all_gather_object(None)[0]
    agreed = replace(
        config,
        model=replace(config.model, remat=remat_text, weights=weights, attention=attention, tile=tile),
        run=replace(config.run, mesh=chosen),
    )
    return choose_mesh(agreed, model, document_lengths)


def _candidates(config: TrainConfig, model: DecoderConfig, devices: int) -> list[MeshShape]:
    """Return candidates: for adapters, copies of the weights, then parts; for full fine-tuning, parts.

    Experts are spread over as few devices as they fit, since tokens then travel the least.
    """
    experts = math.gcd(devices, model.moe.num_experts if model.moe else 1)
    if config.model.method == "full":
        return [MeshShape(expert=experts, fsdp=devices // experts)]
    sizes = [size for size in range(2, experts + 1) if experts % size == 0]
    spread = [MeshShape(expert=size, data=devices // size) for size in sizes]
    return [MeshShape(data=devices), *(spread or [MeshShape(fsdp=devices)])]
