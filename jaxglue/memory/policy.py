"""Which values of a decoder layer are kept for the backward pass; the rest is computed again."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxglue.memory import names

_DOTS = (
    names.QUERY,
    names.KEY,
    names.VALUE,
    names.ATTENTION_OUT,
    names.ATTENTION_LSE,
    names.ATTENTION_RESIDUAL,
    names.GATE,
    names.UP,
)


@dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """What a layer keeps beside its input."""

    name: str
    saved: frozenset[str] | None
    """Names kept on the device; None keeps whatever differentiation asks for."""

    def wrap(self, layer: Callable) -> Callable:
        """The layer under `jax.checkpoint` with this policy."""
        if self.saved is None:
            return layer
        policy = jax.checkpoint_policies.save_only_these_names(*sorted(self.saved))
        # A layer is differentiated inside one jit of its own: there is no forward pass to merge the recomputation with.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)


PRESETS = {
    "none": RematPolicy(name="none", saved=None),
    "dots": RematPolicy(name="dots", saved=frozenset(_DOTS)),
    "full": RematPolicy(name="full", saved=frozenset()),
}
"""none keeps everything, dots the results of matmuls and attention, full only the layer's input."""


def parse_policy(text: str) -> RematPolicy:
    """The policy of this name.

    Raises:
        ValueError: an unknown name.
    """
    if text not in PRESETS:
        raise ValueError(f"remat policy {text!r} is unknown: use one of {', '.join(PRESETS)}")
    return PRESETS[text]
