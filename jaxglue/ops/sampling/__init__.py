"""Choice of tokens from logits: the most likely ones, or drawn ones, with their log-probabilities."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_one_device, check_triton
from jaxglue.ops.sampling.reference import Choice, Truncation, choose, likeliest

if TYPE_CHECKING:
    from jaxglue.ops.sampling.triton import TritonSampling

__all__ = ["SAMPLING", "Choice", "SamplingCall", "Truncation", "choose_tokens", "likeliest"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingCall:
    """Meaning of a choice of tokens."""

    truncation: Truncation | None = None


def _check(capability: Capability | None, call: SamplingCall) -> None:
    check_triton(capability)
    check_one_device()
    if call.truncation is not None:
        raise NotImplementedError("XLA finds the thresholds of top-k and top-p in less time")


def _load(capability: Capability, call: SamplingCall) -> "TritonSampling":
    from jaxglue.ops.sampling.triton import TritonSampling

    return TritonSampling.of(capability)


SAMPLING = Operation(
    name="choice of tokens",
    backends={"triton": Backend(check=_check, load=_load, advantage="logits are read once", reads={SamplingCall: ()})},
)
"""Backends of `choose_tokens`."""


def choose_tokens(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"] | None,
    uniform: Float[Array, " B"] | None,
    truncation: Truncation | None = None,
) -> Choice:
    """Choose a token from each row of float32 logits.

    Args:
        logits: of the tokens.
        temperature: divides the logits of tokens that are drawn; 0 takes the most likely one, as None does in all rows.
        uniform: numbers in [0, 1); the token drawn is the first one up to which the probabilities exceed them.
        truncation: leaves tokens out before the draw; log-probabilities stay those among all.
    """
    kernels = SAMPLING.load(SamplingCall(truncation=truncation))
    if kernels is None:
        return choose(logits, temperature, uniform, truncation)
    return kernels.choose(logits, temperature, uniform)
