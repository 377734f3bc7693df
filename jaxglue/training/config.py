"""What a training run is told: every field is a flag and a key of a recipe."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxglue.data import DataConfig
from jaxglue.distributed import DistributedConfig
from jaxglue.engine.policy import check_remat
from jaxglue.models.context import RouterLosses
from jaxglue.models.lora import LoraConfig
from jaxglue.ops.attention import BACKENDS
from jaxglue.ops.quant.formats import Quantize
from jaxglue.sharding.mesh import AUTO, MeshShape
from jaxglue.training.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to start from, and how it is run."""

    model: str
    """A Hugging Face model folder: config.json, tokenizer and safetensors."""
    random_weights: bool = False
    """Start from random weights, so that the folder needs no safetensors."""
    method: Literal["lora", "full"] = "lora"
    """Train adapters on frozen weights, or all weights."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of activations, matmuls and frozen weights; auto is bfloat16 on GPUs, float32 on CPUs. What trains is float32."""
    attention: Literal[BACKENDS] = "auto"  # type: ignore[valid-type]
    """Attention backend; auto picks by GPU and shape, and says what it picked."""
    remat: str = "auto"
    """What each layer keeps for its backward pass: none (is recomputed), dots, full (recomputation), offload, a mix
    such as "dots; offload:gate,up", or auto, which takes the fastest that fits the GPU (see docs/memory.md)."""
    memory_limit: float | None = None
    """GPU memory that the run may take, GiB: what auto plans for; by default all that JAX was given."""
    weights: Literal["device", "host", "auto"] = "device"
    """Where the layers' frozen weights are: on the GPU, or in host memory, streamed to it layer by layer; auto takes
    what is faster within the memory limit."""
    embeddings: Literal["device", "host"] = "device"
    """Where the frozen embedding table is: on the GPU, or in host memory, where a step reads the rows of its tokens."""
    expand_experts: bool = False
    """Expand experts that the model holds in MXFP4 when they are loaded: four times their memory, faster steps."""
    quantize: Quantize = "none"
    """Hold the frozen linear layers of the decoder layers in NF4 (QLoRA, 0.52 bytes a weight) or int8 (1 byte), with
    bitsandbytes' values. A model folder that is quantized already needs no word."""
    router_balance_loss: float = 0.0
    """Weight of routers' load-balancing loss; 0 leaves it out, as is usual in fine-tuning. Not in the loss shown."""
    router_z_loss: float = 0.0
    """Weight of the z-loss of routers, which keeps their logits small; likewise."""

    def __post_init__(self):
        check_remat(self.remat)
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise ValueError(f"memory_limit={self.memory_limit} must be positive: it is in GiB")
        for name in ("router_balance_loss", "router_z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.weights == "host" and self.method == "full":
            raise ValueError("--weights host streams frozen weights, and with --method full none are: leave one out")
        if self.embeddings == "host" and self.method == "full":
            raise ValueError("--embeddings host is for a frozen table, and with --method full it trains: leave one out")
        if self.quantize != "none" and self.method == "full":
            raise ValueError(
                f"--quantize {self.quantize} holds frozen weights, and with --method full none are: "
                "use --method lora, or leave --quantize out"
            )

    @property
    def router_losses(self) -> RouterLosses | None:
        """Coefficients of the auxiliary losses of routers; None when all are 0."""
        losses = RouterLosses(balance=self.router_balance_loss, z=self.router_z_loss)
        return losses if any(losses) else None

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype that `dtype` stands for on this machine."""
        if self.dtype == "auto":
            return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.dtype)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long to train, what to watch, and where the results go."""

    output: Path = Path("runs/latest")
    """Folder for the adapter, checkpoints, metrics and curve."""
    batch_size: int = 1
    """B: packed rows in a micro-batch, over all GPUs."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in an optimizer step."""
    mesh: str = AUTO
    """How GPUs share the work: sizes of the axes data, fsdp, tensor and expert, such as data=2,fsdp=4; auto takes data
    for adapters on weights that fit each GPU, else fsdp, or expert where there are experts (see docs/sharding.md)."""
    epochs: int = 1
    """Passes over the data, unless steps says otherwise."""
    steps: int | None = None
    """Optimizer steps; by default those of all epochs."""
    log_every: int = 10
    """Optimizer steps between lines of metrics."""
    eval_every: int | None = None
    """Optimizer steps between evaluations, and looks at the use of experts; by default once an epoch."""
    save_every: int | None = None
    """Optimizer steps between checkpoints; by default as often as evaluations."""
    keep_checkpoints: int = 2
    """Checkpoints kept beside the best one."""
    resume: bool = False
    """Continue the run in the output folder."""
    overwrite: bool = False
    """Delete the run that the output folder holds."""
    dry_run: bool = False
    """Check everything, print the plan and train nothing."""
    profile: int = 0
    """Steps to trace with the JAX profiler, after the first three."""
    sample_prompt: tuple[str, ...] = ()
    """Prompts to answer before and after training."""
    sample_tokens: int = 48
    """Tokens in such an answer at most."""
    compilation_cache: Path | None = Path("~/.cache/jaxglue/xla")
    """Where compiled programs are kept for the next run (a local disk); none keeps none."""

    def __post_init__(self):
        at_least_one = (
            "batch_size",
            "gradient_accumulation_steps",
            "epochs",
            "steps",
            "log_every",
            "eval_every",
            "save_every",
        )
        for name in (*at_least_one, "keep_checkpoints", "sample_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.mesh != AUTO:
            MeshShape.parse(self.mesh)
        if self.profile < 0:
            raise ValueError(f"profile={self.profile} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Fine-tunes a Llama, Qwen3 or GPT-OSS on packed rows."""

    model: ModelConfig
    data: DataConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self):
        for name in ("weights", "embeddings"):
            if self.run.sample_prompt and getattr(self.model, name) != "device":
                raise ValueError(f"--sample-prompt needs --{name} device: answering reads them for every token")

    @property
    def shared(self) -> "TrainConfig":
        """What is the same for every process of the run, and for those of one that resumes it."""
        return replace(self, distributed=DistributedConfig())
