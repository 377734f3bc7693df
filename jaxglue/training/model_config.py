"""Configuration of the model that a run starts from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from jaxglue.config import Alias, Config, Instead, NonNegativeFloat, PositiveFloat, PositiveInt
from jaxglue.hf.hub import base_reference, is_hub_id, model_path
from jaxglue.ops.choices import QUANTIZE, Attention, Matmul, Quantize, Storage, choose_storage

if TYPE_CHECKING:
    import jax.numpy as jnp

    from jaxglue.models.context import RouterLosses


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The model to start from, and how it runs."""

    model: Annotated[str, Alias("base_model", "model_name_or_path", "model_name")]
    """A Hugging Face model folder with config.json, tokenizer and safetensors, or owner/name on the hub."""
    revision: Annotated[str | None, Alias("model_revision", "revision_of_model")] = None
    """Branch, tag or commit of a model on the hub; a run records the commit."""
    random_weights: bool = False
    """Start from random weights, so that the folder needs no safetensors; up to 1 GiB of them go to base/ beside the
    adapter."""
    method: Annotated[
        Literal["lora", "full"],
        Alias("finetuning_type"),
        Alias("use_peft", values={True: "lora"}),
        Alias("full_finetuning", values={True: "full"}),
        Instead(qlora="give --method lora --quantize nf4"),
    ] = "lora"
    """Train adapters on frozen weights, or all weights."""
    adapter: Annotated[Path | None, Alias("lora_model_dir", "adapter_name_or_path")] = None
    """Train on from this PEFT adapter, with its rank, alpha and targets."""
    new_tokens: Path | None = None
    """Text file with a token a line to add to the vocabulary, each with the mean of the others' rows; with --method
    lora only the new rows train, unless --modules-to-save names embed_tokens and lm_head."""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Alias("torch_dtype"),
        Alias("bf16", values={True: "bfloat16", "full": "bfloat16", "auto": "auto"}),
        Instead(float16="its range is too small for training; use bfloat16"),
    ] = "auto"
    """Of activations, matmuls and frozen weights; auto is bfloat16 on GPUs, float32 on CPUs. Trainable weights are
    always float32."""
    attention: Attention = "auto"
    """Attention backend; auto picks by GPU and shape, and reports its choice."""
    remat: str = "auto"
    """Remat policy of the layers: none (recompute nothing), dots, full (recompute everything), offload, a mix such as
    "dots; offload:gate,up", or auto, the fastest that fits the GPU (see docs/memory.md)."""
    tile: PositiveInt | None = None
    """Tokens that pass through a layer at a time, apart from attention; by default all, or as many as fit where whole
    rows do not."""
    layers_per_program: PositiveInt | None = None
    """Consecutive layers dispatched as one program, which with all of them has embedding and head too; by default one,
    or all where dispatch takes longer than a small model's layers and everything stays on one GPU."""
    memory_limit: PositiveFloat | None = None
    """GPU memory for auto to plan with, GiB; by default all of JAX's share."""
    weights: str = "device"
    """Place of the layers' frozen weights: device; host, streamed layer by layer from its memory; mapped, read from
    their files; or several, such as "20 x device & 12 x host". auto streams as few layers as memory allows."""
    embeddings: Literal["device", "host", "auto"] = "device"
    """Place of frozen embedding table and output projection: on the GPU, or in host memory, from which each step reads
    its tokens' rows and copies the projection. auto moves them there where layers' weights would be streamed, if this
    is predicted to be faster."""
    expand_experts: bool = False
    """Expand MXFP4 experts on loading: four times their memory, faster steps."""
    quantize: Annotated[
        Quantize,
        Alias("quantise"),
        Alias("load_in_4bit", values={True: "nf4"}),
        Alias("load_in_8bit", values={True: "int8"}),
        Alias("load_in_16bit", values={True: "none"}),
        Alias("quantization_bit", values={"4": "nf4", "8": "int8"}),
    ] = "none"
    """Quantize the frozen linear layers of the decoder layers to NF4 (QLoRA, 0.52 bytes a weight) or int8 (1 byte),
    with bitsandbytes' values. Already-quantized folders are detected."""
    matmul: Matmul = "bf16"
    """Products of the decoder layers' linear layers: in the activations' dtype, or in FP8 (about twice the rate, and 1
    byte a frozen weight; Ada, Hopper and newer GPUs). With --method full, weights and their gradients stay wider."""
    fp8_max_error: PositiveFloat = 0.2
    """Relative error of a layer's output or of the head's gradient, measured on the first batch, above which
    --matmul fp8 multiplies there in the activations' dtype; says so."""
    fp8_head: bool = False
    """With --matmul fp8, multiply the frozen output projection in FP8 too."""
    fp8_experts: bool = False
    """With --matmul fp8, multiply experts in MXFP4 in FP8 too, which holds their values."""
    neftune_alpha: Annotated[NonNegativeFloat, Alias("neftune_noise_alpha", "noisy_embedding_alpha")] = 0.0
    """Train with uniform noise within ± alpha / √(length · hidden size) on each document's embeddings (NEFTune, arXiv
    2310.05914); 5 is usual, 0 adds none."""
    router_balance_loss: NonNegativeFloat = 0.0
    """Weight of the routers' load-balancing loss; 0, usual in fine-tuning, omits it. The loss shown excludes it."""
    router_z_loss: NonNegativeFloat = 0.0
    """Weight of the routers' z-loss, which keeps their logits small; the loss shown excludes it too."""

    def validate(self) -> None:
        """Refuse an unknown remat policy, and options for frozen weights where all weights train."""
        from jaxglue.engine.policy import check_remat
        from jaxglue.engine.residency import DEVICE, check_weights

        check_remat(self.remat)
        check_weights(self.weights)
        for name, values in (
            ("weights", {self.weights} - {DEVICE, "auto"}),
            ("embeddings", ("host",)),
            ("quantize", {*QUANTIZE} - {"none"}),
        ):
            if self.method == "full" and getattr(self, name) in values:
                raise ValueError(
                    f"--{name} {getattr(self, name)} needs frozen weights, and --method full trains all: "
                    f"use --method lora, or leave out --{name}"
                )
        if self.adapter and self.new_tokens:
            raise ValueError("--adapter and --new-tokens are both given: merge the adapter first (jaxglue export)")
        choose_storage(self.quantize, self.matmul)
        if self.fp8_head and self.method == "full":
            raise ValueError("--fp8-head needs a frozen output projection, and --method full trains it: leave it out")
        for name, given in self.fp8_products.items():
            if given and self.matmul != "fp8":
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is a part of --matmul fp8, got --matmul {self.matmul}: give both, or neither")

    @property
    def folder(self) -> Path:
        """Return the model's folder, downloaded if it is on the hub."""
        return model_path(self.model, self.revision, weights=not self.random_weights)

    @property
    def pinned(self) -> "ModelConfig":
        """Return the configuration with the commit of a model on the hub."""
        return replace(self, revision=base_reference(self.folder).revision) if is_hub_id(self.model) else self

    @property
    def storage(self) -> Storage:
        """Return the storage of the decoder layers' linear layers."""
        return choose_storage(self.quantize, self.matmul, trains=self.method == "full")

    @property
    def fp8_products(self) -> dict[str, bool]:
        """Return whether output projection and experts are multiplied in FP8, as `DecoderConfig.quantized` takes it."""
        return {"fp8_head": self.fp8_head, "fp8_experts": self.fp8_experts}

    @property
    def router_losses(self) -> "RouterLosses | None":
        """Weights of the routers' auxiliary losses; None when all are 0."""
        from jaxglue.models.context import RouterLosses

        losses = RouterLosses(balance=self.router_balance_loss, z=self.router_z_loss)
        return losses if any(losses) else None

    @property
    def compute_dtype(self) -> "jnp.dtype":
        """Return the dtype chosen by `dtype` on this machine."""
        import jax
        import jax.numpy as jnp

        if self.dtype == "auto":
            return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.dtype)
