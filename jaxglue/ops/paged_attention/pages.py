"""The pages of a key/value cache: keys and values of many sequences, as they are or in float8."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.ops.quant.fp8 import E4M3, quantize_rows
from jaxglue.ops.zeros import zeros_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVPages:
    """A layer's rotated keys, and values, in pages. A pytree; page 0 belongs to no sequence."""

    keys: Float[Array, "pages K page H"]
    values: Float[Array, "pages K page H"]
    key_scales: Float[Array, "pages K page"] | None = None
    """float32 factors of each token's keys of a head; None but for float8."""
    value_scales: Float[Array, "pages K page"] | None = None

    @property
    def page(self) -> int:
        """Return the tokens in a page."""
        return self.keys.shape[2]

    def write(self, k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Int[Array, " T"], offsets) -> "KVPages":
        """Return the pages with these tokens' keys and values at their places."""
        at = lambda array, x: array.at[pages, :, offsets].set(x.astype(array.dtype))  # noqa: E731
        if self.key_scales is None or self.value_scales is None:
            return replace(self, keys=at(self.keys, k), values=at(self.values, v))
        (k, k_scales), (v, v_scales) = quantize_rows(k), quantize_rows(v)
        return KVPages(
            keys=at(self.keys, k),
            values=at(self.values, v),
            key_scales=at(self.key_scales, k_scales[..., 0]),
            value_scales=at(self.value_scales, v_scales[..., 0]),
        )

    def read(self, tables: Int[Array, "S P"], dtype) -> tuple[Float[Array, "S P K page H"], ...]:
        """Return the keys and values of all pages in the tables."""
        pairs = (self.keys, self.key_scales), (self.values, self.value_scales)
        read = (array[tables] if scales is None else _scaled(array[tables], scales[tables]) for array, scales in pairs)
        return tuple(x.astype(dtype) for x in read)


def _scaled(values, scales) -> Float[Array, "S P K page H"]:
    return values.astype(jnp.float32) * scales[..., None]


def make_pages(pages: int, heads: int, page: int, head_dim: int, dtype, device=None) -> KVPages:
    """Return empty pages, on a device or sharding.

    Args:
        pages: their number, with page 0.
        heads: K, key/value heads.
        page: tokens in a page.
        head_dim: H.
        dtype: of keys and values; float8_e4m3fn makes scales for each token and head, too.
        device: where they are.
    """
    keys, values = (zeros_on(device, (pages, heads, page, head_dim), dtype) for _ in range(2))
    if jnp.dtype(dtype) != E4M3:
        return KVPages(keys=keys, values=values)
    scales = (zeros_on(device, (pages, heads, page), jnp.float32) for _ in range(2))
    return KVPages(keys=keys, values=values, key_scales=next(scales), value_scales=next(scales))
