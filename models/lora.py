"""Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers and experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from flax import nnx

from jaxglue.config import Alias, Config, PositiveInt, Range
from jaxglue.models.decoder import CausalLM
from jaxglue.models.layers import Linear
from jaxglue.models.moe_layers import ExpertLinear

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Targets, rank and scale of the adapters."""

    rank: Annotated[PositiveInt, Alias("lora_r", "lora_rank", "r")] = 16
    """Rank R of each adapter."""
    alpha: Annotated[float, Alias("lora_alpha")] = 16.0
    """Scale adapter outputs by alpha / rank."""
    dropout: Annotated[float, Range(ge=0, lt=1), Alias("lora_dropout")] = 0.0
    """Dropout probability on adapter inputs during training."""
    rslora: Annotated[bool, Alias("use_rslora", "lora_use_rslora", "peft_use_rslora")] = False
    """Scale by alpha / √rank instead (rsLoRA, arXiv 2312.03732)."""
    targets: Annotated[
        tuple[str, ...],
        Alias("target_modules", "lora_target_modules", "lora_target"),
        Alias("lora_target_linear", values={True: (ALL_LINEAR,)}),
    ] = (ALL_LINEAR,)
    """Linear layers to adapt, such as q_proj, or the experts' gate_up_proj and down_proj; all-linear selects every one
    in the decoder layers, including experts, excluding routers."""

    def validate(self) -> None:
        """Refuse adapters on nothing."""
        if not self.targets:
            raise ValueError("targets is empty: name linear layers, or use all-linear")

    @property
    def scale(self) -> float:
        """Return the factor on the adapter's output."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def add_lora(model: CausalLM, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Add an adapter in place to every targeted linear layer and expert projection of the decoder layers.

    Raises:
        ValueError: an unknown target, or dropout on experts.
    """
    linears = list(_linears(model))
    known = {name.rsplit(".", 1)[-1] for name, _ in linears}
    targets = known if ALL_LINEAR in config.targets else set(config.targets)
    if unknown := sorted(targets - known):
        raise ValueError(
            f"LoRA targets {', '.join(unknown)} do not exist in this model: use {', '.join(sorted(known))}"
        )
    for name, linear in linears:
        kind = name.rsplit(".", 1)[-1]
        if kind in targets:
            linear.add_lora(rank=config.rank, scale=config.scale, dropout=config.dropout, name=kind, rngs=rngs)


def _linears(model: CausalLM) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Yield (path, module) of the decoder layers' linear layers and experts, in model order."""
    for index, layer in enumerate(model.layers):
        for path, module in nnx.iter_modules(layer):
            if isinstance(module, Linear | ExpertLinear):
                yield ".".join(["layers", str(index), *map(str, path)]), module
