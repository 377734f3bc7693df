"""A setting of all layers with their costs, from which its memory and time follow."""

from dataclasses import dataclass

from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.transfer import weights_prefetch_depth
from jaxglue.planner.traced import LayerCost


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """Policies and weights' places of all layers."""

    policies: tuple[RematPolicy, ...]
    weights: tuple[str, ...]
    costs: list[LayerCost]
    """Cost of each layer under its policy."""
    streamed: list[int]
    """Bytes of each layer's frozen weights in host memory or files."""
    mapped: list[int]
    """Bytes of those in files."""
    depth: int
    """Layers by which copies from the host are ahead."""

    @property
    def offloaded(self) -> int:
        """Return the bytes of values in host memory."""
        return sum(cost.offloaded for cost in self.costs[: -1 - self.depth])

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of host memory for layers' weights: of those from files only the ones on their way."""
        mapped = sum(self.mapped)
        ahead = weights_prefetch_depth(self.depth) + 1
        return sum(self.streamed) - mapped + min(max(self.mapped) * ahead, mapped)
