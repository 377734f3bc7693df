"""Which remat policy a run uses, and whether it fits the GPU: decided before the weights are loaded."""

import os
from dataclasses import dataclass

import jax
import psutil

from jaxglue.engine.policy import AUTO, RematPolicy, parse_policies
from jaxglue.models.config import DecoderConfig
from jaxglue.ops.adam import MOMENT_BYTES
from jaxglue.planner.gpus import GIB
from jaxglue.planner.planner import HOST_LIMIT, Plan, Planner, Workload, pinned_memory
from jaxglue.planner.rates import device_gpu
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training.config import TrainConfig

_ON_CPU = "dots"
"""What auto stands for without a GPU."""
_STREAM = {"device": False, "host": True, "auto": None}


@dataclass(frozen=True, kw_only=True)
class RematChoice:
    """A policy for every layer and why."""

    policies: tuple[RematPolicy, ...]
    stream_weights: bool = False
    """The layers' frozen weights are in host memory."""
    remat: str
    """The policies as `--remat` takes them."""
    note: str = ""
    """Why these, and what is predicted of them."""

    def __str__(self) -> str:
        return self.remat + self.note


def choose_remat(config: TrainConfig, model: DecoderConfig, visible_keys: float, mesh: MeshShape) -> RematChoice:
    """The policy that the run asked for, checked against the GPU's memory, or the fastest that fits.

    Args:
        config: of the run.
        model: the model's shape.
        visible_keys: mean number of keys that a query attends to.
        mesh: how GPUs share the work.

    Raises:
        ValueError: it does not fit, with the nearest setting that does, or the policy is not for this model.
    """
    remat = config.model.remat
    if jax.default_backend() == "cpu":
        stream = config.model.weights == "host"
        note = " (auto, without a GPU)" if remat == AUTO else ""
        remat = _ON_CPU if remat == AUTO else remat
        policies = parse_policies(remat, model.num_hidden_layers)
        return RematChoice(policies=policies, stream_weights=stream, remat=remat, note=note)
    workload = Workload(
        config=model,
        batch_size=config.run.batch_size // mesh.rows,
        seq_len=config.data.seq_len,
        lora=config.lora if config.model.method == "lora" else None,
        visible_keys=visible_keys,
        gradient_accumulation_steps=config.run.gradient_accumulation_steps,
        update_in_backward=config.optimizer.update_in_backward,
        moment_bytes=MOMENT_BYTES[config.optimizer.moments],
        host_embeddings=config.model.embeddings == "host",
        mesh=mesh,
        dtype=config.model.compute_dtype,
    )
    host_memory = pinned_memory(psutil.virtual_memory().available, os.environ.get(HOST_LIMIT))
    planner = Planner(workload, device_gpu(jax.local_devices()[0]).limited(config.model.memory_limit))
    plan = planner.resolve(remat, stream_weights=_STREAM[config.model.weights], host_memory=host_memory)
    note = f"{' (auto)' if remat == AUTO else ''}, {_predicted(plan)}"
    return RematChoice(policies=plan.policies, stream_weights=plan.stream_weights, remat=plan.remat, note=note)


def _predicted(plan: Plan) -> str:
    host = f" and {plan.host_bytes / GIB:.1f} GiB on the host" if plan.host_bytes else ""
    weights = "weights on the host, " if plan.stream_weights else ""
    return f"{weights}predicted {plan.seconds * 1e3:,.0f} ms a step, {plan.device_bytes / GIB:.1f} GiB on the GPU{host}"
