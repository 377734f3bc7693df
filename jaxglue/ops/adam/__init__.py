"""AdamW updates, their moments in float32, bfloat16 or 8 bits."""

from typing import Any

from jaxglue.ops.adam.reference import AdamW, EightBit, StepScalars, is_moment
from jaxglue.ops.backend import Backend, Capability, Operation, check_triton

__all__ = ["ADAM", "AdamW", "EightBit", "StepScalars", "is_moment"]


def _check(capability: Capability | None, adam: AdamW, devices: int) -> None:
    check_triton(capability)
    if devices > 1:
        raise NotImplementedError(f"parameters must be on one device, got {devices}")


def _load(capability: Capability, adam: AdamW, devices: int) -> Any:
    from jaxglue.ops.adam.triton import TritonAdam

    return TritonAdam.of(capability, adam=adam)


ADAM = Operation(
    name="optimizer update",
    backends={"triton": Backend(check=_check, load=_load, advantage="many tensors in a launch")},
)
