"""Losses of the `tinker` SDK by their names, as functions of tokens' log-probabilities."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.api.session import Loss, TokenDocument


class TokenLoss(NamedTuple):
    """A loss of tokens, whose sum is differentiated."""

    function: Loss
    columns: tuple[str, ...]
    """Arrays of a request that it reads."""


def find_loss(name: str, config: Mapping[str, float]) -> TokenLoss:
    """Return one of Tinker's losses; equal ones are one object, so that its programs are compiled once.

    Raises:
        ValueError: another name, or a setting that is not the loss's.
    """
    key = name, tuple(sorted(config.items()))
    if key not in _LOSSES:
        if name not in _MAKERS:
            raise ValueError(f"loss_fn: expected {', '.join(_MAKERS)}, got {name!r:.100}")
        make, columns, defaults = _MAKERS[name]
        if unknown := sorted(config.keys() - defaults.keys()):
            raise ValueError(f"loss_fn_config: {', '.join(unknown)} is not for {name}")
        _LOSSES[key] = TokenLoss(make(**{**defaults, **config}), columns)
    return _LOSSES[key]


_LOSSES: dict[Any, TokenLoss] = {}


def _cross_entropy() -> Loss:
    return lambda log_probs, columns: -columns["weights"] * log_probs


def _importance_sampling() -> Loss:
    return lambda log_probs, columns: -jnp.exp(log_probs - columns["logprobs"]) * columns["advantages"]


def _ppo(clip_low_threshold: float, clip_high_threshold: float) -> Loss:
    def loss(log_probs: Any, columns: Mapping[str, Any]) -> Any:
        ratio = jnp.exp(log_probs - columns["logprobs"])
        clipped = jnp.clip(ratio, clip_low_threshold, clip_high_threshold)
        return -jnp.minimum(ratio * columns["advantages"], clipped * columns["advantages"])

    return loss


def _cispo(clip_low_threshold: float, clip_high_threshold: float) -> Loss:
    def loss(log_probs: Any, columns: Mapping[str, Any]) -> Any:
        ratio = jnp.exp(log_probs - columns["logprobs"])
        clipped = jax.lax.stop_gradient(jnp.clip(ratio, clip_low_threshold, clip_high_threshold))
        return -clipped * log_probs * columns["advantages"]

    return loss


def _dro(beta: float) -> Loss:
    def loss(log_probs: Any, columns: Mapping[str, Any]) -> Any:
        return 0.5 * beta * (log_probs - columns["logprobs"]) ** 2 - log_probs * columns["advantages"]

    return loss


_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_RATIO = ("logprobs", "advantages")
_MAKERS: dict[str, tuple[Callable[..., Loss], tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (_cross_entropy, ("weights",), {}),
    "importance_sampling": (_importance_sampling, _RATIO, {}),
    "ppo": (_ppo, _RATIO, _CLIPS),
    "cispo": (_cispo, _RATIO, _CLIPS),
    "dro": (_dro, _RATIO, {"beta": 0.05}),
}
"""Losses of tokens by Tinker's names, which are summed: makers, arrays that they read, settings."""


def read_document(tokens: np.ndarray, inputs: Mapping[str, np.ndarray], columns: tuple[str, ...]) -> TokenDocument:
    """Return a document with the arrays that a loss reads; weights are 1 where none are given.

    Raises:
        ValueError: an array that is missing, or of another length than the tokens.
    """
    given = dict(inputs)
    targets = given.pop("target_tokens", None)
    if "weights" in columns:
        given.setdefault("weights", np.ones(len(tokens), np.float32))
    if targets is None or not given.keys() >= set(columns):
        raise ValueError(f"loss_fn_inputs: expected target_tokens, {', '.join(columns)}, got {', '.join(inputs)}")
    own = {name: given[name].astype(np.float32) for name in columns}
    if "weights" in given and "weights" not in columns and "advantages" in own:
        own["advantages"] = own["advantages"] * given["weights"].astype(np.float32)
    if any(values.shape != tokens.shape for values in (targets, *own.values())):
        raise ValueError(f"loss_fn_inputs: expected arrays of the {len(tokens)} tokens of model_input")
    return TokenDocument(tokens, targets, own)
