"""Layer contexts: rotation, attention and dropout, supplied to decoder layers by training or generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxglue.ops.attention import packed_attention, rotated_attention
from jaxglue.ops.delta_rule import DeltaHeads, causal_convolution, gated_delta_rule
from jaxglue.ops.moe import Routing
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.norm_rope import HeadNorms, norm_and_rotate
from jaxglue.ops.recurrence import Recurrence, recur
from jaxglue.ops.rope import RopeTables, Rotary
from jaxglue.ops.segments import PackedSegments

LatentCache = Literal["none", "written", "read"]
"""Whether latent attention keeps its latent vectors for later tokens, or attends over those that were kept."""


class RouterLosses(NamedTuple):
    """Weights of the auxiliary router losses, load balancing and z-loss (see `jaxglue.ops.moe`)."""

    balance: Float[Array, ""] | float = 0.0
    z: Float[Array, ""] | float = 0.0


class LayerContext(Protocol):
    """Interface between layers and their caller: packed segments in training, a key/value cache in generation."""

    @property
    def dropout_key(self) -> PRNGKeyArray | None:
        """Return the layer's dropout key; None without dropout."""

    @property
    def router_losses(self) -> RouterLosses | None:
        """Return the router loss weights; None without auxiliary losses."""

    @property
    def fp8(self) -> bool:
        """Return whether matrices for FP8 products are multiplied so; otherwise in the activations' dtype."""

    @property
    def layer_input(self) -> Float[Array, "B T P"] | None:
        """Return the layer's own embeddings of the tokens; None where a model has none."""

    @property
    def latents(self) -> LatentCache:
        """Return the use of the vectors of latent attention."""

    @property
    def exact(self) -> bool:
        """Return whether a token's bits must not depend on the rows that are computed with it."""

    @property
    def token_mask(self) -> Bool[Array, " B*T"] | None:
        """Return False for padding tokens; None without padding."""

    def observe_routing(self, routing: Routing) -> None:
        """Receive the layer's routing, for statistics."""

    def rotate(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        rotary: Rotary | None,
        norms: HeadNorms | None = None,
        factor: float = 1.0,
        *,
        at_once: bool = False,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Apply the optional q/k norms, the optional rotary embedding at the tokens' positions, and queries' factor.

        A context may leave it to `attend`, unless the result is needed at once.
        """

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K values"],
        *,
        window: int | None = None,
        sinks: Float[Array, " N"] | None = None,
        softcap: float | None = None,
    ) -> Float[Array, "B T N values"]:
        """Compute causal attention of rotated queries over their visible keys."""

    def convolve(
        self, x: Float[Array, "B T C"], weight: Float[Array, "C 1 W"], heads: DeltaHeads
    ) -> Float[Array, "B T C"]:
        """Apply a causal convolution and silu to each channel of these heads."""

    def delta_rule(
        self, qkv: Float[Array, "B T W"], g: Float[Array, "B T N"], beta: Float[Array, "B T N"], heads: DeltaHeads
    ) -> Float[Array, "B T N V"]:
        """Compute linear attention by the gated delta rule."""

    def recur(self, recurrence: Recurrence, *values: Float[Array, "B T *V"]) -> Float[Array, "B T *O"]:
        """Compute a recurrence of the layer's own over the values of tokens."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedContext:
    """Context of packed rows: segments and rotary tables, built once per batch and shared by all layers."""

    segments: PackedSegments
    rope: RopeTables
    dropout_key: PRNGKeyArray | None = None
    router_losses: RouterLosses | None = None
    backend: str = field(default="auto", metadata={"static": True})
    attention_out: Float[Array, "B T N values"] | None = None
    """Attention's output, where it is known; it has no gradient."""
    tile: int | None = field(default=None, metadata={"static": True})
    """Tokens that pass through a layer at a time, apart from attention; None for all."""
    layer_input: Float[Array, "B T P"] | None = None
    """The layer's own embeddings of the tokens, where a model has such."""
    trains_input: bool = field(default=False, metadata={"static": True})
    """These have a gradient, beside that to the hidden states."""
    fp8: bool = field(default=True, metadata={"static": True})
    """Multiply matrices for FP8 products so; otherwise in the activations' dtype."""
    latents: LatentCache = field(default="none", metadata={"static": True})
    ranks: Bool[Array, "*tokens R"] | None = None
    """Ranks of the adapters that each token uses, [1, R] for one choice of all tokens; None for all ranks."""
    exact: bool = field(default=False, metadata={"static": True})
    """Compute each token's values with the bits that sampling gives it, of segments whose parts begin at tiles."""

    def each(self, layer_inputs: Sequence[Array] | None, segments: "Sequence[PackedSegments]") -> "list[PackedContext]":
        """Return the contexts of layers with these segments; inputs of their own may be of the first ones alone."""
        inputs = [*(layer_inputs or ()), *[None] * (len(segments) - len(layer_inputs or ()))]
        return [replace(self, layer_input=x, segments=part) for x, part in zip(inputs, segments, strict=True)]

    @property
    def token_mask(self) -> Bool[Array, " B*T"]:
        """Return False for padding tokens."""
        return self.segments.segment_ids.reshape(-1) > 0

    def observe_routing(self, routing: Routing) -> None:
        """Ignore the routing: training keeps no statistics."""

    def rotate(
        self, q, k, rotary: Rotary | None, norms: HeadNorms | None = None, factor: float = 1.0, *, at_once: bool = False
    ) -> tuple[Array, Array]:
        """Apply the optional q/k norms, the optional rotary embedding at the tokens' positions, and queries' factor."""
        return norm_and_rotate(q, k, self.rope, rotary, norms=norms, factor=factor)

    def attend(self, q, k, v, *, window=None, sinks=None, softcap=None) -> Float[Array, "B T N values"]:
        """Compute causal attention within each segment."""
        if self.attention_out is not None:
            return self.attention_out.reshape(*q.shape[:3], -1)
        options: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap}
        return packed_attention(q, k, v, self.segments, **options, exact=self.exact, backend=self.backend)

    def convolve(self, x, weight, heads: DeltaHeads) -> Float[Array, "B T C"]:
        """Apply a causal convolution and silu to each channel within each segment."""
        return causal_convolution(x, weight, self.segments, heads)

    def delta_rule(self, qkv, g, beta, heads: DeltaHeads) -> Float[Array, "B T N V"]:
        """Compute linear attention by the gated delta rule within each segment."""
        if self.attention_out is not None:
            return self.attention_out.reshape(*g.shape, -1)
        return gated_delta_rule(qkv, g, beta, self.segments, heads)

    def recur(self, recurrence: Recurrence, *values) -> Float[Array, "B T *O"]:
        """Compute a recurrence of the layer's own within each segment."""
        if self.attention_out is not None and recurrence.name == ATTENTION_OUT:
            return self.attention_out
        return recur(recurrence, self.segments, *values)

    def attend_rotated(self, rotation, z, *, window=None) -> Float[Array, "B T N H"]:
        """Compute `attend` of the heads of z, queries and keys once rotated."""
        return rotated_attention(rotation, z, self.segments, window=window, backend=self.backend)
