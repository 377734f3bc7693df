"""Adapters of several models side by side, as one of all their ranks, of which a request's tokens use those of one."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import Params, hf_name

_A, _B = "lora_A", "lora_B"
_LATENT = "kv_b_proj"
"""Projection that decoding of latent attention joins with its adapter."""


class Adapter(NamedTuple):
    """Parameters of an adapter, with the settings that give their scales."""

    weights: Params
    config: LoraConfig

    @property
    def is_plain(self) -> bool:
        """Return whether its products are just added to those of linear layers."""
        return all(
            matrix in (_A, _B) and leaf.ndim == 2 and not module.endswith(_LATENT)
            for (module, matrix), leaf in _leaves(self.weights)
        )

    @property
    def rank(self) -> int:
        """Return the largest rank of its modules."""
        return max(len(leaf) for (_, matrix), leaf in _leaves(self.weights) if matrix == _A)


def side_by_side(
    adapters: Sequence[Adapter], scaled: LoraConfig | None = None
) -> tuple[Params, list[Bool[np.ndarray, " R"]]]:
    """Return the parameters of all adapters together, and the ranks of each among R.

    Args:
        adapters: plain ones of the same modules.
        scaled: settings by which the result is scaled; None for those of the first adapter.
    """
    widths = [adapter.rank for adapter in adapters]
    owners, scaled = np.repeat(np.arange(len(adapters)), widths), scaled or adapters[0].config

    def join(path: Any, *leaves: Float[Array, "..."]) -> Float[Array, "..."]:
        module, matrix = _named(path)
        parts, axis = list[Array](), 0 if matrix == _A else 1
        for leaf, adapter, width in zip(leaves, adapters, widths, strict=True):
            part = leaf if matrix == _A else leaf * _factor(module, adapter, scaled)
            missing = width - leaf.shape[axis]
            parts.append(jnp.pad(part, [(0, missing * (place == axis)) for place in range(2)]))
        return jnp.concatenate(parts, axis).astype(leaves[0].dtype)

    joined = jax.tree_util.tree_map_with_path(join, *(adapter.weights for adapter in adapters))
    return joined, [owners == number for number in range(len(adapters))]


def gradients_of_each(gradients: Params, adapters: Sequence[Adapter], scaled: LoraConfig) -> list[Params]:
    """Return the gradients to each adapter's parameters, from those to the parameters `side_by_side`."""
    firsts = np.cumsum([0, *(adapter.rank for adapter in adapters)])

    def part(
        path: Any, gradient: Float[Array, "..."], leaf: Float[Array, "..."], adapter: Adapter, first: int
    ) -> Array:
        module, matrix = _named(path)
        axis = 0 if matrix == _A else 1
        own = jax.lax.slice_in_dim(gradient, first, first + leaf.shape[axis], axis=axis)
        return own if matrix == _A else own * _factor(module, adapter, scaled)

    return [
        jax.tree_util.tree_map_with_path(partial(part, adapter=each, first=int(first)), gradients, each.weights)
        for each, first in zip(adapters, firsts, strict=False)
    ]


def _factor(module: str, adapter: Adapter, scaled: LoraConfig) -> float:
    """Return the adapter's scale of a module in units of another's."""
    return adapter.config.scale_of(module) / scaled.scale_of(module)


def _leaves(weights: Params) -> list[tuple[tuple[str, str], Array]]:
    return [(_named(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(weights)]


def _named(path: Any) -> tuple[str, str]:
    """Return the module and the matrix of a leaf."""
    module, _, matrix = hf_name(jax.tree_util.keystr(path, simple=True, separator=".")).rpartition(".")
    return module, matrix
