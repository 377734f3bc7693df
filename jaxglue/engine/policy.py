"""Remat policies: which values of a decoder layer are saved, offloaded or recomputed for the backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import jax

from jaxglue.engine.layer_settings import AUTO, LayerSettings
from jaxglue.ops.names import ATTENTION_LSE, ATTENTION_OUT, LAYER_INPUT, LAYER_VALUES, MERGED

_INTERMEDIATES = frozenset(LAYER_VALUES) - {LAYER_INPUT, MERGED}
"""Values that `dots` keeps: a merged weight is as large as the weight, however few tokens there are."""
_DROPPED = LAYER_INPUT, ATTENTION_OUT, ATTENTION_LSE
"""Values that may be dropped."""


def _check_values(saved: frozenset[str], offloaded: frozenset[str], dropped: frozenset[str]) -> None:
    if others := sorted(dropped - set(_DROPPED)):
        raise ValueError(f"remat drops {', '.join(others)}: only {', '.join(_DROPPED)} can be dropped")
    if twice := sorted(dropped & (saved | offloaded)):
        raise ValueError(f"remat both drops and keeps {', '.join(twice)}: choose one")
    if unknown := sorted((saved | offloaded) - set(LAYER_VALUES)):
        raise ValueError(f"remat names unknown values {', '.join(unknown)}: use {', '.join(LAYER_VALUES)}")
    if both := sorted(saved & offloaded):
        raise ValueError(f"remat both saves and offloads {', '.join(both)}: choose one")


@dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """Values of a layer kept for its backward pass: its input too, on the device or on the host, unless dropped."""

    saved: frozenset[str] | None
    """Values kept on the device beside the layer's input; None keeps all residuals."""
    offloaded: frozenset[str] = frozenset()
    """Values kept in pinned host memory."""
    dropped: frozenset[str] = frozenset()
    """The layer's input, computed again from that of an earlier layer; attention's values, kept on the device once the
    layer runs again for the input of a later one."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.saved, self.offloaded, self.dropped))

    def __hash__(self) -> int:
        """Return the hash, computed once: the planner looks costs up by policy."""
        return self._hash

    def __post_init__(self):
        _check_values(self.saved or frozenset(), self.offloaded, self.dropped)
        if self.saved is None and (inner := sorted((self.offloaded | self.dropped) - {LAYER_INPUT})):
            raise ValueError(
                f"remat none keeps unnamed values, so {', '.join(inner)} cannot be offloaded or dropped: "
                "start from dots instead"
            )

    @property
    def drops_input(self) -> bool:
        """Return whether the layer's input is computed again."""
        return LAYER_INPUT in self.dropped

    @property
    def drops_attention(self) -> bool:
        """Return whether attention's values are kept once the layer has run again."""
        return ATTENTION_OUT in self.dropped

    @property
    def offloads_input(self) -> bool:
        """Return whether the layer's input is offloaded."""
        return LAYER_INPUT in self.offloaded

    @property
    def keeps_attention(self) -> bool:
        """Return whether the policy saves or offloads attention's output."""
        return ATTENTION_OUT in (self.saved or frozenset()) | self.offloaded

    @property
    def offloads_residuals(self) -> bool:
        """Return whether values other than the layer's input are offloaded."""
        return bool(self.offloaded - {LAYER_INPUT})

    def on_device(self) -> "RematPolicy":
        """Return the policy that keeps the same values, all on the device."""
        saved = None if self.saved is None else self.saved | self.offloaded - {LAYER_INPUT}
        return replace(self, saved=saved, offloaded=frozenset())

    def restored(self) -> "RematPolicy":
        """Return the policy of a layer that runs again: dropped values are kept on the device."""
        saved = None if self.saved is None else self.saved | self.dropped - {LAYER_INPUT}
        return replace(self, saved=saved, dropped=frozenset())

    def wrap(self, layer: Callable) -> Callable:
        """Apply `jax.checkpoint` to a layer, with offloaded values saved on the device; the executor copies them."""
        if self.saved is None:
            return layer
        inner = sorted((self.saved | self.offloaded) - {LAYER_INPUT})
        policy = jax.checkpoint_policies.save_only_these_names(*inner)
        # Forward and backward are separate programs, so CSE cannot undo the recomputation.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def __str__(self) -> str:
        """Format the policy so that `parse_policy` reads it."""
        for name, preset in PRESETS.items():
            if self == preset:
                return name
        saved = self.saved or frozenset()
        base = ["none"] if self.saved is None else []
        if self.saved and self.saved | self.offloaded - {LAYER_INPUT} == _INTERMEDIATES:
            base, saved = ["dots"], frozenset()
        clauses = [("drop", self.dropped), ("offload", self.offloaded), ("save", saved)]
        return "; ".join(base + [f"{verb}:{','.join(_ordered(names))}" for verb, names in clauses if names])


PRESETS = {
    "none": RematPolicy(saved=None),
    "dots": RematPolicy(saved=_INTERMEDIATES),
    "full": RematPolicy(saved=frozenset()),
    "offload": RematPolicy(saved=frozenset(), offloaded=frozenset({LAYER_INPUT})),
}
"""`none` keeps everything, `dots` the results of matmuls and attention, `full` the layer's input only, `offload` the
same on the host."""


@lru_cache(maxsize=256)
def parse_policy(text: str) -> RematPolicy:
    """Parse a policy such as `full`, `offload:layer_input,attention_out; save:query` or `dots; offload:gate`.

    A preset (default full) comes first; `save:` keeps values on the device, `offload:` on the host. `drop:layer_input`
    keeps no input: it is computed again from the last one kept before, and `drop:attention_out,attention_lse` then
    keeps attention's values of a layer that runs again.

    Raises:
        ValueError: an unknown preset, verb or value, or a value named twice.
    """
    clauses = [clause.strip() for clause in text.split(";") if clause.strip()]
    policy = PRESETS["full"]
    if clauses and ":" not in clauses[0]:
        policy = _preset(clauses.pop(0), text)
    names = {"save": set[str](), "offload": set[str](), "drop": set[str]()}
    for clause in clauses:
        verb, _, values = clause.partition(":")
        if verb.strip() not in names:
            shown = f"{text!r:.200}: {clause!r:.200}"
            raise ValueError(f"remat {shown} must be save:NAME,…, offload:NAME,… or drop:{LAYER_INPUT}")
        names[verb.strip()] |= {value.strip() for value in values.split(",") if value.strip()}
    saved, offloaded, dropped = (frozenset(names[verb]) for verb in ("save", "offload", "drop"))
    _check_values(saved, offloaded, dropped)
    on_device = None if policy.saved is None else (policy.saved | saved) - offloaded - dropped - {LAYER_INPUT}
    return RematPolicy(saved=on_device, offloaded=(policy.offloaded | offloaded) - saved - dropped, dropped=dropped)


def parse_policies(text: str, layers: int) -> tuple[RematPolicy, ...]:
    """Parse one policy per layer: a single policy, or counts (see `layer_settings`) as in `10 x full + 26 x dots`.

    Raises:
        ValueError: an invalid policy (see `parse_policy`), or counts that do not sum to the number of layers.
    """
    return _SETTINGS.read(text, layers)


def check_remat(text: str) -> None:
    """Raise ValueError for text that is neither `auto` nor valid for `parse_policies`."""
    _SETTINGS.check(text)


def format_policies(policies: Sequence[RematPolicy]) -> str:
    """Format policies so that `parse_policies` reads them."""
    return _SETTINGS.write(policies)


def _preset(name: str, text: str) -> RematPolicy:
    if name not in PRESETS:
        presets = ", ".join([*PRESETS, AUTO])
        raise ValueError(
            f"remat policy {text!r:.200} is unknown: use one of {presets}, or name values with save:… and offload:…"
        )
    return PRESETS[name]


def _ordered(names: frozenset[str]) -> list[str]:
    return [name for name in LAYER_VALUES if name in names]


_SETTINGS = LayerSettings(flag="remat", item="POLICY", parse=parse_policy)
