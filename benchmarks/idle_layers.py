"""Memory of layers that a benchmark does not run, held while it runs the others."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.engine.policy import RematPolicy
from jaxglue.planner.plan import Plan
from jaxglue.planner.planner import Planner

_BLOCK = 2**28
"""Bytes of an array."""


class IdleLayers:
    """Bytes on the GPU, and bytes of host memory, not pinned, that many threads have written."""

    def __init__(self, device_bytes: int, host_bytes: int):
        self._device = jax.block_until_ready([jnp.zeros(_BLOCK, jnp.uint8) for _ in range(device_bytes // _BLOCK)])
        with ThreadPoolExecutor() as threads:
            self._host = list(threads.map(lambda _: np.ones(_BLOCK, np.uint8), range(host_bytes // _BLOCK)))


def idle_layers(
    planner: Planner, whole: Planner, plan: Plan, layers: int, policies: Sequence[RematPolicy] | None = None
) -> IdleLayers:
    """Hold the memory of a model of `layers` beside its planned part, whose policies it repeats unless given."""
    repeats = layers // len(plan.policies)
    all_layers = whole.plan(policies or plan.policies * repeats, weights=plan.weights * repeats)
    part = planner.plan(plan.policies, weights=plan.weights)
    held = (all_layers.device_bytes, part.device_bytes), (all_layers.host_bytes, part.host_bytes)
    return IdleLayers(*(max(total - own, 0) for total, own in held))
