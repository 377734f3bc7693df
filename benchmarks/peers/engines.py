"""PyTorch engines of benchmarks/sft_step.py: Unsloth, and transformers with PEFT, with Liger's kernels or without.

They are set up as documented.

Imports neither jax nor jaxglue: peers run with their own packages.
"""

import contextlib
import ctypes
import glob
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

RANK = ALPHA = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_DELTA_TARGETS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
_LFM_TARGETS = r".*\.layers\.\d+\..*\.(q_proj|k_proj|v_proj|in_proj|out_proj|w1|w2|w3)"
"""A pattern: of names in a list, Unsloth takes those in attention and feed-forwards alone."""
_GRANITE_TARGETS = r".*\.layers\.\d+\..*\.(q_proj|k_proj|v_proj|o_proj|in_proj|input_linear|output_linear)"
_PATTERNS = {"lfm2": _LFM_TARGETS, "granitemoehybrid": _GRANITE_TARGETS}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "UNSLOTH_SKIP_TORCHVISION_CHECK": "1",
    "UNSLOTH_EXPERIMENTAL_HYBRID_PACKING": "1",  # else it packs no Mamba-2
    "UNSLOTH_FORCE_SINGLE_COMPILE_WORKER": "0",  # else one thread compiles where a container names its GPUs
    "UNSLOTH_COMPILE_LOCATION": os.path.join(
        tempfile.gettempdir(), f"unsloth_compiled_{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    ),  # else in the working folder, where processes beside each other write the same files
}
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # of top-k and top-p, which the benchmarks leave off
    "VLLM_USE_DEEP_GEMM": "0",  # of FP8
}
"""Of vLLM without network, flashinfer and DeepGEMM."""
_PACKAGES = (
    *("torch", "transformers", "peft", "trl", "liger-kernel", "triton"),
    *("unsloth", "xformers", "bitsandbytes", "vllm"),
)
CHECKPOINTING = {"none": False, "device": True, "offload": "unsloth"}
"""Unsloth's names of what waits for the backward pass: all; checkpoints of layers, on the GPU or in host memory."""


def stay_offline() -> None:
    """Let packages ask no network for files or updates; before they are imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compile_kernels_together() -> None:
    """Let Triton compile what it tunes side by side: one after the other, Mamba-2's kernels take minutes on a GPU."""
    import torch

    if torch.cuda.is_available():
        from timing import compile_together

        compile_together()


def versions() -> dict[str, str]:
    """Return the versions of the peers' packages that are installed."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def write_results(path: Path, results: dict) -> None:
    """Write a peer's results with their provenance, as `measure.write_results` does ours."""
    import record
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    record.write_json(path, record.provenance(gpu, versions()) | {"results": results})


def targets(folder: str) -> list[str] | str:
    """Return the linear layers of a folder's model that get adapters, all of them; names or a pattern of paths."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        model_type = json.load(file)["model_type"]
    return _PATTERNS.get(model_type) or TARGETS + _DELTA_TARGETS * model_type.startswith("qwen3_5")


def import_unsloth():
    """Import Unsloth, offline; before transformers and TRL, which it patches."""
    stay_offline()
    _preload_cuda12()
    import unsloth

    return unsloth


def import_packages(engine: str) -> None:
    """Import what an engine's model is loaded with, which takes a while; nothing of it uses the GPU's time."""
    stay_offline()
    if engine == "unsloth":
        import_unsloth()
    else:
        import peft  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401
    if engine == "liger":
        import liger_kernel.transformers  # noqa: F401


def load_unsloth(folder: str, *, adapter: str, quantize: str, checkpointing: str, seq_len: int):
    """Load Unsloth's model for packed rows; its targets are all linear layers, whatever the adapter's."""
    del adapter
    import_unsloth()
    _leave_masks_uncompiled()
    model = unsloth_model(folder, quantize=quantize, checkpointing=checkpointing, seq_len=seq_len)
    from unsloth.utils import packing

    packing.mark_allow_overlength(model)  # what SFTTrainer(packing=True) switches on
    packing._enable_hf_packed_attention()
    if any(name.endswith((".linear_attn", ".mamba")) for name, _ in model.named_modules()):
        assert packing.patch_hybrid_linear_attention_varlen(model), "Unsloth does not pack linear attention here"
    return model


def unsloth_model(folder: str, *, quantize: str, checkpointing: str, seq_len: int):
    """Load FastLanguageModel with adapters; `checkpointing` is none, device or offload (Unsloth's, to the host)."""
    unsloth = import_unsloth()
    import torch

    shared = {"max_seq_length": seq_len, "use_gradient_checkpointing": CHECKPOINTING[checkpointing]}
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        model_name=folder,
        dtype=torch.bfloat16,
        load_in_4bit=quantize == "nf4",
        load_in_16bit=quantize == "none",
        local_files_only=True,
        use_exact_model_name=True,
        **shared,
    )
    return unsloth.FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=ALPHA, lora_dropout=0, bias="none", target_modules=targets(folder), **shared
    )


def load_peft(folder: str, *, adapter: str, quantize: str, checkpointing: str, seq_len: int, loader=None):
    """Load a model with the targets of a PEFT folder, experts among them; `checkpointing` none or device.

    `loader` is AutoModelForCausalLM or a class like it; `seq_len` is unused.
    """
    del seq_len
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    cuda = torch.cuda.is_available()
    options: dict = {"dtype": torch.bfloat16 if cuda else torch.float32}
    if quantize == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    attention = _varlen_attention() if cuda else "sdpa"
    model = (loader or AutoModelForCausalLM).from_pretrained(
        folder, attn_implementation=attention, device_map={"": 0 if cuda else "cpu"}, **options
    )
    lora = LoraConfig.from_pretrained(adapter)
    lora.inference_mode = False
    model = get_peft_model(model, lora)
    model.enable_input_require_grads()
    set_peft_checkpointing(model, checkpointing)
    return model


def load_liger(folder: str, **options):
    """Load PEFT's model with Liger's kernels: norms, rotation, SwiGLU, and the output projection with the loss."""
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    return load_peft(folder, **options, loader=AutoLigerKernelForCausalLM)


def set_checkpointing(engine: str, model, checkpointing: str, seq_len: int) -> None:
    """Change where a loaded model's activations wait for the backward pass."""
    (set_unsloth_checkpointing if engine == "unsloth" else set_peft_checkpointing)(model, checkpointing, seq_len)


def set_unsloth_checkpointing(model, checkpointing: str, seq_len: int) -> None:
    """Do what Unsloth does as it loads a model, and check that its layers do as told."""
    unsloth = import_unsloth()
    import torch
    from unsloth.models import llama

    wanted = CHECKPOINTING[checkpointing]
    used = llama.apply_unsloth_gradient_checkpointing(wanted, seq_len, torch.bfloat16)
    llama.prepare_model_for_kbit_training(model, use_gradient_checkpointing=used, use_reentrant=True)
    unsloth.FastLanguageModel.for_training(model, use_gradient_checkpointing=used)
    offloads = torch.utils.checkpoint.CheckpointFunction.__name__ == "UnslothCheckpointFunction"
    layers = {bool(layer.gradient_checkpointing) for layer in model.get_base_model().model.layers}
    found, expected = (used, offloads, layers), (wanted, wanted == "unsloth", {bool(wanted)})
    assert found == expected, f"Unsloth's checkpointing: {found} in place of {expected}"


def set_peft_checkpointing(model, checkpointing: str, seq_len: int | None = None) -> None:
    """Switch transformers' checkpointing on or off."""
    del seq_len
    if checkpointing == "none":
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


ENGINES: dict[str, Callable] = {"unsloth": load_unsloth, "peft": load_peft, "liger": load_liger}


def known_checkpointing(engine: str, tried: list[str]) -> list[str]:
    """Return the kinds of checkpointing that an engine has; transformers' stays on the GPU."""
    return tried if engine == "unsloth" else list(dict.fromkeys(kind if kind == "none" else "device" for kind in tried))


def load(engine: str, folder: str, adapter: str, **options):
    """Load an engine's model for training, with the adapter of a PEFT folder."""
    stay_offline()
    model = ENGINES[engine](folder, adapter=adapter, **options)
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    found = set_peft_model_state_dict(model, load_file(f"{adapter}/adapter_model.safetensors"))
    assert not found.unexpected_keys, found.unexpected_keys[:3]
    model.config.use_cache = False
    return model.train()


def attention(engine: str, model) -> str:
    """Name the attention of an engine's packed rows; what Unsloth took is known after its first step."""
    if engine != "unsloth":
        return "PyTorch's varlen"
    from unsloth.utils import hf_packed_attention

    calls = hf_packed_attention.HF_PACKED_ATTENTION_STATS
    if calls["fast"] or calls["fallback"]:  # models that Unsloth leaves to transformers
        return f"PyTorch's varlen: {calls['fast']} calls, {calls['compiled']} compiled, {calls['fallback']} dense"
    if model.config._attn_implementation == "flex_attention":  # Gemma 3, whose masks are compiled
        return "PyTorch's flex_attention"
    return "Unsloth's: xformers, or what it has instead"


def convolution(model) -> str | None:
    """Name what computes a model's short convolutions; None for a model without."""
    if not any(name.endswith("conv.in_proj") for name, _ in model.named_modules()):
        return None
    found = find_spec("causal_conv1d")
    return "causal_conv1d" if found else "PyTorch's, over documents' ends: causal_conv1d is not installed, has no wheel"


def _varlen_attention() -> str:
    """Register PyTorch's FlashAttention with separate documents in transformers."""
    import torch
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    def attend(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **_):
        group = module.num_key_value_groups
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        width = value.shape[-1]  # padded where it is less than that of keys, as transformers does for FlashAttention
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        return varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0))[None, ..., :width], None

    AttentionInterface.register("varlen", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("varlen", flash_attention_mask)
    return "varlen"


def _leave_masks_uncompiled() -> None:
    """Let transformers build flex_attention's masks by plain operations; attention itself stays compiled.

    Triton's kernel of a mask of packed documents keeps ptxas busy for more than 150 s (torch 2.11, Triton 3.6).
    """
    from transformers import masking_utils

    build = masking_utils.create_block_mask

    def create_block_mask(*args, **options):
        return build(*args, **options | {"_compile": False})

    masking_utils.create_block_mask = create_block_mask


def _preload_cuda12() -> None:
    """Load the CUDA 12 runtime that xformers' wheel needs beside a CUDA 13 PyTorch."""
    for folder in sys.path:
        for pattern in ("peer_cudart12/libcudart.so.12", "nvidia/cuda_runtime/lib/libcudart.so.12"):
            for library in glob.glob(os.path.join(folder, pattern)):
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
                return
