"""Choice of tokens from logits: the most likely ones, or drawn ones, with their log-probabilities."""

from typing import Any

from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_one_device, check_triton
from jaxglue.ops.sampling.reference import Choice, Truncation, choose, likeliest

__all__ = ["SAMPLING", "Choice", "Truncation", "choose_tokens", "likeliest"]


def _check(capability: Capability | None, truncation: Truncation | None) -> None:
    check_triton(capability)
    check_one_device()
    if truncation is not None:
        raise NotImplementedError("XLA finds the thresholds of top-k and top-p in less time")


def _load(capability: Capability, truncation: Truncation | None) -> Any:
    from jaxglue.ops.sampling.triton import TritonSampling

    return TritonSampling.of(capability)


SAMPLING = Operation(
    name="choice of tokens",
    backends={"triton": Backend(check=_check, load=_load, advantage="logits are read once")},
)
"""Backends of `choose_tokens`; a call is described by its truncation."""


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
    kernels = SAMPLING.load(truncation)
    if kernels is None:
        return choose(logits, temperature, uniform, truncation)
    return kernels.choose(logits, temperature, uniform)
