"""Predict time and memory of a training step on a GPU under remat policies, without GPU or weights.

jaxglue estimate --model models/Qwen3-8B --seq-len 16384 --gpu "RTX 4090"
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxglue.cli import parse_config
from jaxglue.config import Alias, Config, NonNegativeFloat, PositiveFloat, PositiveInt
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.checkpoint import read_config
from jaxglue.models import config_from_hf
from jaxglue.models.lora import LoraConfig
from jaxglue.ops.adam import MOMENT_BYTES, MomentFormat
from jaxglue.ops.fp8 import check_fp8
from jaxglue.ops.quant.formats import Matmul, Quantize
from jaxglue.planner.flops import mean_visible_keys
from jaxglue.planner.gpus import GIB, find_gpu
from jaxglue.planner.planner import MARGIN, Plan, Planner
from jaxglue.planner.workload import Workload
from jaxglue.sharding.mesh import MeshShape


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(Config):
    """Predict time and memory of a training step."""

    model: str
    """A Hugging Face model folder; its config.json is enough."""
    gpu: str
    """The GPU's name, such as "RTX 4090" or H200."""
    seq_len: PositiveInt = 8192
    """T: tokens in a packed row."""
    batch_size: PositiveInt = 1
    """B: rows in a micro-batch, over all GPUs."""
    mesh: str = "data=1"
    """Mesh over GPUs of this name, such as data=2,fsdp=4."""
    gradient_accumulation_steps: Annotated[PositiveInt, Alias("accumulation")] = 1
    """Micro-batches in an optimizer step."""
    method: Literal["lora", "full"] = "lora"
    """Train adapters on frozen weights, or all weights."""
    quantize: Annotated[Quantize, Alias("quantise")] = "none"
    """Quantize the frozen linear layers of the decoder layers to NF4 or int8."""
    matmul: Matmul = "bf16"
    """Products of the decoder layers' frozen linear layers: bf16 or fp8."""
    moments: MomentFormat = "float32"
    """Format of AdamW's moments: float32, bfloat16 or 8bit."""
    embeddings: Literal["device", "host"] = "device"
    """Memory that holds the frozen embedding table."""
    document_tokens: PositiveInt | None = None
    """Mean length of the documents in a row; by default one document fills it."""
    memory_limit: PositiveFloat | None = None
    """GPU memory that may be used, GiB; by default nine tenths of the GPU's."""
    host_memory_gib: NonNegativeFloat = 64.0
    """Host memory that may be pinned, GiB."""
    lora: LoraConfig = field(default_factory=LoraConfig)


def make_planner(config: EstimateConfig) -> Planner:
    """Return the planner of the configured workload; raise ValueError for an unknown model or GPU."""
    stored = "fp8" if config.matmul == "fp8" else config.quantize
    model, mesh = config_from_hf(read_config(config.model)).quantized(stored), MeshShape.parse(config.mesh)
    gpu = find_gpu(config.gpu)
    if stored == "fp8":
        check_fp8(gpu.capability)
    mesh.check(model, batch_size=config.batch_size, devices=mesh.devices)
    workload = Workload(
        config=model,
        batch_size=config.batch_size // mesh.batch_shards,
        mesh=mesh,
        seq_len=config.seq_len,
        lora=config.lora if config.method == "lora" else None,
        visible_keys=mean_visible_keys(np.array([config.document_tokens or config.seq_len])),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        moment_bytes=MOMENT_BYTES[config.moments],
        host_embeddings=config.embeddings == "host",
    )
    return Planner(workload, gpu.limited(config.memory_limit))


def print_plans(planner: Planner, host_memory: float) -> None:
    """Print presets and settings unbeaten in time and memory, the fastest first, and the choice of `auto`."""
    gpu, work = planner.gpu, planner.workload
    tokens = work.tokens * work.gradient_accumulation_steps * work.mesh.batch_shards
    table = Table(title=f"{gpu.name}: {gpu.memory / GIB:.1f} GiB, {gpu.matmul / 1e12:.0f} TFLOP/s", box=SIMPLE_HEAD)
    for name in ("ms/step", "tokens/s", "GPU GiB", "host GiB", "fits", "weights", "remat"):
        table.add_column(name, justify="left" if name in ("remat", "weights", "fits") else "right", overflow="fold")
    for plan in _worth_showing(planner.plans()):
        table.add_row(*_cells(plan, tokens, "yes" if planner.fits(plan, host_memory) else "no"))
    console = Console()
    console.print(table)
    console.print(f"auto: {planner.choose(host_memory=host_memory, stream_weights=None)}", highlight=False)


def _worth_showing(plans: list[Plan]) -> Iterator[Plan]:
    """Yield, of plans sorted by time, presets and those that need clearly less GPU memory than all faster ones."""
    least = math.inf
    for plan in plans:
        if plan.device_bytes < (1 - MARGIN) * least or plan.remat in PRESETS:
            yield plan
            least = min(least, plan.device_bytes)


def _cells(plan: Plan, tokens: int, fits: str) -> tuple[str, ...]:
    return (
        f"{plan.seconds * 1e3:,.0f}",
        f"{tokens / plan.seconds:,.0f}",
        f"{plan.device_bytes / GIB:.1f}",
        f"{plan.host_bytes / GIB:.1f}",
        fits,
        "host" if plan.stream_weights else "GPU",
        plan.remat.replace(",", ", "),  # spaces let lines break; the flag accepts them
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plans of the configured workload."""
    jax.config.update("jax_platforms", "cpu")
    config = parse_config(EstimateConfig, argv, command="estimate")
    print_plans(make_planner(config), config.host_memory_gib * GIB)
