"""Drafts: tokens that a head proposes, which the model verifies together in one step.

A draft is the head's most likely token, and each token of an answer is still the model's own choice, by the random
number of its position: a draft is accepted where it is that choice. So answers are those without drafts, whatever
decides a token (temperature, top-p, penalties, biases), and a draft x is accepted with the probability p(x) of it.

At token t the head reads the model's normed state of t and the embedding of token t + 1 (see `models/draft.py`). A
sequence's `DraftSlots` are what the head has not read yet: the tokens of its last step with their states.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxglue.engine.compiler import jit_step
from jaxglue.generation.config import Drafts
from jaxglue.generation.contexts import Cache, Cursor, ExtendContext, Places, PrefillContext, VerifyContext
from jaxglue.generation.pages import PAGE
from jaxglue.hf.draft import load_draft, read_draft_tokens
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.draft import DRAFTS, DraftHead
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.ops.backend import check_tried
from jaxglue.ops.cross_entropy import cap_logits
from jaxglue.ops.paged_attention import LatentPages
from jaxglue.ops.projection import project
from jaxglue.ops.rope import RopeTables
from jaxglue.ops.zeros import zeros_on

Trees = tuple[Params, ...]
Ranks = Bool[Array, "M ranks"] | None
_log = logging.getLogger(__name__)
HEAD, WORDS = "draft", "draft_words"
"""Keys of the head's weights in the trees of the model's, and of rows of the output projection that drafts read."""


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
    kept: Int[Array, " S"]
    """Tokens of the last step that recurrent layers have not applied to their states."""

    def of_rows(self, rows: int) -> "DraftSlots":
        """Return the last rows that count, at most so many, or all with room for so many."""
        R = self.tokens.shape[1]
        if rows >= R:
            more = (0, 0), (0, rows - R)
            return replace(self, hidden=jnp.pad(self.hidden, (*more, (0, 0))), tokens=jnp.pad(self.tokens, more))
        index = jnp.maximum(self.count - rows, 0)[:, None] + jnp.arange(rows)
        return replace(
            self,
            hidden=jnp.take_along_axis(self.hidden, index[..., None], axis=1),
            tokens=jnp.take_along_axis(self.tokens, index, axis=1),
            count=jnp.minimum(self.count, rows),
        )


@dataclass(frozen=True)
class Drafting:
    """A head, and how many tokens it drafts."""

    graphdef: nnx.GraphDef
    most: int
    """Tokens that it drafts for a step, at most."""
    auto: bool = False
    """A `DraftRule` decides how many for each window; otherwise they are always the most."""

    @property
    def rows(self) -> int:
        """Return the tokens that the model verifies in a step, at most."""
        return self.most + 1


AUTO_DRAFTS = 3
"""Tokens that `auto` drafts for a step at most: further ones are accepted by rare texts alone."""


class LoadedHead(NamedTuple):
    """A draft head with its weights."""

    drafting: Drafting
    weights: dict[str, Params]
    """By their keys in the trees of the model's."""

    def beside(self, trees: tuple[Params, ...]) -> tuple[Params, Params]:
        """Return trainable and frozen parameters of the model with the head's, which are frozen."""
        trainable, frozen = trees
        return {**trainable, **{key: {} for key in self.weights}}, {**frozen, **self.weights}


def make_drafting(graphdef: nnx.GraphDef, drafts: Drafts) -> Drafting:
    """Return a head with its number of drafts, which is not `off`."""
    return Drafting(graphdef, AUTO_DRAFTS, auto=True) if drafts == "auto" else Drafting(graphdef, int(drafts))


def words_of(graphdefs: ModelGraphDefs, trees: Trees, tokens: list[int]) -> Params:
    """Return the rows of a model's output projection that are of these tokens, and the tokens."""
    output = merge_module(graphdefs.output, *(tree[graphdefs.output_name] for tree in trees))
    ids = jnp.asarray(tokens, jnp.int32)
    return {"matrix": jnp.take(extended_matrix(output), ids, axis=0), "tokens": ids}


def load_head(
    drafts: Drafts,
    folder: str | Path,
    config: DecoderConfig,
    graphdefs: ModelGraphDefs,
    trees: Trees,
    *,
    dtype: Any,
    adapter: Path | None = None,
) -> LoadedHead | None:
    """Load a folder's draft head, or the one trained beside an adapter, if drafts are asked for; else return None.

    `auto` takes those that are there, on accelerators: on CPUs the time of a step grows with its tokens.

    Raises:
        ValueError: an asked number of drafts without a head that the engine can use.
    """
    if drafts == "off" or (drafts == "auto" and (jax.default_backend() == "cpu" or config.model_type not in DRAFTS)):
        return None
    try:
        if drafts == "auto":
            check_tried("steps of drafts")
        if reason := why_no_drafts(config):
            raise ValueError(f"the model has {reason}")
        head = load_draft(folder, config, dtype=dtype, adapter=adapter)
        tokens = read_draft_tokens(folder, adapter, config.vocab_size)
    except (ValueError, NotImplementedError) as error:
        if drafts != "auto":
            raise ValueError(f"--drafts {drafts}: {error}") from error
        _log.info("drafts: none, since %s", error)
        return None
    graphdef, state = nnx.split(head)
    weights = {HEAD: nnx.to_pure_dict(state)}
    if tokens is not None:
        weights[WORDS] = words_of(graphdefs, trees, tokens)
    return LoadedHead(make_drafting(graphdef, drafts), weights)


def why_no_drafts(config: DecoderConfig) -> str | None:
    """Return why the engine does not verify drafts of a model, in words; None where it does."""
    if all(kind.mixer.recurrent for kind in config.layer_kinds):
        return "no layer of attention alone, as a draft head has"
    return None


def make_draft_slots(slots: int, rows: int, width: int, dtype: Any, device: Any = None) -> DraftSlots:
    """Return the rows of slots without sequences."""
    return DraftSlots(
        hidden=zeros_on(device, (slots, rows, width), dtype),
        tokens=zeros_on(device, (slots, rows), jnp.int32),
        count=zeros_on(device, slots, jnp.int32),
        kept=zeros_on(device, slots, jnp.int32),
    )


class DraftPrograms:
    """The programs of a head; arguments as in `EnginePrograms`, weights as trees of the whole model."""

    def __init__(self, drafting: Drafting, graphdefs: ModelGraphDefs, config: DecoderConfig, dtype: Any):
        self._head = drafting.graphdef
        self._graphdefs, self._config, self._dtype = graphdefs, config, dtype
        self.prefill = jit_step(self._prefill, donate_argnames="cache")
        self.extend = jit_step(self._extend, donate_argnames="cache")

    def weights(self, trees: Trees) -> dict[str, Trees]:
        """Return the weights that drafts are made of."""
        words = (WORDS,) if WORDS in trees[0] else ()
        return {name: tuple(tree[name] for tree in trees) for name in (HEAD, *words, *self._names)}

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
        packed = replace(packed, latents="written") if isinstance(cache, LatentPages) else packed
        hidden, context = self.norm(weights, x), PrefillContext(packed, cache, places)
        # A prompt's last token has no next one yet: the first step writes its place again.
        self._apply(weights, jnp.roll(tokens, -1, axis=1), hidden, context)
        last = jnp.maximum(packed.segments.cu_seqlens[0, 1:] - 1, 0)
        return hidden[0, last], context.cache

    def _extend(
        self,
        weights: dict[str, Trees],
        x: Float[Array, "1 T D"],
        tokens: Int[Array, " T"],
        cursor: Cursor,
        last: Int[Array, " n"],
        cache: Cache,
    ) -> tuple[Float[Array, "n D"], Cache]:
        """Write the head's keys and values of texts that go on; return the model's state of these rows.

        The head's last ones before such a text are those of another text's next token: they change drafts alone.
        """
        hidden, context = self.norm(weights, x), ExtendContext(cache, cursor)
        self._apply(weights, jnp.roll(tokens, -1)[None], hidden, context)
        return hidden[0, last], context.cache

    def propose(
        self,
        weights: dict[str, Trees],
        slots: DraftSlots,
        last: Int[Array, " B"],
        place: Any,
        cache: Cache,
        count: int,
        ranks: Ranks = None,
    ) -> tuple[Int[Array, "B drafts"], Cache]:
        """Return drafts of each sequence's next tokens, so many.

        Args:
            weights: of `weights`.
            slots: of the sequences.
            last: position of their last token.
            place: returns the cursor of rows of positions [B, n].
            cache: of the head.
            count: drafts; with 0 the head's keys and values are written alone.
            ranks: as in `DecodeWindow`.
        """
        B, R = slots.tokens.shape
        first = last - slots.count
        cursor = place(jnp.maximum(first[:, None] + jnp.arange(R), 0))
        context = VerifyContext(cache, cursor)
        states = self._apply(weights, slots.tokens.reshape(1, -1), slots.hidden.reshape(1, B * R, -1), context)
        rows = jnp.arange(B), jnp.maximum(slots.count - 1, 0)
        state, drafts = states.reshape(B, R, -1)[rows], list[Array]()
        for index in range(count):
            drafts.append(self._likeliest(weights, state, ranks))
            if index + 1 < count:
                context = VerifyContext(context.cache, place(last[:, None] + index))
                state = self._apply(weights, drafts[-1][None], state[None], context)[0]
        return jnp.stack(drafts, axis=1) if drafts else jnp.zeros((B, 0), jnp.int32), context.cache

    def _likeliest(self, weights: dict[str, Trees], states: Float[Array, "M D"], ranks: Ranks) -> Int[Array, " M"]:
        """Return the head's most likely tokens, among those that drafts read."""
        if WORDS not in weights:
            return jnp.argmax(self.logits(weights, states, ranks), axis=-1).astype(jnp.int32)
        _, words = weights[WORDS]
        output = merge_module(self._graphdefs.output, *weights[self._graphdefs.output_name])
        logits = project(with_low_rank(output, states, ranks), words["matrix"], jnp.float32)
        return words["tokens"][jnp.argmax(logits, axis=-1)]

    def norm(self, weights: dict[str, Trees], x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return the model's final norm."""
        return merge_module(self._graphdefs.norm, *weights["norm"])(x)

    def logits(self, weights: dict[str, Trees], states: Float[Array, "M D"], ranks: Ranks) -> Float[Array, "M V"]:
        """Return the output projection's float32 logits."""
        output = merge_module(self._graphdefs.output, *weights[self._graphdefs.output_name])
        logits = project(with_low_rank(output, states, ranks), extended_matrix(output), jnp.float32)
        return cap_logits(logits, self._config.scales.logit_softcap)

    def _apply(self, weights: dict[str, Trees], tokens: Int[Array, "1 T"], hidden: Array, context: Any) -> Array:
        embed = merge_module(self._graphdefs.embed_tokens, *weights["embed_tokens"])
        head: DraftHead = merge_module(self._head, *weights[HEAD])
        return head(embed(tokens, self._dtype), hidden, context)


def rows_cursor(
    positions: Int[Array, "B R"],
    tables: tuple[Int[Array, "B P"], ...],
    windows: tuple[int | None, ...],
    slots: Int[Array, " B"],
    ranks: Bool[Array, "B ranks"] | None,
    kept: Int[Array, " B"],
    rope: RopeTables,
) -> Cursor:
    """Return the cursor of R tokens of each sequence; those beyond its table are nobody's.

    Args:
        positions: of the tokens.
        tables: pages of the sequences in layers with each of the windows; nobody's of those that have ended.
        windows: of attention.
        slots: of the sequences.
        ranks: as in `DecodeWindow`.
        kept: as in `Cursor`.
        rope: rotary tables of the positions [1, B·R].
    """
    R, flat, most = positions.shape[1], positions.reshape(-1), tables[0].shape[1] * PAGE
    within, flat = flat < most, jnp.minimum(flat, most - 1)
    rows = tuple(jnp.repeat(table, R, axis=0) for table in tables)
    pages = tuple(jnp.where(within, of[jnp.arange(len(flat)), flat // PAGE], 0) for of in rows)
    ranks = None if ranks is None else jnp.repeat(ranks, R, axis=0)
    places = Places(pages=pages, offsets=flat % PAGE, slots=slots, windows=windows, ranks=ranks)
    return Cursor(places=places, tables=rows, slots=slots, positions=flat, rope=rope, kept=kept)


def with_prompts(slots: DraftSlots, index: Int[Array, " n"], hidden: Float[Array, "n D"]) -> DraftSlots:
    """Return the rows after prompts whose last tokens have these states in these slots."""
    return replace(slots, hidden=slots.hidden.at[index, 0].set(hidden.astype(slots.hidden.dtype)))


def as_begun(slots: DraftSlots, fresh: Bool[Array, " B"], tokens: Int[Array, " B"]) -> DraftSlots:
    """Return the rows of sequences of which those that are fresh have the row of their prompt alone."""
    first = jnp.where(fresh, tokens, slots.tokens[:, 0])
    return replace(
        slots,
        tokens=slots.tokens.at[:, 0].set(first),
        count=jnp.where(fresh, 1, slots.count),
        kept=jnp.where(fresh, 0, slots.kept),
    )


def after_token(slots: DraftSlots, hidden: Float[Array, "B D"], tokens: Int[Array, " B"]) -> DraftSlots:
    """Return the rows after a step of one token of each sequence, from the model's states that chose the tokens."""
    states, ones = hidden[:, None].astype(slots.hidden.dtype), jnp.ones_like(slots.count)
    return DraftSlots(hidden=states, tokens=tokens[:, None], count=ones, kept=0 * ones)


def accepted(tokens: Int[np.ndarray, "steps B"], rows: int, idle: int) -> Int[np.ndarray, "rows B"]:
    """Return how many of each sequence's steps, of so many rows, chose at least 1, 2, … tokens.

    So the first number is that of steps, and the others are those of accepted first, second, … drafts.
    """
    steps = (tokens.reshape(-1, rows, tokens.shape[1]) != idle).sum(1)
    return (steps > np.arange(rows)[:, None, None]).sum(1)
