"""When an objective's reference runs: beside the model in every step, or once, before training."""

from dataclasses import replace

import jax

from jaxglue.distributed import Processes
from jaxglue.objectives.config import ReferenceSettings
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload
from jaxglue.training.config import TrainConfig
from jaxglue.training.remat import RematChoice


def may_run_in_steps(config: TrainConfig) -> bool:
    """Tell whether the reference's layers run beside the model's in every step, as far as flags decide."""
    objective = config.objective
    if not isinstance(objective, ReferenceSettings):
        return False
    several = config.run.epochs > 1 and config.run.steps is None
    cached = objective.reference_cache == "on" or (objective.reference_cache == "auto" and several)
    return config.model.method == "lora" and config.model.adapter is None and not cached


def runs_in_steps(
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
    assert isinstance(config.objective, ReferenceSettings)
    how = config.objective.reference_cache
    if how == "off" and not frozen:
        raise ValueError(
            "--reference-cache off runs the frozen weights without adapter as the reference, and this run begins with "
            f"other weights (--method {config.model.method}, --adapter {config.model.adapter}): use auto or on"
        )
    if how != "auto" or not frozen:
        return how == "off"
    faster = processes.is_main and _is_faster_in_steps(workload, remat, epochs)
    return processes.all_gather_object(faster)[0]


def _is_faster_in_steps(workload: Workload, remat: RematChoice, epochs: float) -> bool:
    """Compare predicted times; with no weights to stream, both passes over a row take the same."""
    times = reference_seconds(workload, remat) if epochs > 1 else None
    return epochs <= 1 if times is None else epochs * times[0] <= times[1]


def reference_seconds(workload: Workload, remat: RematChoice) -> tuple[float, float] | None:
    """Predict the time that the reference adds to a step, and that of its own pass; None where they are the same."""
    if not remat.streams_weights or jax.default_backend() == "cpu":
        return None
    gpu = replace(device_gpu(jax.local_devices()[0]), files=remat.files)
    workload = replace(workload, tile=remat.tile, attention=remat.attention, reference=True)
    planner = Planner(workload, gpu, layers_per_program=remat.layers_per_program)
    return planner.predictor.reference_seconds(remat.policies, remat.weights)
