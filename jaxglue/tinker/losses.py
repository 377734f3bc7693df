"""Losses of the `tinker` SDK by their names, as functions of tokens' log-probabilities."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from jaxglue.api.documents import TokenDocument
from jaxglue.api.losses import Loss
from jaxglue.data.images import ImageRules
from jaxglue.objectives.policy_gradient import clipped_losses, weighted_log_probs
from jaxglue.objectives.rollouts import Tokens
from jaxglue.tinker.images import with_places
from jaxglue.tinker.wire import Datum

TokenColumns = Mapping[str, Tokens]
"""Each token's log-probability under the weights that sampled it, `logprobs`, its advantage or its weight."""


class TokenLoss(NamedTuple):
    """A loss of tokens, whose sum is differentiated."""

    function: Loss
    columns: tuple[str, ...]
    """Arrays of a request that it reads."""
    derive: Callable[[TokenDocument, np.ndarray], TokenDocument] | None = None
    """Returns a document with further columns, from its targets' log-probabilities under the present weights."""


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
        _LOSSES[key] = TokenLoss(make(**{**defaults, **config}), columns, _DERIVED.get(name))
    return _LOSSES[key]


_LOSSES: dict[tuple[str, tuple[tuple[str, float], ...]], TokenLoss] = {}


def _cross_entropy() -> Loss:
    return lambda log_probs, columns: -columns["weights"] * log_probs


def _importance_sampling() -> Loss:
    return lambda log_probs, columns: -_ratio(log_probs, columns) * columns["advantages"]


def _ppo(clip_low_threshold: float, clip_high_threshold: float) -> Loss:
    bounds = clip_low_threshold, clip_high_threshold
    return lambda log_probs, columns: clipped_losses(_ratio(log_probs, columns), columns["advantages"], *bounds)


def _cispo(clip_low_threshold: float, clip_high_threshold: float) -> Loss:
    def loss(log_probs: Tokens, columns: TokenColumns) -> Tokens:
        weights = jnp.clip(_ratio(log_probs, columns), clip_low_threshold, clip_high_threshold)
        return weighted_log_probs(weights, columns["advantages"], log_probs)

    return loss


def _gspo(clip_low_threshold: float, clip_high_threshold: float) -> Loss:
    def loss(log_probs: Tokens, columns: TokenColumns) -> Tokens:
        ratio = jnp.exp(columns[_SEQUENCE] + log_probs - stop_gradient(log_probs))
        return clipped_losses(ratio, columns["advantages"], clip_low_threshold, clip_high_threshold)

    return loss


def _with_sequence_ratio(document: TokenDocument, log_probs: np.ndarray) -> TokenDocument:
    """Return a document with the mean of its log-ratios, over the tokens that its mask marks, at each token."""
    columns = document.columns
    counted = columns["sequence_ratio_mask"] != 0
    differences = (log_probs - columns["logprobs"])[counted]
    value = differences.mean() if len(differences) else 0.0
    return document._replace(columns={**columns, _SEQUENCE: np.full(len(log_probs), value, np.float32)})


def _dro(beta: float) -> Loss:
    def loss(log_probs: Tokens, columns: TokenColumns) -> Tokens:
        return 0.5 * beta * (log_probs - columns["logprobs"]) ** 2 - log_probs * columns["advantages"]

    return loss


def _ratio(log_probs: Tokens, columns: TokenColumns) -> Tokens:
    return jnp.exp(log_probs - columns["logprobs"])


_SEQUENCE = "sequence_log_ratio"
_DERIVED = {"gspo": _with_sequence_ratio}
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_RATIO = ("logprobs", "advantages")
_MAKERS: dict[str, tuple[Callable[..., Loss], tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (_cross_entropy, ("weights",), {}),
    "importance_sampling": (_importance_sampling, _RATIO, {}),
    "ppo": (_ppo, _RATIO, _CLIPS),
    "cispo": (_cispo, _RATIO, _CLIPS),
    "gspo": (_gspo, (*_RATIO, "sequence_ratio_mask"), _CLIPS),
    "dro": (_dro, _RATIO, {"beta": 0.05}),
}
"""Losses of tokens by Tinker's names, which are summed: makers, arrays that they read, settings."""


def read_document(datum: Datum, rules: ImageRules | None, columns: tuple[str, ...]) -> TokenDocument:
    """Return a document with the arrays that a loss reads; weights and masks are 1 where none are given.

    Args:
        datum: of a request.
        rules: of the model's images; None for a model that sees none.
        columns: arrays that the loss reads.

    Raises:
        ValueError: an array that is missing, or of another length than the tokens; or as `with_places`.
    """
    (tokens, images), inputs = with_places(datum.chunks, rules), datum.inputs
    arrays: dict[str, np.ndarray] = dict(inputs)
    for name in {"weights", "sequence_ratio_mask"} & {*columns}:
        arrays.setdefault(name, np.ones(len(tokens), np.float32))
    targets = arrays.pop("target_tokens", None)
    if targets is None or not arrays.keys() >= set(columns):
        raise ValueError(f"loss_fn_inputs: expected target_tokens, {', '.join(columns)}, got {', '.join(inputs)}")
    values = {name: arrays[name].astype(np.float32) for name in columns}
    if "weights" in arrays and "weights" not in columns and "advantages" in values:
        values["advantages"] = values["advantages"] * arrays["weights"].astype(np.float32)
    if any(array.shape != tokens.shape for array in (targets, *values.values())):
        raise ValueError(f"loss_fn_inputs: expected arrays of the {len(tokens)} tokens of model_input")
    return TokenDocument(tokens, targets, values, images=images)
