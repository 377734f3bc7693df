"""The interface of an optimizer, and all optimizers by name; importing it loads no JAX."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jaxglue.ops.choices import MomentFormat

if TYPE_CHECKING:
    from jax.stages import Traced
    from jaxtyping import Array, Float

    from jaxglue.models.parameters import ParamKey, Params
    from jaxglue.sharding.rules import Layout
    from jaxglue.training.config import OptimizerConfig


class Optimizer(Protocol):
    """Updates parameters from their gradients; its state is a tree with the keys of the trainable one."""

    @property
    def fits_programs(self) -> bool:
        """Return whether `update` may be a part of a larger program on one device."""

    def init(self, trainable: "Params") -> "Params":
        """Return the state before the first step, of every part."""

    def state_shapes(self, trainable: "Params") -> "Params":
        """Return the shapes of the state on one device for shapes of parameters."""

    def update(
        self, trainable: "Params", state: "Params", gradients: "Params", step: "int | Array"
    ) -> "tuple[Params, Params, dict[str, Float[Array, '']]]":
        """Update all parts; return new trainable, new state, and grad_norm and learning_rate.

        The old trees are donated.

        Args:
            trainable, state, gradients: trees of this step.
            step: optimizer steps done before.
        """

    def update_part(
        self, trainable: "Params", state: "Params", key: "ParamKey", gradient: "Params", step: int
    ) -> "tuple[Params, Params]":
        """Update one part without clipping; return trainable and state. The part's old arrays are donated."""

    def learning_rate(self, step: int) -> "dict[str, Float[Array, '']]":
        """Return the learning rate after `step` optimizer steps, as `update` reports it."""

    def trace_update(self, trainable: "Params") -> "Iterable[Traced]":
        """Trace the programs of `update` on shapes of parameters on one GPU, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer, and what settings need to know of it."""

    make: "str | Callable[[OptimizerConfig, int, Layout], Optimizer]"
    """Called with the settings, the run's steps and the parameters' layout; or its module and name, imported late."""
    title: str
    """Its name in the plan's panel."""
    moments: tuple[MomentFormat, ...] = ("float32",)
    """Formats that it can store its state in."""
    rate_factor: float = 1.0
    """Factor on the default learning rate, which suits AdamW's updates."""
    beta2: float = 0.999
    """Decay of the second moment, or of the one that stands for it, by default."""
    needs_matrices: bool = False
    """Whether the optimizer updates whole weight matrices only: neither adapters nor stacked experts."""


_ADAMW = OptimizerKind(
    make="jaxglue.training.adamw:AdamWOptimizer", title="AdamW", moments=("float32", "bfloat16", "8bit")
)
OPTIMIZERS = {
    "adamw": _ADAMW,
    "adamw_8bit": _ADAMW,
    "muon": OptimizerKind(
        make="jaxglue.training.optax_optimizer:Muon",
        title="Muon for the layers' matrices, AdamW for the rest",
        moments=("float32", "bfloat16"),
        needs_matrices=True,
    ),
    "adafactor": OptimizerKind(make="jaxglue.training.optax_optimizer:Adafactor", title="Adafactor"),
    "lion": OptimizerKind(
        make="jaxglue.training.optax_optimizer:Lion",
        title="Lion",
        moments=("float32", "bfloat16"),
        rate_factor=0.1,
        beta2=0.99,
    ),
}
"""Every optimizer, by its name in `--optimizer`; an entry is the whole of what a new one adds."""


def make_optimizer(config: "OptimizerConfig", total_steps: int, layout: "Layout | None" = None) -> Optimizer:
    """Return the optimizer that `--optimizer` names, for parameters on one device without a layout."""
    from jaxglue.sharding.rules import SINGLE_DEVICE

    make: Any = OPTIMIZERS[config.optimizer].make
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(importlib.import_module(module), name)
    return make(config, total_steps, SINGLE_DEVICE if layout is None else layout)


def state_bytes(config: "OptimizerConfig", trainable: "Params") -> float:
    """Return the mean bytes of optimizer state of a trained value, from parameters or their shapes."""
    import jax

    optimizer, sizes, total = make_optimizer(config, total_steps=1), {}, 0
    for part in (*(trainable[name] for name in trainable.keys() - {"layers"}), *trainable["layers"]):
        leaves, treedef = jax.tree.flatten(part)
        shape = treedef, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if shape not in sizes:
            state = jax.tree.leaves(optimizer.state_shapes({"layers": [part]}))
            sizes[shape] = sum(leaf.size * leaf.dtype.itemsize for leaf in state)
        total += sizes[shape]
    return total / sum(leaf.size for leaf in jax.tree.leaves(trainable))
