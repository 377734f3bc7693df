"""Compiled programs of generation: prompts into pages, and windows of steps, as one program or layer by layer."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxglue.engine.compiler import STEP_OPTIONS, Program, jit_step
from jaxglue.engine.layer_forms import by_tiles
from jaxglue.generation.contexts import (
    Cache,
    Cursor,
    DecodeContext,
    ExtendContext,
    Places,
    PrefillContext,
    SettleContext,
    VerifyContext,
)
from jaxglue.generation.drafts import (
    Drafting,
    DraftPrograms,
    UnreadRows,
    VerifiedRows,
    rows_cursor,
)
from jaxglue.generation.pages import PAGE, PREFILL_TOKENS, CachePlan, ring_table
from jaxglue.generation.sampling import Controls, Counts, Features, Sampled, sample, with_trained
from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import extended_matrix, with_low_rank
from jaxglue.ops.attention.tiles import key_tile
from jaxglue.ops.cross_entropy import cap_logits, trained_log_probs
from jaxglue.ops.paged_attention import LatentPages
from jaxglue.ops.projection import project
from jaxglue.ops.projection.ordered import ordered_products
from jaxglue.ops.recurrence import KeysAndStates, Replayed
from jaxglue.ops.row_sums import FEWEST_ROWS
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.zeros import zeros_on
from jaxglue.vision.rows import Images, Patches, token_positions

IDLE = -1
"""Stands for the token of a sequence that has ended."""
NOT_FINITE = -2
"""Stands for a token whose logits are infinite or NaN."""
ONE_OPTIONS: dict[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 0}
"""XLA's, for windows of one sequence: merged matmuls of one input would copy weights together in every step."""
SEVERAL_OPTIONS = ONE_OPTIONS | {"xla_gpu_enable_triton_gemm": False}
"""For several: cuBLAS adds to the residual stream in place, and XLA's Triton kernels are slower among others than where
XLA compares them."""
LAYER_OPTIONS = STEP_OPTIONS | {"xla_gpu_graph_min_graph_size": 1 << 20}
"""For programs that are called with another layer's arrays each time: no CUDA graphs, since to write these addresses
into a graph's nodes takes the host longer than to launch its kernels."""
_jit = partial(Program, compiler_options={})
"""`jax.jit` for programs that windows call, or are a part of."""
_jit_layer = partial(Program, compiler_options=LAYER_OPTIONS)
_COPIED = 2**23
"""Bytes of a layer's pages or states that are copied at a time: of few, XLA gathers all layers' at once."""
Trees = tuple[Params, ...]
"""Trainable and frozen parameters of the model or a part of it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EngineSlots:
    """Sequences as the device knows them, between windows of all slots and one more, which is nobody's."""

    tokens: Int[Array, " S"]
    """The last token of each, not yet in the cache."""
    positions: Int[Array, " S"]
    """Its position."""
    live: Bool[Array, " S"]
    """True for sequences that go on."""
    counts: Counts | None
    """Counts of tokens in all slots; None without penalties."""
    hidden: Float[Array, "S D"] | None = None
    """The state that a head reads of the token before each last one; None without drafts."""
    kept: Int[Array, " S"] | None = None
    """Tokens of each that recurrent layers have not applied to their states; None without drafts."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeWindow:
    """The host's inputs for the B sequences of a window."""

    slots: Int[Array, " B"]
    """The slot that is nobody's where there are fewer sequences."""
    fresh: Bool[Array, " B"]
    """Sequences that begin here, with these `tokens` and `positions`; others go on from the last window."""
    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    ends: Int[Array, " B"]
    """Limit of the sequence's length."""
    tables: Int[Array, "B P"]
    """Numbered pages; 0 beyond those that it has."""
    stops: Int[Array, "B n"]
    """Tokens that end it; -1 beyond those that it has."""
    controls: Controls
    ranks: Bool[Array, "B R"] | None = None
    """Ranks of the adapters that it uses; None where all sequences use all."""
    deltas: Int[Array, " B"] | None = None
    """Positions in rotation less those in the cache; None for models that see no images."""
    masks: UInt32[Array, "B words"] | None = None
    """Tokens that its first one is among, a bit each; None where no answer of the batch follows a grammar."""
    forks: Int[Array, " B"] | None = None
    """Tokens of its prompt before the last; None where answers need not have training's bits."""


def _makes(exact: bool) -> partial[Program]:
    """Return what makes programs: those with training's bits have its options, which fix the order of XLA's sums."""
    return jit_step if exact else _jit


def _rounded(path: tuple[Any, ...], weight: Array, *, dtype) -> Array:
    """Return an adapter's first matrix in the activations' dtype, in which products take it; other weights as given.

    Those of experts, whose copies take memory, are rounded as they are read.
    """
    name = jax.tree_util.keystr(path)
    return weight.astype(dtype) if "lora_A" in name and "experts" not in name else weight


class CachedLayer:
    """The compiled prefill, decode step and extension of one layer type; all update the cache in place.

    `fill` is the prefill of the model's last layer, whose output nothing reads: XLA leaves out what follows the cache.
    """

    def __init__(self, graphdef: nnx.GraphDef, *, fp8: bool = True, exact: bool = False):
        self._graphdef, self._fp8, make = graphdef, fp8, _makes(exact)
        self.prefill = _jit_layer(self._prefill, donate_argnames=("x", "cache"))
        self.fill = _jit_layer(lambda *arguments: self._prefill(*arguments)[1], donate_argnums=2)
        self.decode = make(self._decode, donate_argnames="cache")
        self.extend = _jit_layer(self._extend, donate_argnames="cache")
        self.verify = _jit(self._verify, donate_argnames="cache")
        self.settle = jit_step(self._settle, donate_argnames="states")

    def _prefill(self, weights: Trees, x, cache: Cache, packed: PackedContext, places: Places):
        packed = replace(packed, latents="written") if isinstance(cache, LatentPages) else packed
        own = cache.states if isinstance(cache, Replayed) else cache
        layer, context = merge_module(self._graphdef, *weights), PrefillContext(packed, own, places, fp8=self._fp8)
        at_once = packed.tile is None or not layer.in_stages
        x = layer(x, context) if at_once else by_tiles(layer, x, packed, context)
        return x, replace(cache, states=context.cache) if isinstance(cache, Replayed) else context.cache

    def _decode(self, weights: Trees, x, cache: Cache, cursor: Cursor):
        context = DecodeContext(cache, cursor, fp8=self._fp8)
        return merge_module(self._graphdef, *weights)(x, context), context.cache

    def _extend(self, weights: Trees, x, cache: Cache, cursor: Cursor):
        context = ExtendContext(cache, cursor, fp8=self._fp8)
        return merge_module(self._graphdef, *weights)(x, context), context.cache

    def _verify(self, weights: Trees, x, cache: Cache, cursor: Cursor):
        context = VerifyContext(cache, cursor, fp8=self._fp8)
        return merge_module(self._graphdef, *weights)(x, context), context.cache

    def _settle(self, weights: Trees, x, states: Any, kept: tuple[Array, ...], cursor: Cursor) -> Any:
        context = SettleContext(Replayed(states, kept), cursor, fp8=self._fp8)
        merge_module(self._graphdef, *weights)(x, context)
        return context.cache.states


_Call = Callable[..., Any]
"""Takes a program and its arguments, and returns its results, or their shapes."""
_copied = jit_step(jnp.copy)


def _called(program: Program, *arguments: Any) -> Any:
    return program(*arguments)


class _Compiler:
    """Compiles programs for shapes of arguments, each once, and returns shapes of their results at a place."""

    def __init__(self, place: jax.sharding.Sharding | None):
        self._place, self._results = place, dict[Any, Any]()

    def __call__(self, program: Program, *arguments: Any) -> Any:
        """Return the shapes of a program's results."""
        leaves, treedef = jax.tree.flatten(arguments)
        name = program, treedef, tuple(leaves)
        if name not in self._results:
            program.lower(*arguments).compile()
            self._results[name] = jax.tree.map(self._shape, program.eval_shape(*arguments))
        return self._results[name]

    def _shape(self, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place, weak_type=getattr(x, "weak_type", False))


class CacheCopies(NamedTuple):
    """Pages to copy, from and to, for each kind of layers, and slots; nobody's onto itself where there are fewer."""

    sources: tuple[Int[Array, " n"], ...]
    targets: tuple[Int[Array, " n"], ...]
    slots: tuple[Int[Array, " n"], Int[Array, " n"]]
    """Slots from and to which states are copied."""


class EnginePrograms:
    """The programs of a model; arguments as in `Engine`."""

    def __init__(
        self,
        graphdefs: ModelGraphDefs,
        config: DecoderConfig,
        dtype,
        attention: str,
        fp8_layers: Sequence[bool],
        drafting: Drafting | None = None,
        *,
        exact: bool = False,
    ):
        self.exact = exact
        """Whether tokens have training's bits."""
        self._drafts = None if drafting is None else DraftPrograms(drafting, graphdefs, config, dtype)
        self.rows = 1 if drafting is None else drafting.rows
        """Tokens of a sequence in a step, at most."""
        self.cached = config if drafting is None else drafting.within(config)
        """Architecture with all layers that have a cache."""
        self._taps = () if drafting is None else drafting.taps
        self._graphdefs, self._config, self._dtype, self._attention = graphdefs, config, dtype, attention
        kinds = [*zip(graphdefs.layers, fp8_layers, strict=True)]
        layer_types = {kind: CachedLayer(kind[0], fp8=kind[1], exact=exact) for kind in kinds}
        self._layers = [layer_types[kind] for kind in kinds]
        self._output_name = graphdefs.output_name
        self.windows = tuple(dict.fromkeys(kind.window for kind in self.cached.layer_kinds))
        """Windows of attention, None for all tokens: layers with one number their pages alike."""
        self.extends = self.windows == (None,) and all(mixer.extends for mixer in config.mixer_kinds)
        """Whether `extend` serves: all layers have the keys and values of all tokens in numbered pages."""
        self.sees = config.vision is not None
        """Whether prompts may have images."""
        self.rewinds = config.recurrent is None
        """Whether a sequence may give back its last tokens: no layer holds them in a recurrent state."""
        self.tile = key_tile(config.layer_kinds[0].head_dim) if exact else None
        """Tokens at whose multiples parts of prompts begin in a row; None for any."""
        self.fewest = FEWEST_ROWS if exact else 1
        """Sequences of a window, at least."""
        make = _makes(exact)
        self._embed_prompts, self._embed_suffixes = make(self._embed_packed), make(self._embed_behind)
        self._see = _jit(self._features)
        self._copy = jax.jit(self._copy_pages, donate_argnames="caches")
        self._read, self._write = jax.jit(_read_pages), jax.jit(_write_pages, donate_argnames="caches")
        self._begin = jax.jit(_begin)
        self._embed_slots = make(self._embed_last, static_argnames="plan")
        self._advance = make(self._sample_next, static_argnames="features", donate_argnames="sequences")
        self._finish = jax.jit(_finish, donate_argnames="slots")
        self._propose = _jit(self._propose_rows, static_argnames=("plan", "drafts"), donate_argnames="cache")
        self._embed_rows = _jit(self._embed_verified, static_argnames="plan")
        self._accept = _jit(self._accept_rows, static_argnames="features")
        self._combine = _jit(lambda *arguments: self._head.states(*arguments))
        self._catch_up = _jit(self._write_unread, static_argnames="plan", donate_argnames="cache")
        self._remember = jax.jit(_with_states)
        options: dict[str, Any] = {
            "donate_argnames": ("slots", "caches"),
            "static_argnames": ("plan", "features", "drafts", "steps"),
        }
        one, several = (STEP_OPTIONS, STEP_OPTIONS) if exact else (ONE_OPTIONS, SEVERAL_OPTIONS)
        self._run_one = Program(self._scan, compiler_options=one, **options)
        self._run_several = Program(self._scan, compiler_options=several, **options)
        self._note = jax.jit(_count_prompts, donate_argnames="counts")

    def prepared(self, params: Params) -> Params:
        """Return a tree in the form that windows read: exact ones would round adapters' first matrices each time."""
        if not self.exact:
            return params
        return jax.tree_util.tree_map_with_path(partial(_rounded, dtype=self._dtype), params)

    def prefill(
        self,
        trees: Trees,
        tokens: Int[Array, "1 T"],
        segments: PackedSegments,
        places: Places,
        images: Images | None,
        caches: list[Cache],
    ) -> tuple[list[Cache], Float[Array, "S D"] | None, Array]:
        """Write the keys and values of packed prompts to the caches.

        Returns:
            The caches, with drafts the last tokens' states, and an array that is there once the prompts have passed.
        """
        return self._prefill(_called, trees, tokens, segments, places, images, caches)

    def compile_prefill(self, place: jax.sharding.Sharding | None, trees: Trees, *row: Any) -> None:
        """Compile the programs of `prefill` for shapes; calls with arrays of these find them.

        Args:
            place: of arrays beside the weights, as of `place_of`.
            trees, row: shapes of `prefill`'s arguments, without images.
        """
        self._prefill(_Compiler(place), trees, *row)

    def _prefill(self, call: "_Call", trees: Trees, tokens, segments, places, images, caches):
        """Call the programs of `prefill`."""
        caches = list(caches)
        arguments = _part(trees, "embed_tokens"), tokens, segments, places, images
        x, packed, places, layer_inputs = call(self._embed_prompts, *arguments)
        packed = replace(packed, ranks=places.ranks)
        contexts = packed.each(layer_inputs, self._config.layer_segments(packed.segments, images))
        full = tokens.shape[1] >= PREFILL_TOKENS  # for few tokens another program is not worth compiling
        read: tuple[Array, ...] = ()
        for i, (layer, weights) in enumerate(self._layer_weights(trees)):
            if i in self._taps:
                read += (call(_copied, x),)  # the layer takes its input's memory
            if full and i == len(caches) - 1:
                caches[i] = call(layer.fill, weights, x, caches[i], contexts[i], places)
            else:
                x, caches[i] = call(layer.prefill, weights, x, caches[i], contexts[i], places)
        if self._drafts is None:
            return caches, None, x
        weights = self._drafts.weights(trees)
        last, caches[-1] = call(self._drafts.prefill, weights, x, read, tokens, caches[-1], packed, places)
        return caches, last, x

    def extend(
        self,
        trees: Trees,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        cursor: Cursor,
        last: Int[Array, " n"],
        caches: list[Cache],
    ) -> tuple[list[Cache], Float[Array, "n D"] | None, Array]:
        """Write the keys and values of texts that go on, behind those in their pages; the cursor's rope is not read.

        Each token has a row of the cursor's, as decoding sequences have, and a position in rotation of its own. With
        drafts, the states of the `last` ones are returned, too, and an array as of `prefill`.
        """
        arguments = _part(trees, "embed_tokens"), tokens[None], positions[None], cursor
        x, cursor, layer_inputs = self._embed_suffixes(*arguments)
        x, read = self._through("extend", trees, x, caches, cursor, layer_inputs)
        if self._drafts is None:
            return caches, None, x
        states, caches[-1] = self._drafts.extend(self._drafts.weights(trees), x, read, tokens, cursor, last, caches[-1])
        return caches, states, x

    def see(self, trees: Trees, patches: Patches) -> Float[Array, "B I D"]:
        """Return the features of rows of patches."""
        return self._see(_part(trees, "embed_tokens"), patches)

    def _features(self, weights: Trees, patches: Patches):
        embed_tokens = merge_module(self._graphdefs.embed_tokens, *weights)
        return embed_tokens.vision(patches, self._dtype, backend=self._attention)

    def copy(self, caches: list[Cache], copies: CacheCopies) -> list[Cache]:
        """Copy pages within the caches."""
        return self._copy(caches, copies)

    def read_pages(self, caches: list[Cache], pages: Int[np.ndarray, " n"]) -> list[Cache]:
        """Return copies of pages, for programs whose layers all have numbered pages (`extends`)."""
        return self._read(caches, pages)

    def write_pages(self, caches: list[Cache], pages: Int[np.ndarray, " n"], values: list[Cache]) -> list[Cache]:
        """Write pages that `read_pages` returned to the caches."""
        return self._write(caches, pages, values)

    def note(self, counts: Counts, slots: Int[Array, " n"], tokens: Int[Array, "n L"], new: Bool[Array, "n L"]):
        """Return the counts in which these slots have these tokens, padded with -1, of which answers have the `new`."""
        return self._note(counts, slots, tokens, new)

    def window(
        self, trees: Trees, slots: EngineSlots, caches: list[Cache], window: DecodeWindow, *, steps: int, **static: Any
    ) -> tuple[EngineSlots, list[Cache], Sampled]:
        """Decode up to `steps` tokens of each of the window's sequences by one program.

        Its compile time grows with depth.

        Args:
            trees: parameters.
            slots, caches: state of all slots, updated in place.
            window: sequences that decode.
            steps: tokens of each.
            static: `plan` of the cache, `features` of the sampling and `drafts` of each step, which come with a head.

        Returns:
            state, and what each step, or each of its rows, sampled (leading axes), with `IDLE` and `NOT_FINITE`.
        """
        return self._run(static["plan"])(trees, slots, caches, window, steps=steps, **static)

    def window_by_layers(
        self, trees: Trees, slots: EngineSlots, caches: list[Cache], window: DecodeWindow, *, steps: int, **static: Any
    ) -> tuple[EngineSlots, list[Cache], list[Sampled]]:
        """Compute `window` layer by layer and step by step; return a list of the steps' samples."""
        step, begin, end = self._steps_of(static.pop("drafts", 0))
        state, outputs = begin(self._begin(slots, window), window, caches), []
        for index in range(steps):
            *state, output = step(trees, *state, window, _masks(window, index == 0), **static)
            outputs.append(output)
        samples, unread = zip(*outputs, strict=True)
        unread = jax.tree.map(lambda *each: jnp.stack(each), *unread)
        sequences, caches = end(trees, *state, unread, window, caches, plan=static["plan"])
        return self._finish(slots, window, sequences), caches, list(samples)

    def compile_window(self, *arguments: Any, size: int, **options: Any) -> Any:
        """Compile `window` as one program for `size` sequences; return what takes the same arrays.

        Args:
            arguments: `window`'s arrays, or their shapes.
            size: sequences of its last argument.
            options: `window`'s static ones.
        """
        *others, window = arguments
        window = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), window)
        return self._run(options["plan"]).lower(*others, window, **options).compile()

    def compilations(self) -> int:
        """Return the number of compiled programs."""
        functions: list[Any] = [self._begin, self._copy, self._read, self._write, self._finish, self._note]
        programs = [self._embed_prompts, self._embed_suffixes, self._embed_slots, self._advance]
        programs += [self._run_one, self._run_several]
        for layer in set(self._layers):
            programs += [layer.prefill, layer.fill, layer.decode, layer.extend, layer.verify, layer.settle]
        if self._drafts:
            programs += [self._drafts.prefill, self._propose, self._embed_rows, self._accept]
            programs += [self._combine, self._catch_up]
        compiled = sum(program.compilations() for program in programs)
        return compiled + sum(function._cache_size() for function in functions)

    def _run(self, plan: CachePlan) -> Program:
        return self._run_one if plan.slots == 1 else self._run_several

    def _scan(
        self,
        trees: Trees,
        slots: EngineSlots,
        caches: list[Cache],
        window: DecodeWindow,
        *,
        steps: int,
        drafts: int = 0,
        **options: Any,
    ):
        step, begin, end = self._steps_of(drafts)

        def body(carry, first):
            # or XLA would expand all quantized weights once, before the loop
            weights, state = jax.lax.optimization_barrier((trees, carry))
            *state, output = step(weights, *state, window, _masks(window, first), **options)
            return tuple(state), output

        # a known number of steps: with an end that depends on values, the host would wait for each
        first = None if window.masks is None else jnp.arange(steps) == 0
        begun = begin(_begin(slots, window), window, caches)
        state, (sampled, unread) = jax.lax.scan(body, begun, first, length=steps)
        sequences, caches = end(trees, *state, unread, window, caches, plan=options["plan"])
        return _finish(slots, window, sequences), caches, sampled

    def _steps_of(self, drafts: int) -> tuple[Any, Any, Any]:
        """Return what computes a window's step of so many drafts, and what begins and ends such windows.

        `begin` makes what steps begin with, and return before their outputs: samples, and what the head has not read.
        """
        if not drafts:
            return self._step, self._begin_steps, self._end_steps
        return partial(self._verified_step, drafts=drafts), partial(self._begin_drafts, drafts), self._end_drafts

    def _step(
        self, trees: Trees, sequences: EngineSlots, caches: list[Cache], window: DecodeWindow, masks, *, plan, features
    ):
        """Decode a token of each sequence, of those in `masks`; return (sequences, caches, (sampled, unread))."""
        x, cursor, layer_inputs = self._embed_slots(_part(trees, "embed_tokens"), sequences, window, plan=plan)
        caches, unread = list(caches), None
        if sequences.hidden is not None:
            unread = UnreadRows(hidden=sequences.hidden, tokens=sequences.tokens, positions=sequences.positions - 1)
        x, read = self._through("decode", trees, x, caches, cursor, layer_inputs)
        output = _part(trees, "norm"), _part(trees, self._output_name)
        sequences, sampled = self._advance(*output, x, sequences, window, masks, features=features)
        if read:
            hidden = self._combine(self._head.weights(trees), x, read)[0]
            sequences = replace(sequences, hidden=hidden.astype(_states_of(sequences).dtype))
        return sequences, caches, (sampled, unread)

    @staticmethod
    def _begin_steps(sequences: EngineSlots, window: DecodeWindow, caches: list[Cache]):
        """Return what steps begin with whose tokens all count: states that lack none."""
        del window
        return sequences, [cache.states if isinstance(cache, Replayed) else cache for cache in caches]

    def _end_steps(
        self, trees: Trees, sequences: EngineSlots, caches: list[Cache], unread, window, before, *, plan: CachePlan
    ):
        """Let the head, if there is one, read the tokens of a window's steps [steps, B, …]."""
        caches = [
            replace(old, states=cache) if isinstance(old, Replayed) else cache
            for old, cache in zip(before, caches, strict=True)
        ]
        if unread is None:
            return sequences, caches
        rows = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), unread)
        return sequences, self._let_head_read(trees, sequences, rows, caches, window, plan)

    @staticmethod
    def _begin_drafts(drafts: int, sequences: EngineSlots, window: DecodeWindow, caches: list[Cache]):
        """Return what verified steps begin with."""
        assert sequences.hidden is not None and sequences.kept is not None
        rows = VerifiedRows.begin(sequences.hidden, sequences.tokens, sequences.kept, drafts + 1)
        caches = [cache.of(window.slots, drafts + 1) if isinstance(cache, Replayed) else cache for cache in caches]
        return sequences, rows, caches

    def _end_drafts(
        self,
        trees: Trees,
        sequences: EngineSlots,
        rows: VerifiedRows,
        caches: list[Cache],
        unread: None,
        window: DecodeWindow,
        before: list[Cache],
        *,
        plan: CachePlan,
    ):
        """Keep the last step's tokens for the states of recurrent layers, and let the head read them."""
        sequences = replace(sequences, kept=rows.kept)
        caches = [
            old.put(window.slots, cache) if isinstance(old, Replayed) and isinstance(cache, Replayed) else cache
            for old, cache in zip(before, caches, strict=True)
        ]
        return sequences, self._let_head_read(trees, sequences, rows.unread(sequences.positions), caches, window, plan)

    def settle(self, trees: Trees, slots: EngineSlots, caches: list[Cache]) -> tuple[EngineSlots, list[Cache]]:
        """Apply all tokens that recurrent layers have kept to their states, as windows of other drafts begin with."""
        if slots.kept is None or self.rewinds:
            return slots, caches
        kept, S = slots.kept, len(slots.live)
        own = jnp.where(kept > 0, jnp.arange(S), S - 1)  # others may have a prompt's states already
        places = Places(pages=(), offsets=jnp.zeros_like(kept), slots=own, windows=())
        rope = self.cached.rope_tables(slots.positions[None])
        x = jnp.zeros((1, S, self._config.stream_width), self._dtype)  # which nothing reads
        cursor = Cursor(places=places, tables=(), slots=own, positions=slots.positions, rope=rope, kept=kept)
        caches = list(caches)
        for i, (layer, weights) in enumerate(self._layer_weights(trees)):
            if isinstance(cache := caches[i], Replayed):
                caches[i] = replace(cache, states=layer.settle(weights, x, cache.states, cache.kept, cursor))
        return replace(slots, kept=jnp.zeros_like(kept)), caches

    def _let_head_read(
        self, trees: Trees, sequences: EngineSlots, rows: UnreadRows, caches, window, plan
    ) -> list[Cache]:
        """Return the caches after the head has read rows of sequences."""
        weights = self._head.weights(trees)
        return [*caches[:-1], self._catch_up(weights, rows, sequences, window, caches[-1], plan=plan)]

    def _verified_step(
        self,
        trees: Trees,
        sequences: EngineSlots,
        rows: VerifiedRows,
        caches: list[Cache],
        window: DecodeWindow,
        masks: UInt32[Array, "B words"] | None,
        *,
        plan: CachePlan,
        features: Features,
        drafts: int,
    ):
        """Draft tokens of each sequence, and decode the first of them that are the model's choices, and one more.

        Returns:
            sequences, their rows, caches, and what each row sampled (leading axis), beside None.
        """
        caches, weights = list(caches), self._head.weights(trees)
        tokens, caches[-1] = self._propose(weights, sequences, rows, window, caches[-1], plan=plan, drafts=drafts)
        embed_tokens = _part(trees, "embed_tokens")
        x, cursor, layer_inputs = self._embed_rows(embed_tokens, tokens, sequences, rows.kept, window, plan=plan)
        x, read = self._through("verify", trees, x, caches, cursor, layer_inputs)
        sequences, rows, sampled = self._accept(weights, x, read, tokens, sequences, window, masks, features=features)
        return sequences, rows, caches, (sampled, None)

    def _through(
        self, name: str, trees: Trees, x: Array, caches: list[Cache], cursor: Cursor, layer_inputs: Any
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pass tokens through the programs of this name of all layers, which change the caches.

        Returns:
            the last layer's output, and the inputs of those that a head reads.
        """
        read: tuple[Array, ...] = ()
        for i, (layer, weights) in enumerate(self._layer_weights(trees)):
            cursor = cursor if layer_inputs is None else replace(cursor, layer_input=layer_inputs[i])
            read += (x,) if i in self._taps else ()
            x, caches[i] = getattr(layer, name)(weights, x, caches[i], cursor)
        return x, read

    @property
    def _head(self) -> DraftPrograms:
        assert self._drafts is not None
        return self._drafts

    def _layer_weights(self, trees: Trees) -> Iterator[tuple[CachedLayer, Any]]:
        return zip(self._layers, zip(*_part(trees, "layers"), strict=True), strict=True)

    def _embed_packed(self, weights: Trees, tokens, segments: PackedSegments, places: Places, images: Images | None):
        """Return (hidden states [1, T, D], their context, places, the layers' own embeddings, if any).

        All are on the device then: each layer's call would copy what is on the host.
        """
        x, rope, layer_inputs = self._embed(weights, tokens, token_positions(segments, images), images)
        tile = PREFILL_TOKENS if tokens.shape[1] > PREFILL_TOKENS else None
        options: dict[str, Any] = {"backend": self._attention, "tile": tile, "exact": self.exact}
        return x, PackedContext(segments=segments, rope=rope, **options), places, layer_inputs

    def _embed_behind(self, weights: Trees, tokens: Int[Array, "1 T"], positions: Int[Array, "1 T"], cursor: Cursor):
        """Return (hidden states [1, T, D], the cursor with its rope, the layers' own embeddings, if any)."""
        x, rope, layer_inputs = self._embed(weights, tokens, positions)
        return x, replace(cursor, rope=rope), layer_inputs

    def _embed_last(self, weights: Trees, sequences: EngineSlots, window: DecodeWindow, *, plan: CachePlan):
        """Return (hidden states [1, B, D], cursor, the layers' own embeddings, if any)."""
        positions, tables = sequences.positions, self._tables(sequences, window, plan)
        turned = positions if window.deltas is None else positions + window.deltas
        x, rope, layer_inputs = self._embed(weights, sequences.tokens[None], turned[None])
        rows = jnp.arange(len(positions))
        pages = tuple(table[rows, positions // PAGE] for table in tables)
        places = Places(
            pages=pages, offsets=positions % PAGE, slots=window.slots, windows=self.windows, ranks=window.ranks
        )
        cursor = Cursor(
            places=places, tables=tables, slots=window.slots, positions=positions, rope=rope, forks=window.forks
        )
        return x, cursor, layer_inputs

    def _tables(self, sequences: EngineSlots, window: DecodeWindow, plan: CachePlan) -> tuple[Int[Array, "B P"], ...]:
        """Return the pages of sequences in layers with each of the windows; nobody's of those that have ended."""
        live = sequences.live[:, None]
        return tuple(jnp.where(live, window.tables if w is None else _ring(window, plan, w), 0) for w in self.windows)

    def _embed(self, weights: Trees, tokens: Int[Array, "1 T"], positions, images: Images | None = None):
        embed_tokens = merge_module(self._graphdefs.embed_tokens, *weights)
        x, seen = embed_tokens.see(embed_tokens(tokens, self._dtype), images)
        return x, self.cached.rope_tables(positions), embed_tokens.layer_inputs(tokens, x) or seen or None

    def _sample_next(
        self,
        norm_weights: Trees,
        output_weights: Trees,
        x: Float[Array, "1 B D"],
        sequences: EngineSlots,
        window: DecodeWindow,
        masks: UInt32[Array, "B words"] | None,
        *,
        features: Features,
    ) -> tuple[EngineSlots, Sampled]:
        """Return the sequences after their next tokens, and the sample."""
        norm = merge_module(self._graphdefs.norm, *norm_weights)
        output = merge_module(self._graphdefs.output, *output_weights)
        hidden, matrix, softcap = norm(x[0], exact=self.exact), extended_matrix(output), self._softcap
        read = with_low_rank(output, hidden, window.ranks)
        products = self._multiply_head(read, matrix)
        logits, positions = cap_logits(products, softcap), sequences.positions + 1
        counts = sequences.counts and jax.tree.map(lambda rows: rows[window.slots], sequences.counts)
        sampled = sample(logits, window.controls, positions, counts, features, masks)
        if self.exact:
            log_probs = trained_log_probs(read, matrix, products, sampled.tokens, softcap=softcap)
            sampled = with_trained(sampled, log_probs, window.controls, features)
        tokens, was_live = sampled.tokens, sequences.live
        live = was_live & sampled.finite & (tokens[:, None] != window.stops).all(-1) & (positions + 1 < window.ends)
        shown = jnp.where(was_live, jnp.where(sampled.finite, tokens, NOT_FINITE), IDLE)
        if features.penalties and sequences.counts is not None:
            counted = jnp.where(was_live, window.slots, len(sequences.counts.seen) - 1)
            sequences = replace(sequences, counts=_count(sequences.counts, counted, tokens))
        positions = jnp.where(live, positions, 0)
        after = replace(sequences, tokens=tokens, positions=positions, live=live)
        if sequences.hidden is not None:
            after = replace(after, hidden=hidden.astype(sequences.hidden.dtype))
        return after, sampled._replace(tokens=shown)

    def _multiply_head(self, hidden: Float[Array, "B W"], matrix: Float[Array, "V W"]) -> Float[Array, "B V"]:
        if self.exact:
            return ordered_products(hidden, [matrix], jnp.float32)[0]
        return project(hidden, matrix, jnp.float32)

    @property
    def _softcap(self) -> float | None:
        return self._config.scales.logit_softcap

    def _propose_rows(
        self,
        weights,
        sequences: EngineSlots,
        rows: VerifiedRows,
        window: DecodeWindow,
        cache: Cache,
        *,
        plan: CachePlan,
        drafts: int,
    ):
        """Return each sequence's last token and its drafts [B, R], and the head's cache."""
        place = partial(self._place, sequences, window, plan)
        proposed, cache = self._head.propose(weights, rows, sequences.positions, place, cache, drafts, window.ranks)
        return jnp.concatenate([sequences.tokens[:, None], proposed], axis=1), cache

    def _write_unread(
        self, weights, rows: UnreadRows, sequences: EngineSlots, window: DecodeWindow, cache: Cache, *, plan: CachePlan
    ):
        """Return the head's cache with the keys and values of rows."""
        return self._head.catch_up(weights, rows, self._place(sequences, window, plan, rows.positions), cache)

    def _embed_verified(
        self, weights: Trees, tokens, sequences: EngineSlots, kept, window: DecodeWindow, *, plan: CachePlan
    ):
        """Return (hidden states [1, B·R, D], cursor, the layers' own embeddings, if any) of tokens [B, R]."""
        positions = sequences.positions[:, None] + jnp.arange(tokens.shape[1])
        cursor = self._place(sequences, window, plan, positions, kept)
        x, _, layer_inputs = self._embed(weights, tokens.reshape(1, -1), positions.reshape(1, -1))
        return x, cursor, layer_inputs

    def _place(
        self, sequences: EngineSlots, window: DecodeWindow, plan: CachePlan, positions: Int[Array, "B n"], kept=None
    ):
        """Return the cursor of sequences' tokens at these positions; `kept` as in `Cursor`."""
        turned = positions if window.deltas is None else positions + window.deltas[:, None]
        return rows_cursor(
            positions,
            self._tables(sequences, window, plan),
            self.windows,
            window.slots,
            window.ranks,
            kept,
            self.cached.rope_tables(turned.reshape(1, -1)),
        )

    def _accept_rows(
        self,
        weights: dict[str, Trees],
        x: Float[Array, "1 M D"],
        read: tuple[Float[Array, "1 M D"], ...],
        tokens: Int[Array, "B R"],
        sequences: EngineSlots,
        window: DecodeWindow,
        masks: UInt32[Array, "B words"] | None,
        *,
        features: Features,
    ) -> tuple[EngineSlots, VerifiedRows, Sampled]:
        """Return the sequences after the tokens that the model chooses behind accepted ones, and all rows' samples.

        A row is as if the drafts before it were accepted, and else none, so that all are sampled at once.
        """
        B, R = tokens.shape
        hidden = self._head.norm(weights, x[0])
        each: Any = partial(jax.tree.map, lambda of: jnp.repeat(of, R, axis=0))
        logits = self._head.logits(weights, hidden, each(window.ranks))
        positions = sequences.positions[:, None] + jnp.arange(1, R + 1)
        counts = sequences.counts
        own = counts and _with_drafts(jax.tree.map(lambda of: of[window.slots], counts), tokens)
        if masks is not None:  # only those of the first row are known
            masks = jnp.where((jnp.arange(B * R) % R == 0)[:, None], each(masks), np.uint32(0xFFFFFFFF))
        sampled = sample(logits, each(window.controls), positions.reshape(-1), own, features, masks)
        sampled = jax.tree.map(lambda of: of.reshape(B, R, *of.shape[1:]), sampled)
        chosen, ends = sampled.tokens, window.ends[:, None]
        stays = sampled.finite & (chosen[:, :, None] != window.stops[:, None]).all(-1) & (positions + 1 < ends)
        matched = stays[:, :-1] & self.matches(chosen[:, :-1], tokens[:, 1:], positions[:, :-1])
        goes = sequences.live[:, None] & jnp.pad(
            jnp.cumprod(matched, axis=1) > 0, ((0, 0), (1, 0)), constant_values=True
        )
        count, latest = goes.sum(1, dtype=jnp.int32), lambda of: of[jnp.arange(B), jnp.maximum(goes.sum(1) - 1, 0)]
        live = sequences.live & latest(stays)
        if features.penalties and counts is not None:
            counts = _count(counts, jnp.where(goes, window.slots[:, None], len(counts.seen) - 1), chosen)
        states = self._head.states(weights, x, read)[0] if read else hidden
        states = states.astype(_states_of(sequences).dtype).reshape(B, R, -1)
        after = EngineSlots(
            tokens=jnp.where(sequences.live, latest(chosen), sequences.tokens),
            positions=jnp.where(live, sequences.positions + count, 0),
            live=live,
            counts=counts,
            hidden=latest(states),
            kept=sequences.kept,
        )
        rows = VerifiedRows(hidden=states, tokens=chosen, count=jnp.maximum(count, 1), kept=count)
        shown = jnp.where(goes, jnp.where(sampled.finite, chosen, NOT_FINITE), IDLE)
        sampled = jax.tree.map(lambda of: jnp.moveaxis(of, 1, 0), sampled._replace(tokens=shown))
        return after, rows, sampled

    @staticmethod
    def matches(chosen: Int[Array, " B"], drafts: Int[Array, " B"], positions: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Return where the model's choices for these positions are the drafts."""
        del positions
        return chosen == drafts

    def with_prompts(self, slots: EngineSlots, index, hidden: Float[Array, "n D"]) -> EngineSlots:
        """Return the state in which these slots' prompts end with these states of the model."""
        return self._remember(slots, index, hidden)

    def with_copies(self, slots: EngineSlots, copies: CacheCopies) -> EngineSlots:
        """Return the state in which slots have the prompts' states of others."""
        if slots.hidden is None:
            return slots
        sources, targets = copies.slots
        return self._remember(slots, targets, slots.hidden[sources])

    def _copy_pages(self, caches: list[Cache], copies: CacheCopies) -> list[Cache]:
        def copied(kind: LayerKind, cache):
            index = self.windows.index(kind.window)
            pages = copies.sources[index], copies.targets[index]

            def moved(part, places):
                return jax.tree.map(lambda stored: _with_copies(stored, *places), part)

            if isinstance(cache, KeysAndStates):
                return KeysAndStates(moved(cache.keys, pages), moved(cache.states, copies.slots))
            return moved(cache, copies.slots if kind.mixer.recurrent else pages)

        return list(map(copied, self.cached.layer_kinds, caches))


def _with_copies(stored: Array, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> Array:
    """Return an array with rows copied onto others, `_COPIED` bytes at a time; n is eight times a power of two.

    XLA gathers the rows of all layers before it writes any: of 512 answers of Qwen3.5-35B-A3B 30 GiB of states.
    """
    rows = max(1, _COPIED // (math.prod(stored.shape[1:]) * stored.dtype.itemsize))
    pieces = (-1, min(len(sources), 1 << rows.bit_length() - 1))
    sources, targets = sources.reshape(pieces), targets.reshape(pieces)

    def copied(index, stored):
        return stored.at[targets[index]].set(stored[sources[index]])

    return jax.lax.fori_loop(0, len(sources), copied, stored)


def _read_pages(caches: list[Cache], pages: Int[Array, " n"]) -> list[Cache]:
    return jax.tree.map(lambda stored: stored[pages], caches)


def _write_pages(caches: list[Cache], pages: Int[Array, " n"], values: list[Cache]) -> list[Cache]:
    return jax.tree.map(lambda stored, new: stored.at[pages].set(new), caches, values)


def make_sequences(
    plan: CachePlan, vocabulary: int, features: Features, device=None, states: tuple[int, Any] | None = None
) -> EngineSlots:
    """Return the state of slots without sequences, and of one more; `states` are width and dtype, for drafts."""
    zeros = partial(zeros_on, device)
    S, counts = plan.slots + 1, None
    if features.penalties:
        counts = Counts(seen=zeros((S, vocabulary), bool), answered=zeros((S, vocabulary), jnp.int32))
    empty: dict[str, Any] = {name: zeros(S, jnp.int32) for name in ("tokens", "positions")}
    if states is not None:
        empty |= {"hidden": zeros((S, states[0]), states[1]), "kept": zeros(S, jnp.int32)}
    return EngineSlots(**empty, live=zeros(S, bool), counts=counts)


def _states_of(slots: EngineSlots) -> Float[Array, "S D"]:
    assert slots.hidden is not None
    return slots.hidden


def _with_states(slots: EngineSlots, index: Int[Array, " n"], states: Float[Array, "n D"]) -> EngineSlots:
    assert slots.hidden is not None and slots.kept is not None
    hidden = slots.hidden.at[index].set(states.astype(slots.hidden.dtype))
    return replace(slots, hidden=hidden, kept=slots.kept.at[index].set(0))


def _begin(slots: EngineSlots, window: DecodeWindow) -> EngineSlots:
    """Return the window's sequences; their counts remain those of all slots."""
    old = jax.tree.map(lambda rows: rows[window.slots], replace(slots, counts=None))
    nobody = window.slots == len(slots.live) - 1
    live = (window.fresh | old.live) & ~nobody
    positions = jnp.where(window.fresh, window.positions, old.positions)
    tokens = jnp.where(window.fresh, window.tokens, old.tokens)
    kept = None if old.kept is None else jnp.where(window.fresh, 0, old.kept)
    positions = jnp.where(live, positions, 0)
    return replace(old, tokens=tokens, positions=positions, live=live, counts=slots.counts, kept=kept)


def _finish(slots: EngineSlots, window: DecodeWindow, sequences: EngineSlots) -> EngineSlots:
    """Return the state of all slots after a window of these sequences."""
    old, new = replace(slots, counts=None), replace(sequences, counts=None)
    after = jax.tree.map(lambda rows, changed: rows.at[window.slots].set(changed), old, new)
    return replace(after, counts=sequences.counts)


def _masks(window: DecodeWindow, first) -> UInt32[Array, "B words"] | None:
    """Return the masks of a step, where only the first one's tokens are known to the host beforehand."""
    return None if window.masks is None else jnp.where(first, window.masks, np.uint32(0xFFFFFFFF))


def _ring(window: DecodeWindow, plan: CachePlan, size: int) -> Int[Array, "B P"]:
    return ring_table(window.slots, plan.ring(size), plan.table)


def _with_drafts(counts: Counts, tokens: Int[Array, "B R"]) -> Counts:
    """Return counts for each row of sequences, in which the drafts before it, after the first token, are answered."""
    B, R = tokens.shape
    rows, V = jnp.arange(R), counts.seen.shape[1]
    index = (
        jnp.arange(B)[:, None, None] * R + rows[:, None],
        jnp.where(rows[1:] <= rows[:, None], tokens[:, None, 1:], V),
    )
    seen, answered = (jnp.repeat(of, R, axis=0) for of in (counts.seen, counts.answered))
    return Counts(seen=seen.at[index].set(True, mode="drop"), answered=answered.at[index].add(1, mode="drop"))


def _count(counts: Counts, slots: Int[Array, " *B"], tokens: Int[Array, " *B"]) -> Counts:
    return Counts(seen=counts.seen.at[slots, tokens].set(True), answered=counts.answered.at[slots, tokens].add(1))


def _count_prompts(counts: Counts, slots, tokens, new) -> Counts:
    V = counts.seen.shape[1]
    ids = jnp.where(tokens >= 0, tokens, V)  # one beyond the vocabulary is dropped
    rows = slots[:, None]
    seen = counts.seen.at[slots].set(False).at[rows, ids].set(True, mode="drop")
    answered = counts.answered.at[slots].set(0).at[rows, ids].add(new.astype(jnp.int32), mode="drop")
    return Counts(seen=seen, answered=answered)


def _part(trees: Trees, name: str) -> Any:
    return tuple(tree[name] for tree in trees)


def place_of(trees: Trees) -> jax.sharding.Sharding | None:
    """Return where state beside the weights belongs: on all their devices, the one they are bound to, or anywhere."""
    first = next((leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)), None)
    if (sharding := sharding_of(trees)) is not None or first is None or not first.committed:
        return sharding
    return jax.sharding.SingleDeviceSharding(next(iter(first.sharding.device_set)))


def sharding_of(trees: Trees) -> jax.sharding.Sharding | None:
    """Return the sharding of a value that all devices of the weights hold; None for a single device."""
    sharding = next((leaf.sharding for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)), None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.device_set) == 1:
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
