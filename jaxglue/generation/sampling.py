"""Choice of the next tokens on the device: penalties, temperature, top-k, top-p and min-p, and log-probabilities.

A token is drawn by one random number: the first whose cumulated probability exceeds it, found in blocks of the
vocabulary. Probabilities below a threshold are left out, and the threshold of top-k or top-p is found by search, so the
vocabulary is never sorted, and no bound on k or on the nucleus is needed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxglue.ops.sampling import Choice, Truncation, choose_tokens, likeliest
from jaxglue.ops.sampling.reference import at, divisors, normalizer

_ALL, _AGAIN = np.uint32(0xFFFFFFFF), 1 << 30
"""A word of a mask that leaves nothing out; added to the positions of tokens that are chosen again."""


class Features(NamedTuple):
    """Parts of sampling that some request of a batch uses; programs are compiled for them."""

    draws: bool = False
    """Some temperature is above 0."""
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    """Tokens are counted."""
    grammars: bool = False
    """Some tokens may not come next."""
    biases: bool = False
    """Some tokens' logits are raised or lowered."""
    top: int = 0
    """Most likely tokens that are reported."""

    @classmethod
    def union(cls, several: Iterable["Features"]) -> "Features":
        """Return what some of several use."""
        return cls(*map(max, zip(*several, strict=True)))

    def within(self, others: "Features") -> bool:
        """Return whether all parts are among others', however many likely tokens are reported."""
        return all(theirs or not own for own, theirs in zip(self[:-1], others[:-1], strict=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Controls:
    """Sampling of B sequences, as in `SamplingConfig`; unused parts are not read."""

    names: UInt32[Array, "B 3"]
    """Seed, index of the request and of the answer, which with a position decide the random number of a token."""
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    bias_tokens: Int[Array, "B n"]
    """Tokens with a bias; the vocabulary's size where there are fewer."""
    biases: Float[Array, "B n"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Counts:
    """Tokens of S sequences, for penalties."""

    seen: Bool[Array, "S V"]
    """Tokens of prompt or answer."""
    answered: Int[Array, "S V"]
    """How often the answer has each token."""


class Sampled(NamedTuple):
    """Next tokens of B sequences."""

    tokens: Int[Array, " B"]
    log_probs: Float[Array, " B"]
    """At the temperature, with penalties and biases, before unlikely tokens are left out."""
    model_log_probs: Float[Array, " B"]
    """Log-probabilities by the model alone, at temperature 1."""
    top_tokens: Int[Array, "B top"]
    top_log_probs: Float[Array, "B top"]
    """Their log-probabilities by the model alone."""
    finite: Bool[Array, " B"]
    """False where logits are infinite or NaN."""


def sample(
    logits: Float[Array, "B V"],
    controls: Controls,
    positions: Int[Array, " B"],
    counts: Counts | None,
    features: Features,
    masks: UInt32[Array, "B words"] | None = None,
) -> Sampled:
    """Choose the token at each sequence's position from float32 logits.

    Args:
        logits: of the model.
        controls: of the sequences.
        positions: of the tokens to choose; with the keys, they decide the random numbers.
        counts: of the same sequences; None without penalties.
        features: what some sequence uses.
        masks: a bit for each token, the lowest of a word first: those that may come; None for all. Sequences with some
            left out use other random numbers than without, since a token that was refused here had used those.
    """
    adjusted = _adjust(logits, controls, counts, features)
    positions = positions if masks is None else positions + jnp.where((masks != _ALL).any(-1), _AGAIN, 0)
    temperature, uniform, truncation = None, None, None
    if features.draws:
        temperature, uniform = controls.temperature, _uniform(controls.names, positions)
        truncation = _truncation(controls, features)
    if masks is None:
        choice = choose_tokens(adjusted, temperature, uniform, truncation)
    else:  # log-probabilities are those among all tokens
        choice = choose_tokens(adjusted, temperature, uniform)
        tokens = choose_tokens(_leave_out(adjusted, masks), temperature, uniform, truncation).tokens
        more = at(adjusted, tokens) - at(adjusted, choice.tokens)
        log_probs = choice.log_probs + (more if temperature is None else more / divisors(temperature))
        choice = Choice(tokens, log_probs, choice.model_log_probs + more, choice.normalizers)
    if adjusted is not logits:
        normalizers = normalizer(logits, logits.max(-1))
        model_log_probs = at(logits, choice.tokens) - normalizers
        choice = choice._replace(normalizers=normalizers, model_log_probs=model_log_probs)
    top_values, top_tokens = likeliest(logits, features.top)
    return Sampled(
        tokens=choice.tokens,
        log_probs=choice.log_probs,
        model_log_probs=choice.model_log_probs,
        top_tokens=top_tokens,
        top_log_probs=top_values - choice.normalizers[:, None],
        finite=jnp.isfinite(choice.normalizers),
    )


def with_trained(sampled: Sampled, log_probs: Float[Array, " B"], controls: Controls, features: Features) -> Sampled:
    """Return a sample with log-probabilities of its tokens by the model alone, at temperature 1, as training has them.

    They are those of sampling, too, of sequences that change no logits.
    """
    if features.penalties or features.biases:
        return sampled._replace(model_log_probs=log_probs)
    plain = divisors(controls.temperature) == 1 if features.draws else jnp.ones(len(log_probs), bool)
    return sampled._replace(model_log_probs=log_probs, log_probs=jnp.where(plain, log_probs, sampled.log_probs))


def _uniform(names: UInt32[Array, "B 3"], positions: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return a random number for each sequence's position."""

    def draw(name: UInt32[Array, "3"], position: Int[Array, ""]) -> Float[Array, ""]:
        key = jax.random.key(name[0])
        for number in (name[1], name[2], position):
            key = jax.random.fold_in(key, number)
        return jax.random.uniform(key)

    return jax.vmap(draw)(names, positions)


def _truncation(controls: Controls, features: Features) -> Truncation | None:
    """Return what leaves tokens out, if something does."""
    used = {name: getattr(controls, name) for name in Truncation._fields if getattr(features, name)}
    return Truncation(**used) if used else None


def _adjust(logits, controls: Controls, counts: Counts | None, features: Features) -> Float[Array, "B V"]:
    """Return logits with penalties (of repetition as in CTRL, arXiv 1909.05858; the others as OpenAI's) and biases."""
    if features.penalties:
        assert counts is not None
        factor = jnp.where(counts.seen, controls.repetition[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        answered = counts.answered.astype(jnp.float32)
        logits -= controls.frequency[:, None] * answered + controls.presence[:, None] * (answered > 0)
    if features.biases:
        rows = jnp.arange(len(logits))[:, None]
        logits = logits.at[rows, controls.bias_tokens].add(controls.biases, mode="drop")
    return logits


def _leave_out(logits: Float[Array, "B V"], masks: UInt32[Array, "B words"]) -> Float[Array, "B V"]:
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(len(logits), -1)[:, : logits.shape[1]] > 0, logits, -jnp.inf)
