"""What a mesh makes of a model: which bytes lie where, and what a step sends."""

from dataclasses import dataclass

import jax

from jaxglue.parameters import Tree, flatten_names
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

    def __str__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        shares = [f"{size / _GIB:.2f} GiB {f'split over {axes}' if axes else 'whole'}" for axes, size in parts]
        more = ", …" if len(self.undivided) > _SHOWN else ""
        names = f" (fsdp does not divide {', '.join(self.undivided[:_SHOWN])}{more})" if self.undivided else ""
        return f"parameters of each GPU: {', '.join(shares)}{names}"

    @property
    def communication(self) -> str:
        """What each GPU receives in a step."""
        gathered = f"{self.gathered / _GIB:.2f} GiB of weights, gathered a layer ahead, and " if self.gathered else ""
        return f"each GPU receives {gathered}{self.reduced / _GIB:.2f} GiB of gradients a step"


def plan_split(layout: Layout, trainable: Tree, frozen: Tree, *, accumulation: int) -> Split:
    """Where the parameters of these trees of shapes lie, and what a step of so many micro-batches sends.

    A ring passes on (n − 1) / n of what n GPUs gather or scatter, and twice that of what they add up.
    """
    split = Split(parts={}, undivided=[])
    for tree, trains in ((trainable, True), (frozen, False)):
        specs = layout.stored(tree)
        own, whole = layout.local(tree, specs), layout.local(tree, layout.used(tree))
        columns = (jax.tree.leaves(each) for each in (specs, own, whole))
        for name, spec, part, used in zip(flatten_names(tree), *columns, strict=True):
            axes = layout.axes(spec)
            key = " × ".join(axes)
            split.parts[key] = split.parts.get(key, 0) + part.size * part.dtype.itemsize
            if layout.gathers and "fsdp" not in axes and "fsdp" in layout.axes(layout.rule(name)):
                split.undivided.append(name)
            missing = used.size - part.size
            if missing:
                passes = accumulation * (2 if ".layers." in name else 1)
                split.gathered += passes * missing * layout.gathered_dtype(part.dtype).itemsize
            if trains:
                copies = layout.copies(spec)
                split.reduced += _GRADIENT * (accumulation * missing + 2 * part.size * (copies - 1) / copies)
    return split
