"""The plan of a run: the remat policy, checked against the GPU's memory, and the host memory pinned for it."""

import gc
import math
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
from jax.extend.backend import clear_backends

from jaxglue.engine.garbage_collection import without_collection
from jaxglue.engine.host_buffers import Buffers, HostBuffers, MeshBuffers
from jaxglue.engine.layer_groups import check_grouped
from jaxglue.engine.policy import AUTO, RematPolicy, parse_policies
from jaxglue.engine.residency import DEVICE, HOST, MAPPED, is_streamed, parse_weights
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.projection.fp8 import check_fp8
from jaxglue.planner.device_memory import pool_gib
from jaxglue.planner.explain import Reason, plan_reasons
from jaxglue.planner.gpus import GIB, RECORDED, Dispatch, Gpu
from jaxglue.planner.host_memory import DEFAULT_PINNED_GIB, HOST_LIMIT, available_memory, pinned_memory
from jaxglue.planner.plan import DoesNotFit, Plan, gib
from jaxglue.planner.planner import Planner, embedding_places, fastest_place
from jaxglue.planner.rates import device_gpu, measure_files
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.training.checks import why_not_mapped
from jaxglue.training.config import ModelConfig

_ON_CPU = "dots"
"""The policy of `auto` without a GPU."""
_UNPLANNED = Reason(
    choice=_ON_CPU,
    limit="the device: no plan is made for a CPU's memory",
    change="a GPU, present or not (jaxglue estimate --gpu NAME --explain)",
)
PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
"""Environment variable by which JAX pins its whole limit at once, for arrays and again for copies to them."""
_SLACK, _LOST = GIB, 0.03
"""Bytes of pinned memory for batches and results, and the share lost between values."""


@dataclass(frozen=True, kw_only=True)
class RematChoice:
    """A policy for every layer, and the reason."""

    policies: tuple[RematPolicy, ...]
    weights: tuple[str, ...]
    """Place of each layer's frozen weights (see `residency`)."""
    remat: str
    """The policies as `--remat` takes them."""
    attention: str = "auto"
    """Attention's backend."""
    tile: int | None = None
    """Tokens that pass through a layer at a time, apart from attention; None for all."""
    layers_per_program: int = 1
    """Consecutive layers dispatched as one program."""
    host_embeddings: bool = False
    """Frozen embedding table and output projection are in host memory."""
    device_bytes: int = 0
    """Bytes of GPU memory that are predicted; 0 without a plan."""
    host_bytes: int = 0
    """Bytes of pinned host memory that are predicted."""
    offloaded_bytes: int = 0
    """Bytes of values among them."""
    compile_seconds: float = 0.0
    """Predicted time of compiling all programs; 0 if unknown."""
    files: float = 0.0
    """Rate of weights in files, bytes/s; 0 where it was not measured."""
    note: str = ""
    """Reason, and predicted time and memory."""
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    """Reasons for choices, by the name of the setting, where they are asked for."""

    @property
    def streams_weights(self) -> bool:
        """Return whether any layer's weights are streamed."""
        return is_streamed(self.weights)

    def __str__(self) -> str:
        return self.remat + self.note


@without_collection()
def choose_remat(
    settings: ModelConfig,
    workload: Workload,
    steps: int | None = None,
    *,
    explain: bool = False,
    pool: float | None = None,
) -> RematChoice:
    """Return the run's remat policy, checked against the GPU's memory, or the fastest that fits.

    Args:
        settings: of the model.
        workload: of the run on its mesh.
        steps: of the run, about; None for many.
        explain: give reasons, which takes seconds.
        pool: GiB of JAX's pool to plan with; by default what `--memory-limit` leaves it.

    Raises:
        DoesNotFit: it needs more memory than there is; names the nearest setting that fits.
        ValueError: the policy is not for this model, or the GPU has no FP8 for `--matmul fp8`.
    """
    if jax.default_backend() == "cpu":
        return _choose_on_cpu(settings, workload, explain=explain)
    if settings.matmul == "fp8":
        check_fp8(compute_capability())
    planner, plan = _fastest(settings, workload, steps, pool=pool)
    note = f"{_chosen(settings.remat, plan, steps)}, "
    note += _predicted(plan, host_embeddings=planner.workload.host_embeddings)
    if planner.gpu.dispatch != RECORDED:
        note += f"; dispatch, measured: {_dispatch(planner.gpu.dispatch)}; link {planner.gpu.link / 1e9:.0f} GB/s"
    return RematChoice(
        policies=plan.policies,
        weights=plan.weights,
        remat=plan.remat,
        attention=planner.workload.attention,
        tile=plan.tile,
        layers_per_program=plan.layers_per_program,
        host_embeddings=planner.workload.host_embeddings,
        device_bytes=plan.device_bytes,
        host_bytes=plan.host_bytes,
        offloaded_bytes=plan.offloaded_bytes,
        compile_seconds=plan.compile_seconds,
        files=planner.gpu.files,
        note=note,
        reasons=explain_plan(settings, planner, plan, _pinned_for(planner.workload, planner.gpu)) if explain else {},
    )


def explain_plan(settings: ModelConfig, planner: Planner, plan: Plan, host_memory: float) -> dict[str, Reason]:
    """Explain a plan's choices by the name of the setting, without those that the settings name."""
    asked = {"remat": settings.remat, "weights": settings.weights, "embeddings": settings.embeddings}
    return plan_reasons(planner, plan, host_memory=host_memory, **asked)


def host_memory() -> float:
    """Return the bytes of host memory that this process may pin."""
    return pinned_memory(available_memory(), os.environ.get(HOST_LIMIT))


def _fastest(
    settings: ModelConfig, workload: Workload, steps: int | None = None, *, pool: float | None = None
) -> tuple[Planner, Plan]:
    """Return the fastest plan over the embeddings' places.

    The host's dispatch and link are measured where plans are compared by time, or where the predicted time depends on
    them.
    """
    device = jax.local_devices()[0]
    files = cache(measure_files)
    places = embedding_places(workload, settings.embeddings)

    def find(gpu: Gpu) -> tuple[Planner, Plan]:
        limited = gpu.limited(pool or pool_gib(settings.memory_limit, exchanges=workload.mesh.devices > 1))
        return fastest_place(places, lambda placed: _resolve(settings, placed, limited, files, steps))

    if AUTO not in (settings.remat, settings.weights, settings.embeddings):
        planner, plan = find(device_gpu(device, RECORDED))
        if planner.predictor.hides_dispatch(plan) and not plan.host_bytes:
            return planner, plan
    return find(device_gpu(device))


def _resolve(
    settings: ModelConfig, workload: Workload, gpu: Gpu, files: Callable[[], float], steps: int | None
) -> tuple[Planner, Plan]:
    """Return the plan; weights may stay in files where it asks for that, or where the host's memory is short.

    `files` measures the rate of these.
    """
    pinned = _pinned_for(workload, gpu)
    options: dict[str, Any] = {"steps": steps, "layers_per_program": settings.layers_per_program}
    refused = why_not_mapped(settings, workload.mesh)
    if MAPPED in settings.weights and refused:
        raise ValueError(refused)
    if MAPPED in settings.weights:
        gpu = replace(gpu, files=files())
    planner = Planner(workload, gpu, **options)
    try:
        return planner, planner.resolve(settings.remat, weights=settings.weights, host_memory=pinned)
    except DoesNotFit:
        if refused or gpu.files or gpu.unified or settings.weights != AUTO:
            raise
    planner = Planner(workload, replace(gpu, files=files()), **options)
    return planner, planner.resolve(settings.remat, weights=settings.weights, host_memory=pinned)


def _pinned_for(workload: Workload, gpu: Gpu) -> float:
    """Return the bytes of host memory that may be pinned for each GPU of this process."""
    return gpu.host_memory(host_memory()) / local_gpus(workload)


def _choose_on_cpu(settings: ModelConfig, workload: Workload, *, explain: bool) -> RematChoice:
    """Return the run's policy unchecked, as a CPU's memory is not planned for."""
    auto, layers = settings.remat == AUTO, workload.config.num_hidden_layers
    remat, note = (_ON_CPU, " (auto, without a GPU)") if auto else (settings.remat, "")
    policies = parse_policies(remat, layers)
    weights = parse_weights(DEVICE if settings.weights == AUTO else settings.weights, layers)
    if MAPPED in weights and (refused := why_not_mapped(settings, workload.mesh)):
        raise ValueError(refused)
    size = settings.layers_per_program or 1
    check_grouped(size, policies, stream_weights=is_streamed(weights))
    return RematChoice(
        policies=policies,
        weights=weights,
        remat=remat,
        host_embeddings=settings.embeddings == "host",
        attention=settings.attention,
        tile=settings.tile,
        layers_per_program=size,
        note=note,
        reasons={"remat": _UNPLANNED} if explain and auto else {},
    )


def _chosen(remat: str, plan: Plan, steps: int | None) -> str:
    """Describe where the plan's policies are from, unless they are those of `--remat`."""
    if remat == AUTO:
        return " (auto)" if steps is None else f" (auto, for about {steps:,} steps)"
    note = plan.in_place_of(remat)
    return f" ({note})" if note else ""


def _predicted(plan: Plan, *, host_embeddings: bool) -> str:
    host = f" and {plan.host_bytes / GIB:.1f} GiB pinned on the host" if plan.host_bytes else ""
    host += f", {plan.mapped_bytes / GIB:.1f} GiB of weights stay in their files" if plan.mapped_bytes else ""
    weights = f"weights {plan.places}, " if is_streamed(plan.weights) else ""
    weights += "embeddings on the host, " if host_embeddings else ""
    tile = f"tiles of {plan.tile:,} tokens, " if plan.tile else ""
    tile += _programs(plan)
    needs = f"{plan.seconds * 1e3:,.0f} ms a step, {plan.device_bytes / GIB:.1f} GiB on the GPU{host}"
    return f"{weights}{tile}predicted {needs}; start: compiling, uncached, takes {plan.start}"


def _dispatch(host: Dispatch) -> str:
    call, array, copy = (f"{1e6 * rate:,.1f} µs" for rate in host)
    return f"{call} a program, {array} an array, {copy} a copied one"


def _programs(plan: Plan) -> str:
    if plan.one_program:
        return "a micro-batch is one program, "
    return f"{plan.layers_per_program} layers in a program, " if plan.layers_per_program > 1 else ""


def open_buffers(workload: Workload, remat: RematChoice) -> AbstractContextManager[Buffers | None]:
    """Return a context with page-locked buffers for a run's offloaded values on this process's GPUs.

    None on CPUs.

    Raises:
        ValueError: the host's memory was taken by others since the run was planned.
    """
    if not remat.offloaded_bytes or jax.default_backend() == "cpu":
        return nullcontext()
    count = local_gpus(workload)
    if (needed := count * remat.offloaded_bytes) > (free := available_memory()):
        raise ValueError(
            f"--remat {remat.remat} offloads {gib(needed)} to host memory, of which {gib(free)} are "
            "free: end other programs, or choose a policy that offloads less"
        )
    devices = jax.local_devices()[:count]
    if workload.mesh.devices == 1:
        return HostBuffers(devices[0], remat.offloaded_bytes)
    return MeshBuffers(devices, remat.offloaded_bytes)


def size_pool(workload: Workload, remat: RematChoice, environ: MutableMapping[str, str]) -> int:
    """Renew JAX's client with the limit that streamed weights need; return its GiB, 0 where the limit stays.

    JAX's pool doubles up to its limit, which a client reads when it begins. The limit stays where no weights are
    streamed, in runs of several processes, where the caller set `PREALLOCATE`, and where arrays exist, which would not
    survive.

    Raises:
        ValueError: the old client is still in use and holds the GPU's memory.
    """
    if HOST not in remat.weights or not _is_alone() or PREALLOCATE in environ:
        return 0
    gc.collect()
    if jax.live_arrays():
        return 0
    size = pinned_gib(workload, remat, float(environ.get(HOST_LIMIT, DEFAULT_PINNED_GIB)))
    environ[HOST_LIMIT] = str(size)
    _renew_client()
    return size


def restore_pool(environ: MutableMapping[str, str], limit: str | None) -> None:
    """Renew JAX's client with the limit of pinned memory before `size_pool`, where that set another.

    Where arrays exist, which would not survive, the client and its limit stay.
    """
    gc.collect()
    if environ.get(HOST_LIMIT) == limit or jax.live_arrays():
        return
    if limit is None:
        del environ[HOST_LIMIT]
    else:
        environ[HOST_LIMIT] = limit
    _renew_client()


def pinned_gib(workload: Workload, remat: RematChoice, limit: float) -> int:
    """Return the whole GiB to pin: the plan's and one of the largest arrays more, or the plan's within a limit."""
    frozen = abstract_parts(workload)[2]
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    least = local_gpus(workload) * (remat.host_bytes - remat.offloaded_bytes) + _SLACK
    return math.ceil(max(least, min((1 + _LOST) * least + largest, limit * GIB)) / GIB)


def local_gpus(workload: Workload) -> int:
    """Return the number of the mesh's GPUs that this process has."""
    return max(workload.mesh.devices // jax.process_count(), 1)


def _is_alone() -> bool:
    """Return whether one process trains on GPUs."""
    return jax.process_count() == 1 and jax.default_backend() != "cpu"


def _renew_client() -> None:
    client = weakref.ref(jax.local_devices()[0].client)
    clear_backends()
    for _ in range(4):  # JAX's own check of a leak takes as many, for cycles through tracebacks
        gc.collect()
    if client() is not None:
        raise ValueError(
            "JAX's pool of pinned memory cannot be sized for the streamed weights, as its first client is in use: "
            f"set {PREALLOCATE}=false to let it grow"
        )
