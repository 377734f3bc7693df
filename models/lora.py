"""Low-rank adapters (LoRA, arXiv 2106.09685) on the linear layers and the experts of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

from flax import nnx

from jaxglue.models.decoder import CausalLM
from jaxglue.models.layers import Linear
from jaxglue.models.moe_layers import ExpertLinear

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which linear layers get an adapter, and of what shape."""

    rank: int = 16
    """Rank R of every adapter."""
    alpha: float = 16.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = 0.0
    """Probability of dropping an input of the adapter during training."""
    rslora: bool = False
    """Scale by alpha / √rank instead (arXiv 2312.03732)."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linear layers to adapt, such as q_proj, or of the experts' gate_up_proj and down_proj; all-linear
    for every one in the decoder layers, experts included and routers left out."""

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if not self.targets:
            raise ValueError("targets is empty: name linear layers, or use all-linear")

    @property
    def scale(self) -> float:
        """The factor on the adapter's output."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def add_lora(model: CausalLM, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Adds an adapter to every targeted linear layer, or experts' projection, of the decoder layers, in place.

    Raises:
        ValueError: a target that no layer has, or dropout on experts.
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
    """The linear layers and experts of the decoder layers with their paths, in the order of the model."""
    for index, layer in enumerate(model.layers):
        for path, module in nnx.iter_modules(layer):
            if isinstance(module, Linear | ExpertLinear):
                yield ".".join(["layers", str(index), *map(str, path)]), module
