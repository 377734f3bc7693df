"""Shapes of vision towers, from config.json: what families share, and which parameters train."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxglue.ops.norm_rope import LAYER_NORM, NormStyle

Trains = Literal["none", "projector", "all"]
"""Parts of a tower that train."""


@dataclass(frozen=True, kw_only=True)
class BlockNames:
    """Names of a block's modules."""

    before_attention: str = "norm1"
    attention: str = "attn"
    qkv: tuple[str, ...] = ("qkv",)
    """Projections to queries, keys and values: one for all, or one for each."""
    output: str = "proj"
    before_mlp: str = "norm2"
    mlp: str = "mlp"
    up: tuple[str, ...] = ("linear_fc1",)
    """Projections before the activation: one, or gate and up."""
    down: str = "linear_fc2"


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Shape of a vision tower and of the projector to its text model's width; a family's is a subclass."""

    width: int
    layers: int
    heads: int
    intermediate: int
    patch: int
    merge: int
    """Patches of a merged one's side."""
    eps: float = 1e-6
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Of a color's values, in units of their range."""
    trains: Trains = "none"
    initializer_range: float = field(default=0.02, repr=False)

    names: ClassVar[BlockNames] = BlockNames()
    norm: ClassVar[NormStyle] = LAYER_NORM
    bias: ClassVar[bool] = True
    roots: ClassVar[tuple[str, ...]] = ()
    """Paths of the tower's and the projector's modules, beneath `model`."""
    projector: ClassVar[tuple[str, ...]] = ()
    """Paths of the projector's modules."""
    image_positions: ClassVar[bool] = False
    """Tokens have positions by time, height and width."""

    @property
    def spans(self) -> Literal["none", "windows", "all"]:
        """Return the layers in which an image's tokens see later ones of it: those with a window, all, or none."""
        return "none"

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.width // self.heads

    def activate(self, x: Array) -> Array:
        """Apply the activation of feed-forwards."""
        return jax.nn.gelu(x, approximate=True)

    @property
    def layers_seen(self) -> int:
        """Return the text's first layers to whose outputs an image has features of their own."""
        return 0

    def feature_width(self, width: int) -> int:
        """Return the width of features, of a text model of a width: those of embeddings, then those of layers."""
        return width * (1 + self.layers_seen)

    def make(self, config: Any, *, dtype: Any, rngs: nnx.Rngs) -> Any:
        """Return the modules."""
        raise NotImplementedError

    def within(self, config: Any) -> Any:
        """Return the architecture of a text model with this tower."""
        sees = tuple(index < self.layers_seen for index in range(config.num_hidden_layers))
        return replace(config, vision=self, layer_sees=sees if self.layers_seen else ())

    def initial(self, name: str, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Return a value of a new model's vector; None for matrices, which are drawn."""
        if len(spec.shape) != 1:
            return None
        return jnp.zeros(spec.shape, spec.dtype) if name.endswith("bias") else jnp.ones(spec.shape, spec.dtype)

    def owns(self, name: str) -> bool:
        """Tell whether a parameter or module is the tower's or the projector's, by its name in Hugging Face's."""
        return name.removeprefix("model.").startswith(tuple(f"{root}." for root in self.roots))

    def in_projector(self, name: str) -> bool:
        """Tell whether a parameter or module is the projector's."""
        return name.removeprefix("model.").startswith(tuple(f"{root}." for root in self.projector))


@dataclass(frozen=True)
class TrainedParams:
    """Filter of the variables that train where all of a text model's do: of its tower, those that `trains` names."""

    vision: TowerConfig

    def __call__(self, path: tuple[Any, ...], value: Any) -> bool:
        """Tell whether a variable of one of the model's modules trains."""
        is_parameter = nnx.filterlib.to_predicate(nnx.Param)(path, value)
        if not is_parameter or not path or path[0] != "vision" or self.vision.trains == "all":
            return is_parameter
        return self.vision.trains == "projector" and self.vision.in_projector(".".join(map(str, path[1:])))


def tower_sizes(
    vision: Mapping[str, Any],
    fields: Mapping[str, tuple[str, int]],
    *,
    heads: bool = True,
    name: str = "vision_config",
) -> dict[str, Any]:
    """Return the sizes of a `vision_config`.

    Args:
        vision: of config.json.
        fields: names there, and defaults, by the sizes' names.
        heads: the tower has heads of attention.
        name: of the object in config.json.

    Raises:
        ValueError: not a whole number from 1, or a width that the heads do not divide.
    """
    sizes = {name: default if vision.get(key) is None else vision[key] for name, (key, default) in fields.items()}
    for size, value in sizes.items():
        if type(value) is not int or not 1 <= value <= _LARGEST:
            key = fields[size][0]
            raise ValueError(f"{name} in config.json: {key} must be a whole number from 1, got {value!r:.100}")
    if heads and (sizes["width"] % sizes["heads"] or sizes["width"] // sizes["heads"] % 4):
        raise ValueError(
            f"{name} in config.json: {sizes['heads']} heads do not divide a width of {sizes['width']} into "
            "multiples of 4"
        )
    return sizes


_LARGEST = 2**24
