"""The planner's workload of a training run."""

from jaxglue.models.config import DecoderConfig
from jaxglue.ops.adam import MOMENT_BYTES
from jaxglue.planner.workload import Workload
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training.config import TrainConfig


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
    return Workload(
        config=model,
        batch_size=config.run.batch_size // mesh.batch_shards,
        seq_len=config.data.seq_len,
        lora=config.lora if config.model.method == "lora" else None,
        document_lengths=document_lengths,
        gradient_accumulation_steps=config.run.gradient_accumulation_steps,
        update_in_backward=config.optimizer.update_in_backward,
        moment_bytes=MOMENT_BYTES[config.optimizer.moments],
        host_embeddings=config.model.embeddings == "host",
        mesh=mesh,
        dtype=config.model.compute_dtype,
        attention=config.model.attention,
    )
