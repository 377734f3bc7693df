"""The plan of a run: mesh, remat policy and places of weights, checked against memory, and when a reference runs."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Self

import jax

from jaxglue.distributed import Processes
from jaxglue.engine.garbage_collection import without_collection
from jaxglue.engine.layer_groups import check_grouped
from jaxglue.engine.policy import AUTO, RematPolicy, parse_policies
from jaxglue.engine.residency import DEVICE, MAPPED, format_weights, is_streamed, parse_weights
from jaxglue.models.config import DecoderConfig
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.choices import Storage
from jaxglue.ops.projection.fp8 import check_fp8
from jaxglue.planner.device_memory import pool_gib
from jaxglue.planner.explain import Reason, plan_reasons
from jaxglue.planner.gpus import GIB, RECORDED, Dispatch, Gpu
from jaxglue.planner.host_memory import HOST_LIMIT, available_memory, pinned_memory
from jaxglue.planner.plan import DoesNotFit, Plan
from jaxglue.planner.planner import Planner, embedding_places, fastest_place
from jaxglue.planner.rates import device_gpu, measure_files
from jaxglue.planner.workload import Workload
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training.checks import check_mesh, why_rows_stay_whole
from jaxglue.training.config import TrainConfig
from jaxglue.training.workload import WITH_DATA, KnownRows, make_workload, training_devices

_ON_CPU = "dots"
"""The policy of `auto` without a GPU."""
_BESIDE_SAMPLING = 0.6
"""Part of a GPU's memory for training where answers are sampled on it meanwhile."""
_UNPLANNED = Reason(
    choice=_ON_CPU,
    limit="the device: no plan is made for a CPU's memory",
    change="a GPU, present or not (jaxglue estimate --gpu NAME --explain)",
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings of a plan as they were given: `auto` where the plan decides."""

    mesh: str
    dtype: str
    remat: str
    weights: str
    embeddings: str
    layers_per_program: int | None
    memory_limit: float | None
    """GiB of GPU memory."""
    reference_cache: str
    fp8: bool
    """Products are in FP8."""
    random_weights: bool
    """Weights are drawn, and in no files."""
    storage: Storage
    """Of the decoder layers' linear layers."""
    explain: bool
    sampling: bool
    """Answers are sampled on the same GPU meanwhile."""

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Return the settings of a configuration."""
        model = config.model
        return cls(
            mesh=config.run.mesh,
            dtype=model.dtype,
            remat=model.remat,
            weights=model.weights,
            embeddings=model.embeddings,
            layers_per_program=model.layers_per_program,
            memory_limit=model.memory_limit,
            reference_cache=config.objective.reference_cache,
            fp8=model.matmul == "fp8",
            random_weights=model.random_weights,
            storage=model.storage,
            explain=config.run.explain,
            sampling=config.rollouts.staleness > 0 and jax.device_count() == 1,
        )


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
    asked: Asked,
    workload: Workload,
    steps: int | None = None,
    *,
    explain: bool = False,
    pool: float | None = None,
) -> RematChoice:
    """Return the run's remat policy, checked against the GPU's memory, or the fastest that fits.

    Args:
        asked: settings of the plan.
        workload: of the run on its mesh.
        steps: of the run, about; None for many.
        explain: give reasons, which takes seconds.
        pool: GiB of JAX's pool to plan with; by default what `--memory-limit` leaves it.

    Raises:
        DoesNotFit: it needs more memory than there is; names the nearest setting that fits.
        ValueError: the policy is not for this model, or the GPU has no FP8 for `--matmul fp8`.
    """
    if jax.default_backend() == "cpu":
        return _choose_on_cpu(asked, workload, explain=explain)
    if asked.fp8:
        check_fp8(compute_capability())
    planner, plan = _fastest(asked, workload, steps, pool=pool)
    note = f"{_chosen(asked.remat, plan, steps)}, "
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
        reasons=explain_plan(asked, planner, plan, _pinned_for(planner.workload, planner.gpu)) if explain else {},
    )


def explain_plan(asked: Asked, planner: Planner, plan: Plan, host_memory: float) -> dict[str, Reason]:
    """Explain a plan's choices by the name of the setting, without those that the settings name."""
    return plan_reasons(
        planner,
        plan,
        host_memory=host_memory,
        remat=asked.remat,
        weights=asked.weights,
        embeddings=asked.embeddings,
    )


def host_memory() -> float:
    """Return the bytes of host memory that this process may pin."""
    return pinned_memory(available_memory(), os.environ.get(HOST_LIMIT))


def _fastest(
    asked: Asked, workload: Workload, steps: int | None = None, *, pool: float | None = None
) -> tuple[Planner, Plan]:
    """Return the fastest plan over the embeddings' places.

    The host's dispatch and link are measured where plans are compared by time, or where the predicted time depends on
    them.
    """
    device = jax.local_devices()[0]
    files = cache(measure_files)
    places = embedding_places(workload, asked.embeddings)

    def find(gpu: Gpu) -> tuple[Planner, Plan]:
        limited = gpu.limited(pool or pool_gib(asked.memory_limit, exchanges=workload.mesh.devices > 1))
        if asked.sampling:
            limited = limited.limited(_BESIDE_SAMPLING * limited.memory / GIB)
        return fastest_place(places, lambda placed: _resolve(asked, placed, limited, files, steps))

    if AUTO not in (asked.remat, asked.embeddings):  # auto weights stay on the device where they fit, at any rate
        planner, plan = find(device_gpu(device, RECORDED))
        if planner.predictor.hides_dispatch(plan) and not plan.host_bytes:
            return planner, plan
    return find(device_gpu(device))


def _resolve(
    asked: Asked, workload: Workload, gpu: Gpu, files: Callable[[], float], steps: int | None
) -> tuple[Planner, Plan]:
    """Return the plan; weights may stay in files where it asks for that, or where the host's memory is short.

    `files` measures the rate of these.
    """
    pinned = _pinned_for(workload, gpu)
    refused = why_not_mapped(asked, workload.mesh)
    if MAPPED in asked.weights and refused:
        raise ValueError(refused)
    if MAPPED in asked.weights:
        gpu = replace(gpu, files=files())
    planner = Planner(workload, gpu, steps=steps, layers_per_program=asked.layers_per_program)
    try:
        return planner, planner.resolve(asked.remat, weights=asked.weights, host_memory=pinned)
    except DoesNotFit:
        if refused or gpu.files or gpu.unified or asked.weights != AUTO:
            raise
    gpu = replace(gpu, files=files())
    planner = Planner(workload, gpu, steps=steps, layers_per_program=asked.layers_per_program)
    return planner, planner.resolve(asked.remat, weights=asked.weights, host_memory=pinned)


def _pinned_for(workload: Workload, gpu: Gpu) -> float:
    """Return the bytes of host memory that may be pinned for each GPU of this process."""
    return gpu.host_memory(host_memory()) / local_gpus(workload)


def _choose_on_cpu(asked: Asked, workload: Workload, *, explain: bool) -> RematChoice:
    """Return the run's policy unchecked, as a CPU's memory is not planned for."""
    auto, layers = asked.remat == AUTO, workload.config.num_hidden_layers
    remat, note = (_ON_CPU, " (auto, without a GPU)") if auto else (asked.remat, "")
    policies = parse_policies(remat, layers)
    weights = parse_weights(DEVICE if asked.weights == AUTO else asked.weights, layers)
    if MAPPED in weights and (refused := why_not_mapped(asked, workload.mesh)):
        raise ValueError(refused)
    size = asked.layers_per_program or 1
    check_grouped(size, policies, stream_weights=is_streamed(weights))
    return RematChoice(
        policies=policies,
        weights=weights,
        remat=remat,
        host_embeddings=asked.embeddings == "host",
        attention=workload.attention,
        tile=workload.tile,
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


def local_gpus(workload: Workload) -> int:
    """Return the number of the mesh's GPUs that this process has."""
    return max(workload.mesh.devices // jax.process_count(), 1)


def why_not_mapped(asked: Asked, mesh: MeshShape) -> str | None:
    """Return why weights cannot stay in the model's files, with the remedy; None where they can."""
    if asked.random_weights:
        return "--weights mapped reads the model's files, and --random-weights draws others: leave one out"
    if asked.storage != "none":
        return (
            f"--weights mapped reads weights as they are stored, and {asked.storage} would quantize them each "
            "time: quantize the folder first (jaxglue export --quantize), or use --weights host"
        )
    if mesh.devices > 1:
        return f"--weights mapped is for one GPU, and --mesh {mesh} has {mesh.devices}: use --weights host"
    return None


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


def agree_on_mesh(
    config: TrainConfig,
    model: DecoderConfig,
    document_lengths: tuple[int, ...],
    processes: Processes,
    steps: int | None = None,
    rows: KnownRows = WITH_DATA,
) -> tuple[Workload, RematChoice]:
    """Return process 0's choice on every process: programs must be the same, and GPUs' free memory may differ.

    The arguments are those of `choose_mesh`.
    """
    if processes.is_main:
        workload, remat = choose_mesh(config, model, document_lengths, steps, rows)
        settings = {
            "remat": remat.remat,
            "weights": format_weights(remat.weights),
            "attention": remat.attention,
            "tile": remat.tile,
            "layers_per_program": remat.layers_per_program,
        }
        processes.all_gather_object({"mesh": str(workload.mesh), "settings": settings})
        return workload, remat
    chosen = processes.all_gather_object(None)[0]
    settings = chosen["settings"]
    mesh = MeshShape.parse(chosen["mesh"])
    workload = make_workload(config, model, document_lengths, mesh, rows)
    placed = replace(workload, attention=settings["attention"], tile=settings["tile"])
    asked = replace(
        Asked.of(config),
        remat=settings["remat"],
        weights=settings["weights"],
        layers_per_program=settings["layers_per_program"],
    )
    remat = choose_remat(asked, placed)
    return replace(workload, host_embeddings=remat.host_embeddings), remat


def choose_mesh(
    config: TrainConfig,
    model: DecoderConfig,
    document_lengths: tuple[int, ...],
    steps: int | None = None,
    rows: KnownRows = WITH_DATA,
) -> tuple[Workload, RematChoice]:
    """Return the workload on the run's mesh, or on the first of `auto`'s candidates that fits, with its remat policy.

    Args:
        config: of the run.
        model: its architecture.
        document_lengths: of `Workload`.
        steps: of the run, about; None for many.
        rows: of `make_workload`.

    Raises:
        ValueError: the mesh does not fit the devices, the batch or the model.
        DoesNotFit: nothing fits the GPUs' memory.
    """
    devices = training_devices(config)
    if devices > 1 and config.model.embeddings == "host":
        raise ValueError("--embeddings host is for one GPU: leave it out, or split the table with --mesh fsdp=…")
    full = config.model.method == "full"
    shapes = [MeshShape.parse(config.run.mesh)] if config.run.mesh != AUTO else _candidates(model, devices, full=full)
    tried = not config.objective.kind.forks  # no GPU has run pairs and rollouts in split rows
    if config.run.mesh == AUTO and tried and not why_rows_stay_whole(config, model):
        shapes = _with_split_rows(shapes, config, devices, full=full)
    for shape in shapes:
        check_mesh(config, model, shape, devices=devices)
    workload_of = partial(make_workload, config, model, document_lengths, rows=rows)
    explain, refused = config.run.explain, []
    for shape in shapes:
        workload = workload_of(shape)
        try:
            remat = choose_remat(Asked.of(config), workload, steps, explain=explain)
        except DoesNotFit as error:
            if shape is shapes[-1]:
                raise
            refused.append(str(error))
            continue
        if explain and config.run.mesh == AUTO:
            others = list(map(workload_of, shapes[shapes.index(shape) + 1 :]))
            reason = _mesh_reason(config, shape, refused, others)
            remat = replace(remat, reasons={"mesh": reason, **remat.reasons})
        return replace(workload, host_embeddings=remat.host_embeddings), remat
    raise AssertionError("no candidate")


def _mesh_reason(config: TrainConfig, chosen: MeshShape, refused: list[str], others: list[Workload]) -> Reason:
    """Explain a mesh by those before it, which do not fit, and by the next, as its plan predicts it."""
    if chosen.devices == 1:
        return Reason(choice="one GPU", limit="the machine: it has no other", change="more GPUs")
    order = "the order for full fine-tuning, parts alone" if config.model.method == "full" else "copies before parts"
    limit, runner_up = f"preference: {order}", None
    if refused:
        limit = f"the GPU's memory: {'; '.join(refused)}"
    elif chosen.context > 1:
        limit = f"the rows: --batch-size {config.run.batch_size} for {chosen.devices} GPUs"
    for workload in others[:1]:
        try:
            runner_up = f"{workload.mesh}: {choose_remat(Asked.of(config), workload)}"
        except DoesNotFit as error:
            runner_up = f"{workload.mesh}: {error}"
    return Reason(choice=str(chosen), limit=limit, runner_up=runner_up, change="--mesh, or the memory named")


def _with_split_rows(shapes: list[MeshShape], config: TrainConfig, devices: int, *, full: bool) -> list[MeshShape]:
    """Return the candidates among which the rows divide, and after them those with ever more GPUs to a row.

    Rows are split where there are fewer of them than GPUs, or where whole ones do not fit.
    """
    sizes = [size for size in range(2, devices + 1) if devices % size == config.data.row_tokens % size == 0]
    axes = ("fsdp",) if full else ("data", "fsdp")
    split = [MeshShape(**{axis: devices // size}, context=size) for size in sizes for axis in axes]
    dividing = [shape for shape in (*shapes, *split) if config.run.batch_size % shape.batch_shards == 0]
    return list(dict.fromkeys(dividing)) or shapes


def _candidates(model: DecoderConfig, devices: int, *, full: bool) -> list[MeshShape]:
    """Return candidates: for adapters, copies of the weights, then parts; for full fine-tuning, parts.

    Experts are spread over as few devices as they fit, since tokens then travel the least.
    """
    experts = math.gcd(devices, model.moe.num_experts if model.moe else 1)
    if full:
        return [MeshShape(expert=experts, fsdp=devices // experts)]
    sizes = [size for size in range(2, experts + 1) if experts % size == 0]
    spread = [MeshShape(expert=size, data=devices // size) for size in sizes]
    return [MeshShape(data=devices), *(spread or [MeshShape(fsdp=devices)])]
