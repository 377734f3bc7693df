"""AdamW updates, their moments in float32, bfloat16 or 8 bits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxglue.ops.adam.reference import AdamW, EightBit, StepScalars, is_moment
from jaxglue.ops.backend import Backend, Capability, Operation, check_triton

if TYPE_CHECKING:
    from jaxglue.ops.adam.triton import TritonAdam

__all__ = ["ADAM", "AdamCall", "AdamW", "EightBit", "StepScalars", "is_moment"]


@dataclass(frozen=True, kw_only=True)
class AdamCall:
    """Meaning of an update of many tensors."""

    adam: AdamW
    devices: int = 1
    """Devices on which a parameter lies."""


def _check(capability: Capability | None, call: AdamCall) -> None:
    check_triton(capability)
    if call.devices > 1:
        raise NotImplementedError(f"parameters must be on one device, got {call.devices}")


def _load(capability: Capability, call: AdamCall) -> "TritonAdam":
    from jaxglue.ops.adam.triton import TritonAdam

    return TritonAdam.of(capability, adam=call.adam)


ADAM = Operation(
    name="optimizer update",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="many tensors in a launch",
            reads={AdamCall: ("adam",), AdamW: ("beta1", "beta2", "epsilon", "weight_decay", "moments")},
        )
    },
)
