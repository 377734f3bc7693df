"""Settings of the optimizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxglue.config import Alias, Config, Instead, NonNegativeFloat, NonNegativeInt, PositiveFloat, Range, Synonyms
from jaxglue.ops.choices import MomentFormat

RATE_FACTORS = {"lion": 0.1}
"""Factors on those of optimizers whose updates are larger than AdamW's; Muon's are scaled to them."""
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    "lion_32bit": "lion",
}
_BETA2 = {"lion": 0.99}
_Share = Annotated[float, Range(ge=0, le=1)]
_Decay = Annotated[float, Range(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """The optimizer, its learning-rate schedule and clipping."""

    optimizer: Annotated[
        Literal["adamw", "adamw_8bit", "muon", "adafactor", "lion"],
        Alias("optim"),
        Synonyms(**_OPTIMIZERS),
        Instead(sgd="adafactor, which stores as little"),
    ] = "adamw"
    """AdamW; with its moments in 8 bits; Muon for the matrices of the decoder layers beside AdamW for the rest, with
    --method full; Adafactor; or Lion."""
    learning_rate: Annotated[PositiveFloat, Alias("lr")] | None = None
    """Peak learning rate; by default 2e-4 with --method lora, 2e-5 with --method full, of Lion a tenth."""
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
    beta1: Annotated[_Decay, Alias("adam_beta1")] = 0.9
    """Decay of the first moment, the mean of gradients."""
    beta2: Annotated[_Decay, Alias("adam_beta2")] | None = None
    """Decay of the second moment, the mean of squared gradients; by default 0.999. Of Lion, decay of its momentum; by
    default 0.99."""
    epsilon: Annotated[NonNegativeFloat, Alias("adam_epsilon")] = 1e-8
    """Added to the root of the second moment."""
    clip_norm: Annotated[NonNegativeFloat, Alias("max_grad_norm")] = 1.0
    """Gradients are scaled down to this global norm; 0 clips nothing."""
    moments: MomentFormat = "float32"
    """Storage of AdamW's moments: float32; bfloat16 (first moment; the second stays in float32); or 8bit, in
    bitsandbytes' blocks of 256. Muon and Lion have one moment, in float32 or bfloat16, Adafactor none."""
    update_in_backward: bool = False
    """Update each layer inside the backward pass, so that gradients of only one layer exist at a time."""

    def validate(self) -> None:
        """Settle 8-bit AdamW; refuse unsuitable moments, and clipping by the global norm where updates precede it."""
        if self.optimizer == "adamw_8bit":
            if self.moments == "bfloat16":
                raise ValueError("--optimizer adamw_8bit and --moments bfloat16 are both given: leave one out")
            object.__setattr__(self, "optimizer", "adamw")
            object.__setattr__(self, "moments", "8bit")
        known = {"adamw": ("float32", "bfloat16", "8bit"), "adafactor": ("float32",)}
        if self.moments not in known.get(self.optimizer, ("float32", "bfloat16")):
            raise ValueError(f"--moments {self.moments} is not for --optimizer {self.optimizer}: leave it out")
        if self.update_in_backward and self.clip_norm:
            raise ValueError("--update-in-backward needs --clip-norm 0: the global norm is known only after it")

    @property
    def second_decay(self) -> float:
        """Return beta2, by default the optimizer's own."""
        return _BETA2.get(self.optimizer, 0.999) if self.beta2 is None else self.beta2


def warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the steps over which the learning rate rises."""
    return round(config.warmup_ratio * total_steps) if config.warmup_steps is None else config.warmup_steps
