"""Settings of the commands that no package holds; importing them loads no JAX."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxglue.data.config import DataConfig
from jaxglue.hf.files import MAX_SHARD_BYTES
from jaxglue.hf.hub import model_path
from jaxglue.ops.choices import QUANTIZE, GgufType
from jaxglue.parts import PartsConfig
from jaxglue.settings.config import Alias, Choices, Config, NonNegativeFloat, PositiveInt, Range
from jaxglue.training.config import ModelConfig, TrainConfig

if TYPE_CHECKING:
    import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class PlannedModel(ModelConfig):
    """The model to plan for, and how it would run."""

    @property
    def compute_dtype(self) -> "jnp.dtype":
        """Return the dtype that a GPU would compute in."""
        import jax.numpy as jnp

        return jnp.dtype("bfloat16" if self.dtype == "auto" else self.dtype)


@dataclass(frozen=True, kw_only=True)
class PlannedRows(DataConfig):
    """The rows to plan for; only `seq_len` matters, the rest is for training recipes."""

    data: tuple[str, ...] = ()
    # without max_seq_len, which is a flag of its own here
    seq_len: Annotated[int, Range(ge=2), Alias("max_seq_length", "max_length", "sequence_len", "cutoff_len")] | None = (
        None
    )

    def validate(self) -> None:
        """Accept missing data: none is read."""


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(TrainConfig):
    """Predict time and memory of a training run, described by the flags or the recipe of `jaxglue train`."""

    gpu: str
    """The GPU's name, such as 4090, "RTX PRO 6000" or A100-40."""
    max_seq_len: bool = False
    """Plan for the longest row that fits, instead of --seq-len."""
    all: bool = False
    """Print every plan worth comparing, also those that do not fit."""
    document_tokens: PositiveInt | None = None
    """Mean length of the documents in a row; by default one document fills it."""
    image_size: str | None = None
    """Pixels of the images, such as 1024x768, of a model that sees: their tokens, and the time of a frozen tower."""
    images: PositiveInt | None = None
    """Images of the data, of `image_size`: the time of a frozen tower and the host's memory for features of all."""
    host_memory_gib: NonNegativeFloat = 64.0
    """Host memory that may be pinned for each GPU, GiB."""
    model: PlannedModel
    data: PlannedRows = field(default_factory=PlannedRows)

    def validate(self) -> None:
        """Accept missing settings that only matter in a run."""
        self._validate_present()


K_QUANTS = "q4_k_m", "q5_k_m", "q6_k"
"""Types of GGUF files whose errors are weighed by importance."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(PartsConfig):
    """Merge an adapter into its base model, quantize a model, write it for llama.cpp, write a run's checkpoint, or
    upload the result."""

    base: Annotated[Path | None, Alias("model", "base_model", "model_name_or_path")] = None
    """Model folder, or owner/name on the hub; by default the adapter's base."""
    output: Annotated[Path | None, Alias("output_dir", "export_dir")] = None
    """New folder; absent or empty. Without it, --push uploads the adapter itself."""
    adapter: Annotated[Path | None, Alias("adapter_name_or_path", "lora_model_dir")] = None
    """PEFT adapter folder to merge, or to upload."""
    quantize: Annotated[str, Choices(QUANTIZE, "fp8", "nvfp4", "nvfp4_modelopt", "mxfp4"), Alias("quantise")] = "none"
    """Store the decoder layers' linear layers of --base, or of --adapter merged into its base, in bitsandbytes' NF4 or
    int8 format, compressed-tensors' FP8 or NVFP4, or ModelOpt's NVFP4, or GPT-OSS's experts in MXFP4. An adapter
    trained with --serve-as is written in its format without this."""
    gguf: Annotated[GgufType | None, Alias("quantization_method", "outtype")] = None
    """Write a GGUF file of this type, for llama.cpp and Ollama: of --adapter merged into its base, or of --base."""
    fold_temperatures: bool = False
    """Divide the logits of labels by the temperatures of decisions in the written folder, of --adapter merged or of
    --base, for servers that read labels alone, such as vLLM."""
    gguf_lora: bool = False
    """Write --adapter alone as a GGUF file, which llama.cpp applies to its base's."""
    imatrix: tuple[str, ...] = ()
    """Data, as of jaxglue train, on which the importance of each matrix's inputs is measured, for K-quants; by default
    rows of the training data that the adapter's run kept, none for no importance."""
    trained_on: Annotated[str, Choices(QUANTIZE, "auto")] = "auto"
    """Format in which the base's linear layers were held when --adapter was trained, and are merged with it; auto takes
    the base folder's, else the one that the adapter records."""
    checkpoint: str | None = None
    """Write the adapter, or after full fine-tuning the model, of this checkpoint of --run: a step, best for the lowest
    eval loss, or last."""
    run: Path = Path("runs/latest")
    """Output folder of the run that --checkpoint is of."""
    push: str | None = None
    """Repository owner/name on the hub to upload to, with a model card of the run."""
    private: bool = False
    """Create the repository as private."""
    max_shard_bytes: PositiveInt = MAX_SHARD_BYTES
    """Shard limit in bytes."""

    def validate(self) -> None:
        """Refuse several tasks at once, and none."""
        if self.gguf_lora and (self.adapter is None or self.gguf is not None or self.output is None):
            raise ValueError("--gguf-lora writes --adapter to --output, without --gguf")
        written = self.adapter is not None or self.gguf is not None or self.fold_temperatures
        if self.fold_temperatures and (self.gguf is not None or self.quantize != "none" or self.checkpoint is not None):
            raise ValueError(
                "--fold-temperatures writes a folder in the base's dtype: start --gguf or --quantize there"
            )
        quantizes = self.quantize != "none" and not (self.adapter and self.gguf is None)
        tasks = (written, quantizes, self.checkpoint is not None)
        if sum(tasks) != 1:
            raise ValueError(
                "give one of --adapter (or --gguf), --quantize, --fold-temperatures and --checkpoint: "
                "a further task starts from its output"
            )
        if self.imatrix not in ((), ("none",)) and self.gguf not in K_QUANTS:
            raise ValueError("--imatrix weighs the errors of K-quants: add --gguf q4_k_m, q5_k_m or q6_k")
        if self.checkpoint is not None and self.push is not None:
            raise ValueError("--checkpoint only writes --output: upload that with --adapter OUTPUT --push NAME")
        if self.output is None and (self.adapter is None or self.push is None):
            raise ValueError("no --output: name a new folder")
        if self.base is None and self.adapter is None and self.checkpoint is None:
            raise ValueError("no --base: name the model to write")

    @property
    def merges_into_experts(self) -> bool:
        """Return whether the experts of a merged model are quantized again."""
        return self.adapter is not None and self.gguf is None and self.quantize == "mxfp4"

    def base_folder(self, *, weights: bool = True) -> Path:
        """Return the base's folder, downloaded if it is on the hub."""
        if self.base is not None:
            return model_path(self.base, weights=weights)
        from jaxglue.hf.adapter import find_base

        assert self.adapter is not None
        return find_base(self.adapter, weights=weights)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """Check driver, CUDA, GPU, JAX, Triton and memory; or how a folder's files would be served."""

    model: Path | None = None
    """Model or adapter folder, or owner/name on the hub: check its tokenizer, chat template and stop tokens instead."""


@dataclass(frozen=True, kw_only=True)
class PreviewConfig(TrainConfig):
    """Show documents with their loss mask, and the data's lengths, packing, duplicates and longest rows."""

    rows: PositiveInt = 3
    """Documents to show, and longest rows to name."""
    max_tokens: PositiveInt = 400
    """Tokens to show of each document."""
    picture: Path | None = None
    """PNG or SVG file for the histogram of lengths."""

    def validate(self) -> None:
        """Accept missing settings that only matter in a run."""
        self._validate_present()


@dataclass(frozen=True, kw_only=True)
class UiConfig(Config):
    """Show runs on a page of this machine: plan, curves, rows, rollouts, samples, chat, exports."""

    runs: tuple[Path, ...] = (Path("runs/latest"),)
    """Output folders of runs, which may still train."""
    port: Annotated[int, Range(ge=0, le=65535)] = 0
    """Port to listen at, on this machine alone; 0 takes a free one."""
    open: bool = False
    """Open the page in a browser."""
    output: Path | None = None
    """Write the page to this file instead, which needs no server."""
