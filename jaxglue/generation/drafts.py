"""Drafts: tokens that a head proposes, which the model verifies together in one step.

A draft is the head's most likely token, and each token of an answer is still the model's own choice, by the random
number of its position: a draft is accepted where it is that choice. So answers are those without drafts, whatever
decides a token (temperature, top-p, penalties, biases), and a draft x is accepted with the probability p(x) of it.

At token t the head reads the model's normed state of t, or a projection of three of its hidden states, and the
embedding of token t + 1 (see `models/draft.py`, `models/eagle.py`).
Between windows it has read all tokens of a sequence but the last, so that any window may draft: one that does not lets
it write the keys and values of its tokens at once, at its end, which are all that later drafts read of them.
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
from jaxglue.generation.contexts import (
    Cache,
    Cursor,
    ExtendContext,
    Places,
    PrefillContext,
    VerifyContext,
    WriteContext,
)
from jaxglue.generation.pages import PAGE
from jaxglue.hf.draft import load_draft, read_draft_tokens
from jaxglue.hf.eagle import EagleWeights, load_eagle, open_eagle
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.draft import DRAFTS, DraftHead, with_head_layer
from jaxglue.models.eagle import EagleHead, EagleShape
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.ops.backend import check_tried
from jaxglue.ops.cross_entropy import cap_logits
from jaxglue.ops.paged_attention import LatentPages
from jaxglue.ops.projection import project
from jaxglue.ops.rope import RopeTables

Trees = tuple[Params, ...]
Ranks = Bool[Array, "M ranks"] | None
Read = tuple[Float[Array, "1 T D"], ...]
_log = logging.getLogger(__name__)
HEAD, WORDS = "draft", "draft_words"
"""Keys of the head's weights in the trees of the model's, and of the rows that drafts read of the output projection, or
of the projection of the head's own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class UnreadRows:
    """Tokens of S sequences that a head has not read yet, at most R of each."""

    hidden: Float[Array, "S R D"]
    """States that the head reads of the model."""
    tokens: Int[Array, "S R"]
    """The token after each."""
    positions: Int[Array, "S R"]
    """Of the states; below 0 for rows that are none."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class VerifiedRows:
    """The last step's rows of S sequences that are drafted, R = drafts + 1 each."""

    hidden: Float[Array, "S R D"]
    """States that the head reads of the model."""
    tokens: Int[Array, "S R"]
    """The token after each."""
    count: Int[Array, " S"]
    """Rows that count, the first ones; the last of them has the sequence's last token."""
    kept: Int[Array, " S"]
    """Tokens of the last step that recurrent layers have not applied to their states."""

    @classmethod
    def begin(
        cls, hidden: Float[Array, "S D"], tokens: Int[Array, " S"], kept: Int[Array, " S"], rows: int
    ) -> "VerifiedRows":
        """Return a window's first rows: one of each sequence, its last token with the state before it."""
        more, ones = (0, rows - 1), jnp.ones_like(tokens)
        return cls(
            hidden=jnp.pad(hidden[:, None], ((0, 0), more, (0, 0))),
            tokens=jnp.pad(tokens[:, None], ((0, 0), more)),
            count=ones,
            kept=kept,
        )

    def positions(self, last: Int[Array, " S"]) -> Int[Array, "S R"]:
        """Return the positions of the rows' states; `last` are those of the sequences' last tokens."""
        return (last - self.count)[:, None] + jnp.arange(self.tokens.shape[1])

    def unread(self, last: Int[Array, " S"]) -> UnreadRows:
        """Return the rows that count; arguments as of `positions`."""
        positions = self.positions(last)
        counted = positions < last[:, None]
        return UnreadRows(hidden=self.hidden, tokens=self.tokens, positions=jnp.where(counted, positions, -1))


@dataclass(frozen=True)
class Drafting:
    """A head, and how many tokens it drafts."""

    graphdef: nnx.GraphDef
    most: int
    """Tokens that it drafts for a step, at most."""
    auto: bool = False
    """A `DraftRule` decides how many for each window; otherwise they are always the most."""
    eagle: EagleShape | None = None
    """Shape of a head of EAGLE-3's kind; None for a layer of the model's own kind."""

    @property
    def rows(self) -> int:
        """Return the tokens that the model verifies in a step, at most."""
        return self.most + 1

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the layers of the model whose inputs the head reads; none where it reads the final state."""
        return () if self.eagle is None else self.eagle.taps

    def within(self, config: DecoderConfig) -> DecoderConfig:
        """Return a model's architecture with a further layer, the head's, after the last."""
        return with_head_layer(config) if self.eagle is None else self.eagle.within(config)


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


def make_drafting(graphdef: nnx.GraphDef, drafts: Drafts, eagle: EagleShape | None = None) -> Drafting:
    """Return a head with its number of drafts, which is not `off`."""
    auto = drafts == "auto"
    return Drafting(graphdef, AUTO_DRAFTS if auto else int(drafts), auto=auto, eagle=eagle)


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
    own: Path | None = None,
) -> LoadedHead | None:
    """Load a draft head if drafts are asked for; else return None.

    It is that of the folder `own`, of EAGLE-3's kind, else the one trained beside an adapter, else the model's. `auto`
    takes those that are there, on accelerators: on CPUs the time of a step grows with its tokens.

    Raises:
        ValueError: an asked number of drafts without a head that the engine can use; or `own` of another model.
    """
    found = None if own is None else open_eagle(own, folder, config)
    no_head = own is None and config.model_type not in DRAFTS
    if drafts == "off" or (drafts == "auto" and (jax.default_backend() == "cpu" or no_head)):
        return None
    try:
        if drafts == "auto":
            check_tried("steps of drafts")
        if found is not None:
            return eagle_head(load_eagle(found, dtype), found.shape, drafts)
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


def eagle_head(loaded: EagleWeights, shape: EagleShape, drafts: Drafts) -> LoadedHead:
    """Return a head of EAGLE-3's kind for so many drafts, which are not `off`."""
    graphdef, state = nnx.split(loaded.head)
    words = {"matrix": loaded.matrix, "tokens": jnp.asarray(loaded.tokens, jnp.int32)}
    return LoadedHead(make_drafting(graphdef, drafts, shape), {HEAD: nnx.to_pure_dict(state), WORDS: words})


def why_no_drafts(config: DecoderConfig) -> str | None:
    """Return why the engine does not verify drafts of a model, in words; None where it does."""
    if all(kind.mixer.recurrent for kind in config.layer_kinds):
        return "no layer of attention alone, as a draft head has"
    return None


class DraftPrograms:
    """The programs of a head; arguments as in `EnginePrograms`, weights as trees of the whole model."""

    def __init__(self, drafting: Drafting, graphdefs: ModelGraphDefs, config: DecoderConfig, dtype: Any):
        self._head, self._own_words = drafting.graphdef, drafting.eagle is not None
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
        read: Read,
        tokens: Int[Array, "1 T"],
        cache: Cache,
        packed: PackedContext,
        places: Places,
    ) -> tuple[Float[Array, "S D"], Cache]:
        """Write the head's keys and values of packed prompts; return the state of each one's last token."""
        packed = replace(packed, latents="written") if isinstance(cache, LatentPages) else packed
        hidden, context = self.states(weights, x, read), PrefillContext(packed, cache, places)
        # A prompt's last token has no next one yet: the first step writes its place again.
        self._apply(weights, jnp.roll(tokens, -1, axis=1), hidden, context)
        last = jnp.maximum(packed.segments.cu_seqlens[0, 1:] - 1, 0)
        return hidden[0, last], context.cache

    def _extend(
        self,
        weights: dict[str, Trees],
        x: Float[Array, "1 T D"],
        read: Read,
        tokens: Int[Array, " T"],
        cursor: Cursor,
        last: Int[Array, " n"],
        cache: Cache,
    ) -> tuple[Float[Array, "n D"], Cache]:
        """Write the head's keys and values of texts that go on; return the state of these rows.

        The head's last ones before such a text are those of another text's next token: they change drafts alone.
        """
        hidden, context = self.states(weights, x, read), ExtendContext(cache, cursor)
        self._apply(weights, jnp.roll(tokens, -1)[None], hidden, context)
        return hidden[0, last], context.cache

    def catch_up(self, weights: dict[str, Trees], rows: UnreadRows, cursor: Cursor, cache: Cache) -> Cache:
        """Write the head's keys and values of rows, at the cursor's places."""
        context = WriteContext(cache, cursor)
        flat = rows.tokens.reshape(1, -1), rows.hidden.reshape(1, rows.tokens.size, -1)
        self._apply(weights, *flat, context)
        return context.cache

    def propose(
        self,
        weights: dict[str, Trees],
        rows: VerifiedRows,
        last: Int[Array, " B"],
        place: Any,
        cache: Cache,
        count: int,
        ranks: Ranks = None,
    ) -> tuple[Int[Array, "B drafts"], Cache]:
        """Return drafts of each sequence's next tokens, so many.

        Args:
            weights: of `weights`.
            rows: of the sequences, which the head reads.
            last: position of their last token.
            place: returns the cursor of rows of positions [B, n].
            cache: of the head.
            count: drafts.
            ranks: as in `DecodeWindow`.
        """
        B, R = rows.tokens.shape
        context = VerifyContext(cache, place(rows.positions(last)))
        states = self._apply(weights, rows.tokens.reshape(1, -1), rows.hidden.reshape(1, B * R, -1), context)
        state, drafts = states.reshape(B, R, -1)[jnp.arange(B), rows.count - 1], list[Array]()
        for index in range(count):
            drafts.append(self._likeliest(weights, state, ranks))
            if index + 1 < count:
                context = VerifyContext(context.cache, place(last[:, None] + index))
                state = self._apply(weights, drafts[-1][None], state[None], context)[0]
        return jnp.stack(drafts, axis=1), context.cache

    def _likeliest(self, weights: dict[str, Trees], states: Float[Array, "M D"], ranks: Ranks) -> Int[Array, " M"]:
        """Return the head's most likely tokens, among those that drafts read."""
        states = self._merged(weights).output(states)
        if WORDS not in weights:
            return jnp.argmax(self.logits(weights, states, ranks), axis=-1).astype(jnp.int32)
        _, words = weights[WORDS]
        if not self._own_words:
            output = merge_module(self._graphdefs.output, *weights[self._graphdefs.output_name])
            states = with_low_rank(output, states, ranks)
        logits = project(states, words["matrix"], jnp.float32)
        return words["tokens"][jnp.argmax(logits, axis=-1)]

    def states(self, weights: dict[str, Trees], x: Float[Array, "1 T D"], read: Read) -> Float[Array, "1 T D"]:
        """Return the states that the head reads of tokens, from the last layer's output and inputs of `taps`."""
        if not read:
            return self.norm(weights, x)
        head = self._merged(weights)
        assert isinstance(head, EagleHead)
        return head.combine(read)

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
        return self._merged(weights)(embed(tokens, self._dtype), hidden, context)

    def _merged(self, weights: dict[str, Trees]) -> DraftHead | EagleHead:
        return merge_module(self._head, *weights[HEAD])


def rows_cursor(
    positions: Int[Array, "B R"],
    tables: tuple[Int[Array, "B P"], ...],
    windows: tuple[int | None, ...],
    slots: Int[Array, " B"],
    ranks: Bool[Array, "B ranks"] | None,
    kept: Int[Array, " B"] | None,
    rope: RopeTables,
) -> Cursor:
    """Return the cursor of R tokens of each sequence; those before its first one and beyond its table are nobody's.

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
    within, flat = (flat >= 0) & (flat < most), jnp.clip(flat, 0, most - 1)
    rows = tuple(jnp.repeat(table, R, axis=0) for table in tables)
    pages = tuple(jnp.where(within, of[jnp.arange(len(flat)), flat // PAGE], 0) for of in rows)
    ranks = None if ranks is None else jnp.repeat(ranks, R, axis=0)
    places = Places(pages=pages, offsets=flat % PAGE, slots=slots, windows=windows, ranks=ranks)
    return Cursor(places=places, tables=rows, slots=slots, positions=flat, rope=rope, kept=kept)


def accepted(tokens: Int[np.ndarray, "steps B"], rows: int, idle: int) -> Int[np.ndarray, "rows B"]:
    """Return how many of each sequence's steps, of so many rows, chose at least 1, 2, … tokens.

    So the first number is that of steps, and the others are those of accepted first, second, … drafts.
    """
    steps = (tokens.reshape(-1, rows, tokens.shape[1]) != idle).sum(1)
    return (steps > np.arange(rows)[:, None, None]).sum(1)
