"""The planner's public entry."""

from jaxglue.engine.policy import AUTO
from jaxglue.planner.collection import without_collection
from jaxglue.planner.gpus import GIB, find_gpu
from jaxglue.planner.planner import Planner
from jaxglue.planner.plans import Plan
from jaxglue.planner.workload import Workload


@without_collection()
def plan(
    workload: Workload,
    gpu: str,
    *,
    remat: str = AUTO,
    weights: str = AUTO,
    memory_limit: float | None = None,
    host_memory: float = 64.0,
) -> Plan:
    """Predict time and memory of a training step, choosing the fastest policy that fits unless `remat` names one.

    Args:
        workload: model, batch and method, as shapes.
        gpu: name of a known GPU, such as "RTX 4090"; it need not be present.
        remat: a policy as `parse_policies` reads it, or `auto`.
        weights: places of the layers' frozen weights as `parse_weights` reads them, or `auto`.
        memory_limit: usable GPU memory in GiB; nine tenths of the GPU's by default.
        host_memory: host memory that may be pinned, GiB.

    Raises:
        ValueError: an unknown GPU or policy, or nothing fits.
    """
    planner = Planner(workload, find_gpu(gpu).limited(memory_limit))
    return planner.resolve(remat, weights=weights, host_memory=host_memory * GIB)
