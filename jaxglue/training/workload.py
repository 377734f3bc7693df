"""The planner's workload of a training run."""

from dataclasses import replace

from jaxglue.models.config import DecoderConfig
from jaxglue.ops.adam import MOMENT_BYTES
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training.config import TrainConfig
from jaxglue.training.optax_optimizer import state_bytes


def make_workload(
    config: TrainConfig, model: DecoderConfig, document_lengths: tuple[int, ...], mesh: MeshShape
) -> Workload:
    """Return a run's workload on one GPU of a mesh.

    Args:
        config: of the run.
        model: the model's shape.
        document_lengths: of `Workload`.
        mesh: how GPUs share the work.
    """
    optimizer = config.optimizer
    workload = Workload(
        config=model,
        batch_size=config.run.batch_size // mesh.batch_shards,
        seq_len=config.data.row_tokens,
        lora=config.lora if config.model.method == "lora" else None,
        document_lengths=document_lengths,
        gradient_accumulation_steps=config.run.gradient_accumulation_steps,
        update_in_backward=optimizer.update_in_backward,
        moment_bytes=MOMENT_BYTES[optimizer.moments],
        host_embeddings=config.model.embeddings == "host",
        mesh=mesh,
        dtype=config.model.compute_dtype,
        attention=config.model.attention,
        tile=config.model.tile,
        objective=config.objective.make(),
        reference=config.objective.kind.needs_reference and _runs_beside(config),
    )
    if optimizer.optimizer == "adamw":
        return workload
    return replace(workload, moment_bytes=state_bytes(optimizer, abstract_parts(workload)[1]))


def _runs_beside(config: TrainConfig) -> bool:
    """Tell whether the reference's layers run beside the model's, as far as flags decide."""
    several = config.run.epochs > 1 and config.run.steps is None
    cached = config.objective.reference_cache == "on" or (config.objective.reference_cache == "auto" and several)
    return config.model.method == "lora" and config.model.adapter is None and not cached
