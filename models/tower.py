"""Vision towers: images' patches to features, by blocks that a family's table describes, and a family's own ends."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.context import PackedContext
from jaxglue.models.linear import Linear
from jaxglue.models.residual import Norm
from jaxglue.models.tower_config import TowerConfig
from jaxglue.ops.attention import packed_attention
from jaxglue.ops.rope import RopeTables, apply_rope
from jaxglue.vision.rows import Images, Patches

Angles = Float[Array, "B P half"]
"""Angles by which pairs of a head's dimensions turn, (i, i + half)."""


class Parameter(nnx.Module):
    """A weight, and perhaps a bias, under the name of the module that holds them."""

    def __init__(self, shape: tuple[int, ...], std: float, *, bias: int = 0, dtype: Any, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * std)
        self.bias = nnx.Param(jnp.zeros(bias, dtype)) if bias else None


class Group(nnx.Module):
    """Modules by names, one inside of another."""

    def __init__(self, **modules: Any):
        for name, module in modules.items():
            setattr(self, name, module)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a module."""


class TowerBlock(nnx.Module):
    """x + attention(norm(x)) over the patches of an image, then + mlp(norm(x))."""

    def __init__(self, config: TowerConfig, *, dtype: Any, rngs: nnx.Rngs):
        W, F, names = config.width, config.intermediate, config.names
        linear = partial(Linear, bias=config.bias, std=config.initializer_range, dtype=dtype, rngs=rngs)
        norm = partial(Norm, W, config.eps, style=config.norm, dtype=dtype)
        attention = {name: linear(W, 3 * W // len(names.qkv)) for name in names.qkv} | {names.output: linear(W, W)}
        mlp = {name: linear(W, F) for name in names.up} | {names.down: linear(F, W)}
        setattr(self, names.before_attention, norm())
        setattr(self, names.attention, Group(**attention))
        setattr(self, names.before_mlp, norm())
        setattr(self, names.mlp, Group(**mlp))
        self.names, self.config = names, config

    def __call__(
        self, x: Float[Array, "B P W"], angles: Angles | None, context: PackedContext
    ) -> Float[Array, "B P W"]:
        """Let the patches of each image see each other."""
        names = self.names
        x = x + self._attend(getattr(self, names.before_attention)(x), angles, context)
        mlp, normed = getattr(self, names.mlp), getattr(self, names.before_mlp)(x)
        gate, *up = (getattr(mlp, name)(normed, context) for name in names.up)
        hidden = self.config.activate(gate.astype(jnp.float32)).astype(x.dtype)
        return x + getattr(mlp, names.down)(hidden * up[0] if up else hidden, context)

    def _attend(self, normed: Float[Array, "B P W"], angles: Angles | None, context: PackedContext) -> Array:
        attention, names = getattr(self, self.names.attention), self.names
        projected = [getattr(attention, name)(normed, context) for name in names.qkv]
        q, k, v = projected if len(projected) == 3 else jnp.split(projected[0], 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], self.config.heads, -1) for y in (q, k, v))
        if angles is not None:
            cos, sin = jnp.cos(angles), jnp.sin(angles)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        attended = packed_attention(q, k, v, context.segments, backend=context.backend)
        return getattr(attention, names.output)(attended.reshape(normed.shape), context)


class Vision(nnx.Module):
    """A tower with its projector: modules under their paths' first names."""

    config: TowerConfig

    def __call__(self, patches: Patches, dtype: Any, *, backend: str = "auto") -> Float[Array, "B I D"]:
        """Return the features of rows of patches, each in the place of its merged patches."""
        raise NotImplementedError

    def pixels(self, patches: Patches) -> Float[Array, "B P C"]:
        """Return the patches' values, normalized by color, in float32; a frame's colors are its outer axis."""
        frames = patches.values.shape[-1] // (3 * self.config.patch**2)
        mean, std = (
            jnp.tile(jnp.repeat(jnp.asarray(x, jnp.float32), self.config.patch**2), frames)
            for x in (self.config.mean, self.config.std)
        )
        return (patches.values.astype(jnp.float32) * jnp.float32(1 / 255) - mean) / std

    def convolve(self, patches: Patches, conv: Parameter, dtype: Any) -> Float[Array, "B P W"]:
        """Return the patches' embeddings by a convolution; of one over frames, which are equal in images, their sum."""
        weight, pixels = conv.weight[...].astype(jnp.float32), self.pixels(patches).astype(dtype)
        if weight.ndim == 5:
            is_video = pixels.shape[-1] > 3 * self.config.patch**2
            weight = weight.transpose(0, 2, 1, 3, 4) if is_video else weight.sum(2)
        weight = weight.reshape(weight.shape[0], -1)
        x = jnp.einsum("bpc,wc->bpw", pixels, weight.astype(dtype), preferred_element_type=jnp.float32)
        return (x if conv.bias is None else x + conv.bias[...]).astype(dtype)

    def run_blocks(
        self, blocks: Sequence[TowerBlock], x: Float[Array, "B P W"], angles: Angles | None, context: PackedContext
    ) -> Float[Array, "B P W"]:
        """Run blocks one after another, each again for its gradient; equal ones are compiled as one."""
        if not blocks:
            return x
        graphdefs, states = zip(*map(nnx.split, blocks), strict=True)

        def apply(x: Array, state: Any) -> tuple[Array, None]:
            return nnx.merge(graphdefs[0], state)(x, angles, context), None

        if len(set(graphdefs)) > 1:  # their adapters differ
            for block in blocks:
                x = jax.checkpoint(lambda x, block=block: block(x, angles, context))(x)
            return x
        return jax.lax.scan(jax.checkpoint(apply), x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))[0]


def tower_context(patches: Patches, backend: str = "auto") -> PackedContext:
    """Return the context of a tower's blocks."""
    return PackedContext(segments=patches.segments, rope=RopeTables((), ()), backend=backend)


def axial_angles(
    patches: Patches, frequencies: tuple[Float[Array, " quarter"], Float[Array, " quarter"]]
) -> Float[Array, "B P half"]:
    """Return angles of which the first half turn with a patch's row and the others with its column."""
    row, column = (patches.places[..., axis, None].astype(jnp.float32) for axis in (0, 1))
    return jnp.concatenate([row * frequencies[0], column * frequencies[1]], axis=-1)


@jax.custom_vjp
def place_features(x: Float[Array, "B T W"], features: Float[Array, "B I D"], images: Images) -> Float[Array, "B T W"]:
    """Return embeddings with features in the places of images' tokens; further columns of these are 0."""
    index = images.index[..., None]
    seen = jnp.take_along_axis(features.astype(x.dtype), jnp.maximum(index, 0), axis=1)
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, x.shape[-1] - seen.shape[-1])))
    return jnp.where(index >= 0, seen, x)


def _place_forward(x, features, images):
    return place_features(x, features, images), (features, images)


def _place_backward(residuals, dy):
    features, images = residuals
    T = dy.shape[1]
    owners = images.owners[..., None]
    # Read by feature: a scatter of tokens' gradients would add those of all text to one place.
    taken = jnp.take_along_axis(dy[..., : features.shape[-1]], jnp.minimum(owners, T - 1), axis=1)
    dx = jnp.where(images.index[..., None] >= 0, 0, dy)
    return dx, jnp.where(owners < T, taken, 0).astype(features.dtype), None


place_features.defvjp(_place_forward, _place_backward)
