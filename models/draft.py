"""Draft heads: a layer beyond a model's that predicts the token after the next (multi-token prediction).

At token t of a document it reads the model's final normed state h of token t and the embedding e of token t + 1,
x = fc([norm(e); norm(h)]), applies one decoder layer of the model's kind over the tokens before, and its norm; the
model's output projection then gives the logits of token t + 2 (DeepSeek-V3, arXiv 2412.19437, 2.2; Qwen3-Next).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.context import PackedContext
from jaxglue.models.family import find_family
from jaxglue.models.layers import DecoderLayer
from jaxglue.models.linear import Linear
from jaxglue.models.parameters import hf_name
from jaxglue.models.residual import Norm

_LAYER = "layer."
"""Beginning of the names of the layer's parameters in a head."""


class DraftHead(nnx.Module):
    """Norms of embedding and state, their projection, a decoder layer, and its norm."""

    def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
        family, D = find_family(config.model_type), config.hidden_size
        norm: dict[str, Any] = {"style": family.parts.norm, "dtype": dtype}
        self.embedding_norm, self.hidden_norm = (Norm(D, config.rms_norm_eps, **norm) for _ in range(2))
        self.fc = Linear(2 * D, D, bias=False, std=config.initializer_range, dtype=dtype, rngs=rngs)
        make = family.layer or DecoderLayer
        self.layer = make(config, family.parts, draft_kind(config), dtype=dtype, rngs=rngs)
        self.norm = Norm(D, config.rms_norm_eps, **norm | {"style": family.parts.final_norm or family.parts.norm})

    def __call__(
        self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"], context: PackedContext
    ) -> Float[Array, "B T D"]:
        """Return the states of which the output projection gives the drafts' logits.

        Args:
            embedded: of the token after each.
            hidden: the model's states after its final norm, or this head's own where drafts follow drafts.
            context: of the rows.
        """
        joined = jnp.concatenate([self.embedding_norm.of(embedded), self.hidden_norm.of(hidden)], axis=-1)
        return self.norm.of(self.layer(self.fc(joined, context), context))

    def output(self, states: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return what the projection to tokens reads of states, which are normed already."""
        return states


def draft_kind(config: DecoderConfig) -> LayerKind:
    """Return the kind of the head's layer: that of the last layer of attention, sparse where the model has experts."""
    attending = [kind for kind in config.layer_kinds if not kind.mixer.recurrent]
    return attending[-1]._replace(sparse=config.moe is not None, unquantized=())


def with_head_layer(config: DecoderConfig) -> DecoderConfig:
    """Return the architecture with a further layer, of the head's kind, after the last."""
    layers = range(config.num_hidden_layers)
    return config.with_layers([*layers, max(i for i in layers if not config.layer_kinds[i].mixer.recurrent)])


def draft_config(config: DecoderConfig) -> DecoderConfig:
    """Return the architecture of a head's layer, whose weights are in the model's dtype."""
    moe = None if config.moe is None else replace(config.moe, quantize="none")
    return replace(config, quantize="none", layer_unquantized=(), moe=moe, fp8_head=False, fp8_experts=False)


def build_draft(config: DecoderConfig, *, dtype, rngs: nnx.Rngs) -> DraftHead:
    """Build a head with random weights for a model of this architecture."""
    return DraftHead(draft_config(config), dtype=dtype, rngs=rngs)


def parameter_name(path: Iterable[Any]) -> str:
    """Return the name of a head's parameter, in which experts' are Hugging Face's."""
    return hf_name(".".join(map(str, path))).removeprefix("model.")


@dataclass(frozen=True)
class DraftNames:
    """Names of a head's tensors in the files of a family's models."""

    start: str
    """Beginning of all names, with the number of the model's layers in place of braces."""
    layer: str
    """Beginning of the layer's, after that."""
    parts: tuple[tuple[str, str], ...]
    """Other names of a head, and the files', after that."""
    copies: tuple[tuple[str, str], ...] = ()
    """Tensors of the model of which the files hold copies, and the copies' names."""

    def of(self, layers: int) -> "DraftTensors":
        """Return the names in the files of a model with so many layers."""
        return DraftTensors(replace(self, start=self.start.format(layers)))


@dataclass(frozen=True)
class DraftTensors:
    """Names of a head's tensors in a folder, in the place of a `Spelling`."""

    known: DraftNames
    path: str = ""
    """What comes before all names."""

    def names(self, stored: Iterable[str]) -> "DraftTensors":
        """Return the names of files that have these tensors."""
        wrapped = f"model.{self.known.start}"
        return replace(self, path="model." if any(name.startswith(wrapped) for name in stored) else "")

    @property
    def _start(self) -> str:
        return self.path + self.known.start

    def owns(self, stored: str) -> bool:
        """Tell whether a tensor is the head's."""
        return stored.startswith(self._start)

    def ours(self, stored: str) -> str | None:
        """Return a tensor's name in a head; None for those of the model, and for copies of these."""
        if not self.owns(stored):
            return None
        name = stored.removeprefix(self._start)
        named = {theirs: ours for ours, theirs in self.known.parts}
        if name in named:
            return named[name]
        if name in (theirs for _, theirs in self.known.copies) or not name.startswith(self.known.layer):
            return None
        return _LAYER + name.removeprefix(self.known.layer)

    def stored(self, name: str) -> str:
        """Invert `ours`."""
        named = dict(self.known.parts)
        return self._start + (named[name] if name in named else self.known.layer + name.removeprefix(_LAYER))

    def copies(self) -> dict[str, str]:
        """Return the names of copies, and the model's tensors that they copy."""
        return {self._start + theirs: ours for ours, theirs in self.known.copies}


_NORMS = "embedding_norm.weight", "hidden_norm.weight", "norm.weight", "fc.weight"
MTP = DraftNames(
    start="mtp.",
    layer="layers.0.",
    parts=tuple(
        zip(
            _NORMS,
            ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "fc.weight"),
            strict=True,
        )
    ),
)
"""Qwen's."""
NEXT_LAYER = DraftNames(
    start="model.layers.{}.",
    layer="",
    parts=tuple(
        zip(_NORMS, ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight"), strict=True)
    ),
    copies=(("model.embed_tokens.weight", "embed_tokens.weight"), ("lm_head.weight", "shared_head.head.weight")),
)
"""DeepSeek's and GLM's: the layer after the last."""
DRAFTS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), MTP),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), NEXT_LAYER),
}
"""Names of heads by the model type of families that have them."""
