"""Values of a layer between its forward and its backward pass, on the device or on the host."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxglue.engine import transfer
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.residuals import Residuals


class SavedLayer(NamedTuple):
    """Values of a layer's backward pass."""

    x: Float[Array, "B T D"]
    residuals: Residuals


def offload(policy: RematPolicy, x: Float[Array, "B T D"], residuals: Residuals) -> SavedLayer:
    """Start the copies of a layer's values to the host, as its policy has them."""
    if not policy.offloaded:
        return SavedLayer(x, residuals)
    sent = x if policy.offloads_input else None
    sent, offloaded = transfer.to_host((sent, residuals.offloaded))
    return SavedLayer(x if sent is None else sent, residuals.with_offloaded(offloaded))
