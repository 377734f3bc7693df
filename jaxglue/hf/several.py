"""Several adapter folders on one base at a time: side by side as one adapter, of whose ranks each token uses some."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool

from jaxglue.hf.adapter import Adapter, load_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.identity import Identity
from jaxglue.models.decoder import CausalLM
from jaxglue.models.linear import Linear
from jaxglue.models.lora import base_shapes, linear_layers
from jaxglue.models.moe_layers import ExpertLinear
from jaxglue.models.parameters import Params, hf_name
from jaxglue.ops.choices import SERVED

_LATENT = "kv_b_proj"
"""Projection that decoding of latent attention joins with its adapter."""


def add_adapters(
    model: CausalLM, folders: Mapping[str, Path], base: Identity, name: str, *, spare: int = 0
) -> dict[str, Bool[np.ndarray, " R"]]:
    """Add folders' PEFT adapters to the model in place, as one of all their ranks; return the ranks of each.

    Args:
        model: the base, without adapters.
        folders: of the adapters, by their names.
        base: identity of the base.
        name: of the base, for messages.
        spare: further ranks on all linear layers, which stand last, for `SpareRanks`.

    Raises:
        ValueError: a folder that is no adapter, an adapter that does not fit the base, or one of another kind than
            LoRA on linear layers and experts.
    """
    shapes, linears = base_shapes(model), dict(linear_layers(model))
    adapters = {key: check_adapter(load_adapter(folder), shapes, base, name) for key, folder in folders.items()}
    for adapter in adapters.values():
        _require_plain(adapter, linears)
    ends = np.cumsum([0, *map(_largest_rank, adapters.values())])
    total = int(ends[-1]) + spare
    adapted = dict.fromkeys(path for adapter in adapters.values() for path in adapter.modules)
    for path in dict.fromkeys([*adapted, *(_plain_paths(linears) if spare else ())]):
        linear, (*experts, rows, columns) = linears[path], shapes[path]
        A, B = np.zeros((*experts, total, columns), np.float32), np.zeros((*experts, rows, total), np.float32)
        for first, adapter in zip(ends[:-1], adapters.values(), strict=True):
            if (rows_of_A := adapter.tensors.get(f"{path}.lora_A")) is not None:
                part = slice(first, first + rows_of_A.shape[-2])
                A[..., part, :] = rows_of_A
                B[..., part] = adapter.config.scale_of(path) * adapter.tensors[f"{path}.lora_B"]
        linear.add_lora(rank=total, scale=1.0, dropout=0.0, name=path, rngs=nnx.Rngs(0))
        linear.lora_A, linear.lora_B = nnx.LoRAParam(jnp.asarray(A)), nnx.LoRAParam(jnp.asarray(B))
    ranks = np.arange(total)
    return {
        key: (first <= ranks) & (ranks < end) for key, first, end in zip(adapters, ends[:-1], ends[1:], strict=True)
    }


class SpareRanks:
    """Ranks of a model's adapters that stand free, for adapters that are loaded while it answers.

    Args:
        model: with spare ranks of `add_adapters`.
        base: identity of the base.
        name: of the base, for messages.
        spare: number of these ranks.
        total: ranks of all adapters.
    """

    def __init__(self, model: CausalLM, base: Identity, name: str, *, spare: int, total: int):
        self._shapes, self._linears = base_shapes(model), dict(linear_layers(model))
        self._base, self._name, self._total = base, name, total
        self._free = set(range(total - spare, total))

    def read(self, folder: Path) -> Adapter:
        """Return a folder's adapter; errors as of `add_adapters`, and for one on experts, which have no spare ranks."""
        adapter = check_adapter(load_adapter(folder), self._shapes, self._base, self._name)
        _require_plain(adapter, self._linears)
        if on_experts := [path for path in adapter.modules if isinstance(self._linears[path], ExpertLinear)]:
            raise ValueError(
                f"{adapter.folder} has an adapter on {on_experts[0]}, and experts have no --adapter-ranks: name it at "
                "the start (--adapters)"
            )
        return adapter

    def take(self, adapter: Adapter) -> Bool[np.ndarray, " R"]:
        """Return ranks for an adapter, free no longer; raise ValueError where too few are free."""
        count = _largest_rank(adapter)
        first = next((rank for rank in sorted(self._free) if self._free.issuperset(range(rank, rank + count))), None)
        if first is None:
            raise ValueError(
                f"{adapter.folder} has {count} ranks, and {len(self._free)} are free, of --adapter-ranks: unload an "
                "adapter, or start with more"
            )
        self._free -= set(range(first, first + count))
        ranks = np.arange(self._total)
        return (first <= ranks) & (ranks < first + count)

    def give_back(self, ranks: Bool[np.ndarray, " R"]) -> None:
        """Let further adapters have these ranks."""
        self._free |= set(np.flatnonzero(ranks).tolist())

    def written(self, trainable: Params, adapter: Adapter, ranks: Bool[np.ndarray, " R"]) -> Params:
        """Return the parameters of all adapters with this one at its ranks."""
        first, end = np.flatnonzero(ranks)[[0, -1]] + [0, 1]

        def write(path: Any, values: jax.Array) -> jax.Array:
            module, _, matrix = hf_name(jax.tree_util.keystr(path, simple=True, separator=".")).rpartition(".")
            at = np.s_[..., first:end, :] if matrix == "lora_A" else np.s_[..., first:end]
            part = np.zeros(values[at].shape, np.float32)
            if (tensor := adapter.tensors.get(f"{module}.{matrix}")) is not None:
                if matrix == "lora_A":
                    part[: len(tensor)] = tensor
                else:
                    part[..., : tensor.shape[-1]] = adapter.config.scale_of(module) * tensor
            return values.at[at].set(jnp.asarray(part, values.dtype))

        return jax.tree_util.tree_map_with_path(write, trainable)


def _plain_paths(linears: Mapping[str, object]) -> list[str]:
    return [path for path, linear in linears.items() if isinstance(linear, Linear) and not path.endswith(_LATENT)]


def _largest_rank(adapter: Adapter) -> int:
    return max(adapter.tensors[f"{path}.lora_A"].shape[-2] for path in adapter.modules)


def _require_plain(adapter: Adapter, linears: Mapping[str, object]) -> None:
    """Raise ValueError for an adapter whose products are not just added to those of linear layers and experts."""
    summed = Linear | ExpertLinear
    others = [path for path in adapter.modules if not isinstance(linears.get(path), summed) or path.endswith(_LATENT)]
    reasons = {
        "magnitudes (DoRA)": adapter.config.dora,
        "trained or new tokens": adapter.trains_vocabulary,
        "a score": adapter.scores,
        "merges that are rounded (--serve-as)": adapter.storage in SERVED,
        f"an adapter on {others[0]}" if others else "": bool(others),
    }
    if reason := next((reason for reason, found in reasons.items() if found), None):
        raise ValueError(
            f"{adapter.folder} has {reason}, which is not served beside others: serve it alone (--adapter), or merge it"
        )
