"""The sharding plan of a model on a mesh: each GPU's parameters, and the bytes it receives in a step."""

from dataclasses import dataclass

import jax

from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import Params, flatten_names
from jaxglue.sharding.rules import Layout

_GIB = 2**30
_SHOWN = 3
_GRADIENT_BYTES = 4  # float32


@dataclass(kw_only=True)
class ShardingPlan:
    """Bytes on and received by one GPU."""

    shards: dict[str, int]
    """Splitting axes, empty for none → bytes of one GPU's parameters, as stored."""
    unsharded: list[str]
    """Parameters that stay whole because `fsdp` does not divide them."""
    gathered: float = 0.0
    """Weights received in a step."""
    reduced: float = 0.0
    """Gradients received in a step."""
    exchanged: float = 0.0
    """Activations received in a step: tokens to experts and back, partial sums of tensor parallelism, keys and values
    of split rows."""

    def __str__(self) -> str:
        shards = sorted(self.shards.items(), key=lambda shard: -shard[1])
        sizes = [f"{size / _GIB:.2f} GiB {f'split over {axes}' if axes else 'whole'}" for axes, size in shards]
        more = ", …" if len(self.unsharded) > _SHOWN else ""
        names = f" (fsdp does not divide {', '.join(self.unsharded[:_SHOWN])}{more})" if self.unsharded else ""
        return f"parameters of each GPU: {', '.join(sizes)}{names}"

    @property
    def communication(self) -> str:
        """Return the bytes received in a step, as text."""
        gathered = f"{self.gathered / _GIB:.2f} GiB of weights, gathered a layer ahead, " if self.gathered else ""
        exchanged = f"{self.exchanged / _GIB:.2f} GiB of activations, " if self.exchanged else ""
        both = f"{gathered}{exchanged}".removesuffix(", ")
        return f"each GPU receives {both}{both and ' and '}{self.reduced / _GIB:.2f} GiB of gradients a step"


def plan_sharding(
    layout: Layout,
    config: DecoderConfig,
    trainable: Params,
    frozen: Params,
    *,
    tokens: int,
    gradient_accumulation_steps: int,
) -> ShardingPlan:
    """Compute each GPU's parameter bytes and the bytes it receives in a step.

    A ring over n GPUs passes (n − 1) / n of the bytes of an all-gather or reduce-scatter, twice that of an all-reduce.

    Args:
        layout: with the mesh and the dtype of activations.
        config: the model's shape.
        trainable, frozen: its parameters or their shapes.
        tokens: of one GPU's micro-batch.
        gradient_accumulation_steps: micro-batches in a step.
    """
    activations = gradient_accumulation_steps * tokens * config.hidden_size * layout.dtype.itemsize
    plan = ShardingPlan(shards={}, unsharded=[], exchanged=activations * _exchanges(layout, config))
    for tree, trains in ((trainable, True), (frozen, False)):
        specs = layout.param_specs(tree)
        local, gathered = layout.local_shapes(tree, specs), layout.local_shapes(tree, layout.gathered_specs(tree))
        columns = (jax.tree.leaves(each) for each in (specs, local, gathered))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        for name, path, spec, shard, whole in zip(flatten_names(tree), paths, *columns, strict=True):
            axes = layout.axes(spec)
            key = " × ".join(axes)
            plan.shards[key] = plan.shards.get(key, 0) + shard.size * shard.dtype.itemsize
            if layout.gathers and "fsdp" not in axes and "fsdp" in layout.axes(layout.rule(name)):
                plan.unsharded.append(name)
            itemsize = layout.gathered_dtype(path, shard.dtype).itemsize
            missing = gradient_accumulation_steps * (whole.size - shard.size) * itemsize
            plan.gathered += missing * (2 if ".layers." in name else 1)
            if trains:
                copies = layout.copies(spec)
                plan.reduced += missing + _GRADIENT_BYTES * 2 * shard.size * (copies - 1) / copies
    return plan


def _exchanges(layout: Layout, config: DecoderConfig) -> float:
    """Return the activations received for one micro-batch, in units of a GPU's own tokens' hidden states."""
    experts, shards = layout.size("expert"), layout.size("tensor")
    sparse = sum(config.moe.sparse_layers) if config.moe else 0
    # Experts: there and back, forward and backward, and there again to recompute for the adapters' gradients.
    # Keys and values twice, and their gradients.
    rows = 3 * 2 * config.num_key_value_heads * config.head_dim / config.hidden_size * (layout.size("context") - 1)
    return 5 * sparse * (experts - 1) + config.num_hidden_layers * (rows + 4 * 2 * (shards - 1) / shards)
