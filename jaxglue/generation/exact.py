"""Exact sampling: tokens have the bits of training's forward pass, whatever is decoded with them.

Every sum has one order. Products take 16 columns after another (`ops/projection/ordered.py`), those of experts by
training's grouped matmuls, whose rows know nothing of each other (`ops/moe`). Attention takes tiles of keys from the
text's beginning on, and anew behind its prompt (`ops/paged_attention`), and log-probabilities are formed by the loss's
own kernels. All else treats a row by itself, by training's kernels.
"""

import jax.numpy as jnp

from jaxglue.models.config import ATTENTION, DecoderConfig
from jaxglue.models.family import find_family
from jaxglue.ops.attention import ATTENTION as PACKED_ATTENTION
from jaxglue.ops.attention import AttentionCall
from jaxglue.ops.backend import Capability, compute_capability
from jaxglue.ops.moe import GROUPED_MATMUL, GroupedCall
from jaxglue.ops.norm_rope import NORM_ROPE, NormCall
from jaxglue.ops.projection.lora import LORA, LoraCall
from jaxglue.ops.projection.ordered import ORDERED, OrderedCall


def obstacle(model: DecoderConfig, dtype, *, tokens: int = 1, rank: int = 0) -> str | None:
    """Return why a model's tokens cannot have training's bits, in words; None if they can.

    Args:
        model: its architecture.
        dtype: of activations.
        tokens: of a packed row in training.
        rank: the largest of adapters that share a layer, together.
    """
    if jnp.dtype(dtype).itemsize > 2:
        return f"activations are in {jnp.dtype(dtype)}, and it is for 16 bits (--dtype bfloat16)"
    if model.moe is not None and (reason := _obstacle_of_experts(model, jnp.dtype(dtype))) is not None:
        return reason
    if model.mixer_kinds != (ATTENTION,) or model.recurrent is not None:
        return f"its layers of {', '.join(mixer.title for mixer in model.mixer_kinds if mixer != ATTENTION)} do"
    if len({kind.head_dim for kind in model.layer_kinds}) > 1 or model.per_layer is not None:
        return "its layers have heads of several sizes, or embeddings of their own"
    if model.vision is not None:
        return "images stand between its prompts' tokens"
    if model.quantize != "none":
        return f"its weights are in {model.quantize}, and products in one order are of 16 bits"
    return _obstacle_of_kernels(compute_capability(), model, jnp.dtype(dtype), tokens, rank)


def _obstacle_of_experts(model: DecoderConfig, dtype: jnp.dtype) -> str | None:
    assert model.moe is not None
    if dtype != jnp.bfloat16:
        return f"activations are in {dtype}, and experts are for bfloat16 (--dtype bfloat16)"
    if model.fp8_experts or model.moe.quantize not in ("none", "mxfp4"):
        how = "multiplied in FP8" if model.fp8_experts else f"in {model.moe.quantize}"
        return f"its experts are {how}, and products in one order are of 16 bits"
    return None


def _obstacle_of_kernels(
    capability: Capability | None, model: DecoderConfig, dtype: jnp.dtype, tokens: int, rank: int
) -> str | None:
    """Return why a GPU's kernels cannot serve; a CPU's products have one order by themselves."""
    if capability is None:
        return None
    choices = [ORDERED.choose(capability, OrderedCall(dtype=dtype))]
    for kind in dict.fromkeys(model.layer_kinds):
        attention = AttentionCall(
            dtype=dtype,
            head_dim=kind.head_dim,
            query_heads=model.num_attention_heads,
            kv_heads=kind.shape.kv_heads,
            seq_len=tokens,
            segment_slots=1,
            window=kind.window,
            forked=True,
            softcap=model.attention.softcap,
            exact=True,
        )
        choices.append(PACKED_ATTENTION.choose(capability, attention))
    parts = find_family(model.model_type).parts
    norms = {parts.norm, parts.final_norm or parts.norm}
    choices += [NORM_ROPE.choose(capability, NormCall(dtype=dtype, style=style)) for style in norms]
    if model.moe is not None:
        choices.append(GROUPED_MATMUL.choose(capability, GroupedCall(dtype=dtype)))
    if rank:
        choices.append(LORA.choose(capability, LoraCall(dtype=dtype, rank=rank)))
    return next((choice.reason for choice in choices if choice.name == "reference"), None)
