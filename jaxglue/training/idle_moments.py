"""The optimizer's state on the host while answers are sampled, which have its memory meanwhile."""

import math
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import jax

from jaxglue.engine.transfer import to_device, to_host
from jaxglue.models.parameters import Params
from jaxglue.planner.gpus import lookup_gpu
from jaxglue.planner.host_memory import HOST_LIMIT, available_memory, pinned_memory
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.sampling import AnswerTimes
from jaxglue.training.run import Run
from jaxglue.training.sampling import answer_times, may_move
from jaxglue.training.step import TrainState

_POOL = 2
"""Host memory that arrays may take, relative to their bytes: JAX's pool of pinned memory doubles as it grows."""


class HasState(Protocol):
    """Holder of the present state of training."""

    state: TrainState


class IdleMoments:
    """The optimizer's state as arrays that are idle in sampling, of which it has the memory where that pays.

    Args:
        holder: of the present state.
        times: of a step's answers, by the number sampled at a time.
    """

    def __init__(self, holder: HasState, times: AnswerTimes):
        self._holder, self._times = weakref.proxy(holder), times  # which holds this: its arrays end with it
        arrays = jax.tree.leaves(holder.state.optimizer)
        self._arrays, self.bytes = len(arrays), sum(map(_device_bytes, arrays))

    def __str__(self) -> str:
        return f"optimizer state of {self.bytes / 2**20:,.0f} MiB"

    def pays_moving(self, slots: int, more: int) -> bool:
        """Return whether more answers at a time save more time than it takes to move the arrays out and back."""
        return self._times.pays_moving(self.bytes, self._arrays, slots, more)

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Hold the arrays on the host in the context; after an error in it they stay there, as memory may be full."""
        holder = self._holder
        holder.state = holder.state._replace(optimizer=_out(holder.state.optimizer))
        yield
        holder.state = holder.state._replace(optimizer=to_device(holder.state.optimizer))


def idle_moments(run: Run, holder: HasState) -> IdleMoments | None:
    """Return the optimizer's state of a run as idle arrays; None where it stays.

    It does where training goes on meanwhile, on CPUs and GPUs whose rates are not known, where the GPU's memory is the
    host's or devices divide the weights, and where the host has too little.
    """
    assert run.rollouts is not None
    plan, devices = run.rollouts.plan, jax.local_devices()[: run.mesh.devices]
    if plan.config.staleness or lookup_gpu(devices[0].device_kind) is None:
        return None
    gpu, answers = device_gpu(devices[0]), plan.prompts * plan.answers // len(devices)
    prompt, longest = round(plan.dataset.lengths.mean()), plan.config.max_completion_length
    moments = IdleMoments(holder, answer_times(run.workload, gpu, prompt, answers, plan.answers, longest))
    room = pinned_memory(available_memory(), os.environ.get(HOST_LIMIT))
    fits = _POOL * len(devices) * moments.bytes <= room
    return moments if fits and may_move(gpu, run.mesh) else None


def _device_bytes(array: jax.Array) -> int:
    """Return the bytes of an array's part on a device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _out(tree: Params) -> Params:
    """Return arrays on the host, and free their memory on the devices, whoever holds them."""
    host = jax.block_until_ready(to_host(tree))
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(host), strict=True):
        if old is not new:
            old.delete()
    return host
