"""What a decoder layer is given beside its input: how to rotate and how to attend."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxglue.ops.attention import packed_attention
from jaxglue.ops.moe import Routing
from jaxglue.ops.norm_rope import HeadNorms, rotate_heads
from jaxglue.ops.segments import PackedSegments


class RouterLosses(NamedTuple):
    """Weights of the routers' auxiliary losses, load balancing and z-loss (see `jaxglue.ops.moe`)."""

    balance: Float[Array, ""] | float = 0.0
    z: Float[Array, ""] | float = 0.0


class LayerContext(Protocol):
    """The part of a context that layers use; training packs segments, generation keeps a key/value cache."""

    @property
    def dropout_key(self) -> PRNGKeyArray | None:
        """The layer's own key, or None when nothing is dropped."""

    @property
    def router_losses(self) -> RouterLosses | None:
        """None where the objective has no auxiliary losses of routers."""

    @property
    def token_mask(self) -> Bool[Array, " B*T"] | None:
        """False for padding; None where there is none."""

    def observe_routing(self, routing: Routing) -> None:
        """Is shown how the layer spread the tokens over its experts, for statistics."""

    def rotate(
        self, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], norms: HeadNorms | None = None
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Applies the norms of heads, where there are any, and the rotary embedding of the tokens' positions."""

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        window: int | None = None,
        sinks: Float[Array, " N"] | None = None,
        scale: float | None = None,
    ) -> Float[Array, "B T N H"]:
        """Causal attention of rotated queries over the keys that they may see."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedContext:
    """Packed rows: segments and rotary tables, built once per batch and shared by all layers."""

    segments: PackedSegments
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    dropout_key: PRNGKeyArray | None = None
    router_losses: RouterLosses | None = None
    backend: str = field(default="auto", metadata={"static": True})

    @property
    def token_mask(self) -> Bool[Array, " B*T"]:
        """False for padding."""
        return self.segments.segment_ids.reshape(-1) > 0

    def observe_routing(self, routing: Routing) -> None:
        """Training keeps no statistics."""

    def rotate(self, q, k, norms: HeadNorms | None = None) -> tuple[Array, Array]:
        """Applies the norms of heads, where there are any, and the rotary embedding of the tokens' positions."""
        return rotate_heads(q, k, self.cos, self.sin, norms=norms)

    def attend(self, q, k, v, *, window=None, sinks=None, scale=None) -> Float[Array, "B T N H"]:
        """Causal attention inside each segment."""
        return packed_attention(q, k, v, self.segments, window=window, sinks=sinks, scale=scale, backend=self.backend)
