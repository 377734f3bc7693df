"""Drafts: tokens that a head proposes, which the model verifies together in one step.

A draft is the head's most likely token, and each token of an answer is still the model's own choice, by the random
number of its position: a draft is accepted where it is that choice. So answers are those without drafts, whatever
decides a token (temperature, top-p, penalties, biases), and a draft x is accepted with the probability p(x) of it.

At token t the head reads the model's normed state of t and the embedding of token t + 1 (see `models/draft.py`). A
sequence's `DraftSlots` are what the head has not read yet: the tokens of its last step with their states.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxglue.engine.compiler import jit_step
from jaxglue.generation.contexts import Cache, Cursor, Places, PrefillContext, VerifyContext
from jaxglue.generation.pages import PAGE
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.draft import DraftHead
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.ops.cross_entropy import cap_logits
from jaxglue.ops.projection import project
from jaxglue.ops.zeros import zeros_on

Trees = tuple[Params, ...]
HEAD = "draft"
"""Key of the head's weights in the trees of the model's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DraftSlots:
    """The last step's rows of S sequences, R = drafts + 1 each."""

    hidden: Float[Array, "S R D"]
    """The model's states after its final norm."""
    tokens: Int[Array, "S R"]
    """The token after each."""
    count: Int[Array, " S"]
    """Rows that count, the first ones; the last of them has the sequence's last token."""


@dataclass(frozen=True)
class Drafting:
    """A head, and how many tokens it drafts."""

    graphdef: nnx.GraphDef
    count: int

    @property
    def rows(self) -> int:
        """Return the tokens that the model verifies in a step."""
        return self.count + 1


def why_no_drafts(config: DecoderConfig) -> str | None:
    """Return why the engine does not verify drafts of a model, in words; None where it does."""
    for kind in config.layer_kinds:
        if kind.window is not None:
            return "layers with windows"
        if not kind.mixer.extends and not kind.mixer.verifies:
            return kind.mixer.title
    return None


def cached_config(config: DecoderConfig) -> DecoderConfig:
    """Return the architecture with a further layer in the cache, of the head's kind."""
    layers = range(config.num_hidden_layers)
    return config.with_layers([*layers, max(i for i in layers if not config.layer_kinds[i].mixer.recurrent)])


def make_draft_slots(slots: int, rows: int, width: int, dtype: Any, device: Any = None) -> DraftSlots:
    """Return the rows of slots without sequences."""
    return DraftSlots(
        hidden=zeros_on(device, (slots, rows, width), dtype),
        tokens=zeros_on(device, (slots, rows), jnp.int32),
        count=zeros_on(device, slots, jnp.int32),
    )


class DraftPrograms:
    """The programs of a head; arguments as in `EnginePrograms`, weights as trees of the whole model."""

    def __init__(self, drafting: Drafting, graphdefs: ModelGraphDefs, config: DecoderConfig, dtype: Any):
        self.count, self._head = drafting.count, drafting.graphdef
        self._graphdefs, self._config, self._dtype = graphdefs, config, dtype
        self.prefill = jit_step(self._prefill, donate_argnames="cache")

    def weights(self, trees: Trees) -> dict[str, Trees]:
        """Return the weights that drafts are made of."""
        return {name: tuple(tree[name] for tree in trees) for name in (HEAD, *self._names)}

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple({"embed_tokens": None, "norm": None, self._graphdefs.output_name: None})

    def _prefill(
        self,
        weights: dict[str, Trees],
        x: Float[Array, "1 T D"],
        tokens: Int[Array, "1 T"],
        cache: Cache,
        packed: PackedContext,
        places: Places,
    ) -> tuple[Float[Array, "S D"], Cache]:
        """Write the head's keys and values of packed prompts; return the model's state of each one's last token."""
        hidden, context = self.norm(weights, x), PrefillContext(packed, cache, places)
        # A prompt's last token has no next one yet: the first step writes its place again.
        self._apply(weights, jnp.roll(tokens, -1, axis=1), hidden, context)
        last = jnp.maximum(packed.segments.cu_seqlens[0, 1:] - 1, 0)
        return hidden[0, last], context.cache

    def propose(
        self, weights: dict[str, Trees], slots: DraftSlots, last: Int[Array, " B"], place: Any, cache: Cache
    ) -> tuple[Int[Array, "B drafts"], Cache]:
        """Return drafts of each sequence's next tokens.

        Args:
            weights: of `weights`.
            slots: of the sequences.
            last: position of their last token.
            place: returns the cursor of rows of positions [B, n].
            cache: of the head.
        """
        B, R = slots.tokens.shape
        first = last - slots.count
        cursor = place(jnp.maximum(first[:, None] + jnp.arange(R), 0))
        context = VerifyContext(cache, cursor)
        states = self._apply(weights, slots.tokens.reshape(1, -1), slots.hidden.reshape(1, B * R, -1), context)
        rows = jnp.arange(B), jnp.maximum(slots.count - 1, 0)
        state, drafts = states.reshape(B, R, -1)[rows], list[Array]()
        for index in range(self.count):
            drafts.append(jnp.argmax(self.logits(weights, state), axis=-1).astype(jnp.int32))
            if index + 1 < self.count:
                context = VerifyContext(context.cache, place(last[:, None] + index))
                state = self._apply(weights, drafts[-1][None], state[None], context)[0]
        return jnp.stack(drafts, axis=1), context.cache

    def norm(self, weights: dict[str, Trees], x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return the model's final norm."""
        return merge_module(self._graphdefs.norm, *weights["norm"])(x)

    def logits(self, weights: dict[str, Trees], states: Float[Array, "M D"]) -> Float[Array, "M V"]:
        """Return the output projection's float32 logits."""
        output = merge_module(self._graphdefs.output, *weights[self._graphdefs.output_name])
        logits = project(with_low_rank(output, states), extended_matrix(output), jnp.float32)
        return cap_logits(logits, self._config.scales.logit_softcap)

    def _apply(self, weights: dict[str, Trees], tokens: Int[Array, "1 T"], hidden: Array, context: Any) -> Array:
        embed = merge_module(self._graphdefs.embed_tokens, *weights["embed_tokens"])
        head: DraftHead = merge_module(self._head, *weights[HEAD])
        return head(embed(tokens, self._dtype), hidden, context)


def rows_cursor(
    positions: Int[Array, "B R"],
    live: Bool[Array, " B"],
    tables: Int[Array, "B P"],
    slots: Int[Array, " B"],
    ranks: Bool[Array, "B ranks"] | None,
    last: Int[Array, " B"],
    states: int,
    rope: Any,
) -> Cursor:
    """Return the cursor of R tokens of each sequence; those beyond its table are nobody's.

    Args:
        positions: of the tokens.
        live: sequences that go on.
        tables: their numbered pages.
        slots: their slots.
        ranks: as in `DecodeWindow`.
        last: states of recurrent layers from which each begins, by row of the step before.
        states: slots of each row.
        rope: returns the rotary tables of positions [1, B·R].
    """
    R, flat, most = positions.shape[1], positions.reshape(-1), tables.shape[1] * PAGE
    within, flat = flat < most, jnp.minimum(flat, most - 1)
    rows = jnp.repeat(jnp.where(live[:, None], tables, 0), R, axis=0)
    pages = jnp.where(within, rows[jnp.arange(len(flat)), flat // PAGE], 0)
    ranks = None if ranks is None else jnp.repeat(ranks, R, axis=0)
    places = Places(pages=(pages,), offsets=flat % PAGE, slots=slots, windows=(None,), ranks=ranks)
    begins = slots + jnp.maximum(last, 0) * states
    return Cursor(
        places=places,
        tables=(rows,),
        slots=slots,
        positions=flat,
        rope=rope(flat[None]),
        begins=begins,
        states=states,
    )


def with_prompts(slots: DraftSlots, index: Int[Array, " n"], hidden: Float[Array, "n D"]) -> DraftSlots:
    """Return the rows after prompts whose last tokens have these states in these slots."""
    return replace(slots, hidden=slots.hidden.at[index, 0].set(hidden.astype(slots.hidden.dtype)))


def as_begun(slots: DraftSlots, fresh: Bool[Array, " B"], tokens: Int[Array, " B"]) -> DraftSlots:
    """Return the rows of sequences of which those that are fresh have the row of their prompt alone."""
    first = jnp.where(fresh, tokens, slots.tokens[:, 0])
    count = jnp.where(fresh, 1, slots.count)
    return replace(slots, tokens=slots.tokens.at[:, 0].set(first), count=count)


def accepted(tokens: Int[np.ndarray, "steps B"], rows: int, idle: int) -> tuple[int, int]:
    """Return the drafts that were made in steps of so many rows, and how many were accepted."""
    steps = (tokens.reshape(-1, rows, tokens.shape[1]) != idle).sum(1)
    return int((steps > 0).sum()) * (rows - 1), int(np.maximum(steps - 1, 0).sum())
