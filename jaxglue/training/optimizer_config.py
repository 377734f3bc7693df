"""Settings of the optimizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxglue.config import Alias, Config, Instead, NonNegativeFloat, NonNegativeInt, PositiveFloat, Range
from jaxglue.ops.choices import MomentFormat

LEARNING_RATES = {"lora": 2e-4, "full": 2e-5}
"""Peak learning rates by training method."""
PREFERENCE_RATES = {"lora": 5e-6, "full": 5e-7}
"""Those of objectives that compare answers, as in TRL's and Zephyr's recipes."""
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "float32"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "8bit"),
}
_Share = Annotated[float, Range(ge=0, le=1)]
_Decay = Annotated[float, Range(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """AdamW, its learning-rate schedule and clipping."""

    learning_rate: Annotated[PositiveFloat, Alias("lr")] | None = None
    """Peak learning rate; by default 2e-4 with --method lora, 2e-5 with --method full."""
    schedule: Annotated[
        Literal["cosine", "linear", "constant"],
        Alias("lr_scheduler_type", "lr_scheduler"),
        Instead(constant_with_warmup="constant, which follows --warmup-ratio or --warmup-steps"),
    ] = "cosine"
    """Learning rate after the warm-up: decay to min_lr_ratio along a cosine or a line, or constant."""
    warmup_ratio: _Share = 0.03
    """Share of all steps over which the learning rate rises linearly to its peak; the first of W has peak / W."""
    warmup_steps: NonNegativeInt | None = None
    """Steps over which it rises, in place of the share."""
    min_lr_ratio: Annotated[_Share, Alias("cosine_min_lr_ratio")] = 0.0
    """Learning rate at the end, as a share of the peak."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Annotated[_Decay, Alias("adam_beta1")] = 0.9
    """Decay of the first moment, the mean of gradients."""
    beta2: Annotated[_Decay, Alias("adam_beta2")] = 0.999
    """Decay of the second moment, the mean of squared gradients."""
    epsilon: Annotated[NonNegativeFloat, Alias("adam_epsilon")] = 1e-8
    """Added to the root of the second moment."""
    clip_norm: Annotated[NonNegativeFloat, Alias("max_grad_norm")] = 1.0
    """Gradients are scaled down to this global norm; 0 clips nothing."""
    moments: Annotated[MomentFormat, Alias("optim", "optimizer", values=_OPTIMIZERS)] = "float32"
    """Storage of AdamW's moments: float32; bfloat16 (first moment; the second stays in float32); or 8bit, in
    bitsandbytes' blocks of 256."""
    update_in_backward: bool = False
    """Update each layer inside the backward pass, so that gradients of only one layer exist at a time."""

    def validate(self) -> None:
        """Refuse clipping by the global norm where updates precede it."""
        if self.update_in_backward and self.clip_norm:
            raise ValueError("--update-in-backward needs --clip-norm 0: the global norm is known only after it")


def warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the steps over which the learning rate rises."""
    return round(config.warmup_ratio * total_steps) if config.warmup_steps is None else config.warmup_steps
