"""Adapters of several models side by side, as one of all their ranks, of which a request's tokens use those of one."""

from collections.abc import Sequence
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


def side_by_side(adapters: Sequence[Adapter]) -> tuple[Params, list[Bool[np.ndarray, " R"]]]:
    """Return the parameters of all adapters together, scaled as the first one, and the ranks of each among R.

    Args:
        adapters: plain ones of the same modules.
    """
    widths = [adapter.rank for adapter in adapters]
    owners, first = np.repeat(np.arange(len(adapters)), widths), adapters[0].config

    def join(path: Any, *leaves: Float[Array, "..."]) -> Float[Array, "..."]:
        module, matrix = _named(path)
        parts, axis = list[Array](), 0 if matrix == _A else 1
        for leaf, adapter, width in zip(leaves, adapters, widths, strict=True):
            part = leaf if matrix == _A else leaf * (adapter.config.scale_of(module) / first.scale_of(module))
            missing = width - leaf.shape[axis]
            parts.append(jnp.pad(part, [(0, missing * (place == axis)) for place in range(2)]))
        return jnp.concatenate(parts, axis).astype(leaves[0].dtype)

    joined = jax.tree_util.tree_map_with_path(join, *(adapter.weights for adapter in adapters))
    return joined, [owners == number for number in range(len(adapters))]


def _leaves(weights: Params) -> list[tuple[tuple[str, str], Array]]:
    return [(_named(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(weights)]


def _named(path: Any) -> tuple[str, str]:
    """Return the module and the matrix of a leaf."""
    module, _, matrix = hf_name(jax.tree_util.keystr(path, simple=True, separator=".")).rpartition(".")
    return module, matrix
