"""Choice between a reference that runs beside every step, and log-probabilities computed once before training."""

from dataclasses import replace

import jax

from jaxglue.distributed import Processes
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload
from jaxglue.training.config import TrainConfig
from jaxglue.training.remat import RematChoice


def runs_beside(
    config: TrainConfig, workload: Workload, remat: RematChoice, *, epochs: float, frozen: bool, processes: Processes
) -> bool:
    """Return whether the reference's layers run beside the model's in every step; `auto` takes the faster.

    Args:
        config: of the run.
        workload: as `remat` runs it.
        remat: places of the weights, and the policies.
        epochs: how often the steps read each document.
        frozen: the reference is the frozen weights alone.
        processes: of the run, which take process 0's choice.

    Raises:
        ValueError: `--reference-cache off` where the reference must be computed before training.
    """
    how = config.objective.reference_cache
    if how == "off" and not frozen:
        raise ValueError(
            "--reference-cache off runs the frozen weights without adapter as the reference, and this run begins with "
            f"other weights (--method {config.model.method}, --adapter {config.model.adapter}): use auto or on"
        )
    if how != "auto" or not frozen:
        return how == "off"
    faster = processes.is_main and _is_faster_beside(workload, remat, epochs)
    return processes.all_gather_object(faster)[0]


def _is_faster_beside(workload: Workload, remat: RematChoice, epochs: float) -> bool:
    """Compare predicted times; with no weights to stream, both passes over a row take the same."""
    if epochs <= 1 or not remat.streams_weights or jax.default_backend() == "cpu":
        return epochs <= 1
    gpu = replace(device_gpu(jax.local_devices()[0]), files=remat.files)
    workload = replace(workload, tile=remat.tile, attention=remat.attention, reference=True)
    planner = Planner(workload, gpu, layers_per_program=remat.layers_per_program)
    beside, alone = planner.reference_seconds(remat.policies, remat.weights)
    return epochs * beside <= alone
