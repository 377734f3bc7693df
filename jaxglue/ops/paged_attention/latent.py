"""The cache of latent attention, one vector a token for all heads, and attention of one query a sequence over it.

A query is projected to the latents' space once, instead of each cached latent to keys and values (DeepSeek-V2, arXiv
2405.04434, 2.1.2).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.ops.quant.fp8 import E4M3, quantize_rows
from jaxglue.ops.zeros import zeros_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LatentPages:
    """A layer's rotated keys that all heads share, each beside its latent vector, in pages; page 0 is nobody's."""

    tokens: Float[Array, "pages page W"]
    scales: Float[Array, "pages page"] | None = None
    """float32 factors of tokens; None but for float8."""

    def write(self, x: Float[Array, "T W"], pages: Int[Array, " T"], offsets: Int[Array, " T"]) -> "LatentPages":
        """Return the pages with these tokens at their places."""
        if self.scales is None:
            return replace(self, tokens=self.tokens.at[pages, offsets].set(x.astype(self.tokens.dtype)))
        values, scales = quantize_rows(x)
        return LatentPages(
            tokens=self.tokens.at[pages, offsets].set(values),
            scales=self.scales.at[pages, offsets].set(scales[..., 0]),
        )

    def read(self, tables: Int[Array, "S P"], dtype) -> Float[Array, "S tokens W"]:
        """Return the tokens of all pages in the tables."""
        tokens = self.tokens[tables]
        if self.scales is not None:
            tokens = tokens.astype(jnp.float32) * self.scales[tables][..., None]
        return tokens.astype(dtype).reshape(len(tables), -1, tokens.shape[-1])


def make_latent_pages(pages: int, page: int, width: int, dtype, device=None) -> LatentPages:
    """Return empty pages of tokens of this width, on a device or sharding; float8_e4m3fn makes scales, too."""
    tokens = zeros_on(device, (pages, page, width), dtype)
    if jnp.dtype(dtype) != E4M3:
        return LatentPages(tokens=tokens)
    return LatentPages(tokens=tokens, scales=zeros_on(device, (pages, page), jnp.float32))


def reference_latent_attention(
    q: Float[Array, "S N W"],
    cache: LatentPages,
    tables: Int[Array, "S P"],
    positions: Int[Array, " S"],
    *,
    rank: int,
    scale: float,
) -> Float[Array, "S N rank"]:
    """See `latent_attention`; softmax in float32."""
    tokens = cache.read(tables, q.dtype)
    visible = jnp.arange(tokens.shape[1]) <= positions[:, None]
    tokens = jnp.where(visible[..., None], tokens, 0)  # 0 · NaN of a page's last owner is NaN
    scores = jnp.einsum("snw,stw->snt", q, tokens, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("snt,str->snr", weights, tokens[..., -rank:], preferred_element_type=jnp.float32).astype(q.dtype)
