"""The interface of an optimizer, its settings, and all optimizers by name; importing it loads no JAX."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from jaxglue.ops.choices import MomentFormat
from jaxglue.parts import Registry
from jaxglue.settings.config import (
    Alias,
    Choices,
    Excludes,
    Instead,
    KindSettings,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Range,
    Synonyms,
)

if TYPE_CHECKING:
    from jax.stages import Traced
    from jaxtyping import Array, Float

    from jaxglue.models.parameters import ParamKey, Params
    from jaxglue.sharding.rules import Layout


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


OPTIMIZERS = Registry["OptimizerKind"]("optimizer")
"""Every optimizer, by its name in `--optimizer`; an entry is the whole of what a new one adds."""
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("paged_adamw", "adamw_apex_fused", "adamw_torch_npu_fused", "adamw_torch_xla"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
}
_Share = Annotated[float, Range(ge=0, le=1)]
_Decay = Annotated[float, Range(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(KindSettings):
    """The optimizer, its learning-rate schedule and clipping; its further settings are the optimizer's own."""

    named_by: ClassVar = "optimizer"
    optimizer: Annotated[
        str,
        Choices(OPTIMIZERS),
        Alias("optim"),
        Synonyms(**_OPTIMIZERS),
        Instead(sgd="adafactor, which stores as little"),
    ] = "adamw"
    """AdamW; with its moments in 8 bits; Muon for the matrices of the decoder layers beside AdamW for the rest, with
    --method full; Adafactor; or Lion."""
    learning_rate: Annotated[PositiveFloat, Alias("lr")] | None = None
    """Peak learning rate; by default 2e-4 with --method lora, 2e-5 with --method full, of Lion a tenth."""
    lora_plus_ratio: Annotated[PositiveFloat, Alias("loraplus_lr_ratio")] = 1.0
    """Learning rate of the adapters' B as a multiple of that of A (LoRA+, arXiv 2402.12354); 16 is usual there."""
    embedding_learning_rate: Annotated[PositiveFloat, Alias("embedding_lr", "loraplus_lr_embedding")] | None = None
    """Peak learning rate of the embedding, by adapter, rows or whole, and of rows or the whole of lm_head; by default
    that of the rest."""
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "wsd"],
        Alias("lr_scheduler_type", "lr_scheduler"),
        Synonyms(warmup_stable_decay="wsd"),
        Instead(constant_with_warmup="constant, which follows --warmup-ratio or --warmup-steps"),
    ] = "cosine"
    """Learning rate after the warm-up: decay to min_lr_ratio along a cosine or a line, constant, or wsd (warm-up,
    stable, decay): constant up to a last decay along a line."""
    decay_ratio: _Share = 0.1
    """Share of all steps over which --schedule wsd decays."""
    warmup_ratio: _Share = 0.03
    """Share of all steps over which the learning rate rises linearly to its peak; the first of W has peak / W."""
    warmup_steps: NonNegativeInt | None = None
    """Steps over which it rises, in place of the share."""
    min_lr_ratio: Annotated[_Share, Alias("cosine_min_lr_ratio")] = 0.0
    """Learning rate at the end, as a share of the peak."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip_norm: Annotated[NonNegativeFloat, Alias("max_grad_norm")] = 1.0
    """Gradients are scaled down to this global norm; 0 clips nothing."""
    update_in_backward: bool = False
    """Update each layer inside the backward pass, so that gradients of only one layer exist at a time."""

    def validate(self) -> None:
        """Refuse clipping by the global norm where updates precede it."""
        if self.update_in_backward and self.clip_norm:
            raise ValueError("--update-in-backward needs --clip-norm 0: the global norm is known only after it")

    @classmethod
    def settings_of(cls, name: str) -> type[Any]:
        """Return the settings of an optimizer."""
        return OPTIMIZERS[name].Settings

    @property
    def kind(self) -> "OptimizerKind":
        """Return the optimizer's entry."""
        return OPTIMIZERS[self.optimizer]

    @property
    def state_format(self) -> MomentFormat:
        """Return the storage of the optimizer's state."""
        return "float32"


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(OptimizerConfig):
    """A mean of gradients."""

    beta1: Annotated[_Decay, Alias("adam_beta1")] = 0.9
    """Decay of the first moment, the mean of gradients."""


@dataclass(frozen=True, kw_only=True)
class LionSettings(MomentumSettings):
    """Lion."""

    beta2: Annotated[_Decay, Alias("adam_beta2")] = 0.99
    """Decay of Lion's momentum."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Storage of the momentum."""

    @property
    def state_format(self) -> MomentFormat:
        """Return the storage of the momentum."""
        return self.moments


@dataclass(frozen=True, kw_only=True)
class AdamSettings(MomentumSettings):
    """Adam's moments."""

    beta2: Annotated[_Decay, Alias("adam_beta2")] = 0.999
    """Decay of the second moment, the mean of squared gradients."""
    epsilon: Annotated[NonNegativeFloat, Alias("adam_epsilon")] = 1e-8
    """Added to the root of the second moment."""


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(AdamSettings):
    """AdamW."""

    moments: MomentFormat = "float32"
    """Storage of AdamW's moments: float32; bfloat16 (first moment; the second stays in float32); or 8bit, in
    bitsandbytes' blocks of 256."""

    def validate(self) -> None:
        """Settle 8-bit AdamW."""
        super().validate()
        if self.optimizer == "adamw_8bit":
            if self.moments == "bfloat16":
                raise ValueError("--optimizer adamw_8bit and --moments bfloat16 are both given: leave one out")
            object.__setattr__(self, "optimizer", "adamw")
            object.__setattr__(self, "moments", "8bit")

    @property
    def state_format(self) -> MomentFormat:
        """Return the storage of the moments."""
        return self.moments


@dataclass(frozen=True, kw_only=True)
class MuonSettings(AdamSettings):
    """Muon, and AdamW beside it."""

    moments: Literal["float32", "bfloat16"] = "float32"
    """Storage of the first moment."""

    @property
    def state_format(self) -> MomentFormat:
        """Return the storage of the first moment."""
        return self.moments


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer, and what settings need to know of it."""

    make: "str | Callable[[Any, int, Layout], Optimizer]"
    """Called with the settings, the run's steps and the parameters' layout; or its module and name, imported late."""
    title: str
    """Its name in the plan's panel."""
    Settings: type[OptimizerConfig] = OptimizerConfig
    """Class of its settings."""
    rate_factor: float = 1.0
    """Factor on the default learning rate, which suits AdamW's updates."""
    excludes: tuple[Excludes, ...] = ()
    """Settings of a run that do not go with it, and why."""
    needs_matrices: bool = False
    """Whether the optimizer updates whole weight matrices only: neither adapters nor stacked experts."""


_ADAMW = OptimizerKind(make="jaxglue.training.adamw:AdamWOptimizer", title="AdamW", Settings=AdamWSettings)
OPTIMIZERS.add("adamw", _ADAMW)
OPTIMIZERS.add("adamw_8bit", _ADAMW)
OPTIMIZERS.add(
    "muon",
    OptimizerKind(
        make="jaxglue.training.optax_optimizer:Muon",
        title="Muon for the layers' matrices, AdamW for the rest",
        Settings=MuonSettings,
        needs_matrices=True,
    ),
)
OPTIMIZERS.add("adafactor", OptimizerKind(make="jaxglue.training.optax_optimizer:Adafactor", title="Adafactor"))
OPTIMIZERS.add(
    "lion",
    OptimizerKind(make="jaxglue.training.optax_optimizer:Lion", title="Lion", Settings=LionSettings, rate_factor=0.1),
)


def make_optimizer(config: OptimizerConfig, total_steps: int, layout: "Layout | None" = None) -> Optimizer:
    """Return the optimizer that `--optimizer` names, for parameters on one device without a layout."""
    from jaxglue.sharding.rules import SINGLE_DEVICE

    make: Any = OPTIMIZERS[config.optimizer].make
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(importlib.import_module(module), name)
    return make(config, total_steps, SINGLE_DEVICE if layout is None else layout)


def state_bytes(config: OptimizerConfig, trainable: "Params") -> float:
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


def warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the steps over which the learning rate rises."""
    return round(config.warmup_ratio * total_steps) if config.warmup_steps is None else config.warmup_steps
