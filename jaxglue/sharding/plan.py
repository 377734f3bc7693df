"""What a mesh makes of a model: which bytes lie where, and what a step sends."""

from dataclasses import dataclass

import jax

from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import Params, flatten_names
from jaxglue.sharding.layout import Layout

_GIB = 2**30
_SHOWN = 3
_GRADIENT = 4
"""Bytes of a float32 gradient."""


@dataclass(kw_only=True)
class Split:
    """Bytes of one GPU."""

    parts: dict[str, int]
    """Axes that split parameters, empty for none → a GPU's share of them, in the dtypes in which they are stored."""
    undivided: list[str]
    """Parameters that stay whole because `fsdp` does not divide them."""
    gathered: float = 0.0
    """Received in a step to make weights whole."""
    reduced: float = 0.0
    """Received in a step to add gradients up."""
    exchanged: float = 0.0
    """Received in a step of activations: tokens for experts and what they made of others, terms of sums."""

    def __str__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        shares = [f"{size / _GIB:.2f} GiB {f'split over {axes}' if axes else 'whole'}" for axes, size in parts]
        more = ", …" if len(self.undivided) > _SHOWN else ""
        names = f" (fsdp does not divide {', '.join(self.undivided[:_SHOWN])}{more})" if self.undivided else ""
        return f"parameters of each GPU: {', '.join(shares)}{names}"

    @property
    def communication(self) -> str:
        """What each GPU receives in a step."""
        gathered = f"{self.gathered / _GIB:.2f} GiB of weights, gathered a layer ahead, " if self.gathered else ""
        exchanged = f"{self.exchanged / _GIB:.2f} GiB of activations, " if self.exchanged else ""
        both = f"{gathered}{exchanged}".removesuffix(", ")
        return f"each GPU receives {both}{both and ' and '}{self.reduced / _GIB:.2f} GiB of gradients a step"


def plan_split(
    layout: Layout,
    config: DecoderConfig,
    trainable: Params,
    frozen: Params,
    *,
    tokens: int,
    gradient_accumulation_steps: int,
) -> Split:
    """Where the parameters of these trees of shapes lie, and what a step of so many micro-batches sends.

    A ring passes on (n − 1) / n of what n GPUs gather or scatter, and twice that of what they add up.

    Args:
        layout: of the mesh and the dtype of activations.
        config: the model's shape.
        trainable, frozen: its parameters.
        tokens: of a micro-batch on one GPU.
        gradient_accumulation_steps: micro-batches in a step.
    """
    exchanged = (
        gradient_accumulation_steps * tokens * config.hidden_size * layout.dtype.itemsize * _passes(layout, config)
    )
    split = Split(parts={}, undivided=[], exchanged=exchanged)
    for tree, trains in ((trainable, True), (frozen, False)):
        specs = layout.param_specs(tree)
        own, whole = layout.local(tree, specs), layout.local(tree, layout.gathered_specs(tree))
        columns = (jax.tree.leaves(each) for each in (specs, own, whole))
        for name, spec, part, used in zip(flatten_names(tree), *columns, strict=True):
            axes = layout.axes(spec)
            key = " × ".join(axes)
            split.parts[key] = split.parts.get(key, 0) + part.size * part.dtype.itemsize
            if layout.gathers and "fsdp" not in axes and "fsdp" in layout.axes(layout.rule(name)):
                split.undivided.append(name)
            missing = gradient_accumulation_steps * (used.size - part.size) * layout.gathered_dtype(part.dtype).itemsize
            split.gathered += missing * (2 if ".layers." in name else 1)
            if trains:
                copies = layout.copies(spec)
                split.reduced += missing + _GRADIENT * 2 * part.size * (copies - 1) / copies
    return split


def _passes(layout: Layout, config: DecoderConfig) -> float:
    """How many times a GPU receives as much as its own tokens' hidden states, for one micro-batch."""
    experts, parts = layout.size("expert"), layout.size("tensor")
    sparse = sum(config.moe.sparse_layers) if config.moe else 0
    # To the experts and back, forward and backward, and once more to compute again what the adapters' gradients need.
    return 5 * sparse * (experts - 1) + 4 * config.num_hidden_layers * 2 * (parts - 1) / parts
