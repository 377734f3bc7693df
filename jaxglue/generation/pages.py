"""Memory of keys and values: its plan, and who holds which page.

Layers that see all tokens share one numbering of pages, which sequences take as they grow; answers of one prompt hold
its full pages together. Layers with a window have a ring of pages for each slot, where new tokens replace old ones, and
those of linear attention a state for each slot.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jaxtyping import Array, Bool, Int

from jaxglue.models.config import CacheSizes, DecoderConfig, LayerKind
from jaxglue.ops.recurrence import Replayed

PAGE = 64
"""Tokens in a page."""
MOST_SLOTS = 512
"""Sequences that decode at once where memory has room for more."""
PREFILL_TOKENS, PROMPTS = 4096, 64
"""Prompts and their tokens that share a forward pass, at most; a longer prompt has one of its own."""
_RESERVE = 2**30
_SHARE = 0.9
"""Share of the free memory for the cache."""
_LOGITS = 4
"""Float32 arrays of a slot's logits in use at once, at most."""


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Size of the cache, and how many sequences share it."""

    slots: int
    """S, sequences that decode at once."""
    pages: int
    """Pages of layers that see all tokens, without page 0."""
    table: int
    """P, the most pages of a sequence."""
    bytes: int
    """Memory of all layers' pages."""

    def __str__(self) -> str:
        return f"{self.slots} at a time, key/value cache {self.bytes / 2**20:,.0f} MiB"

    def ring(self, window: int) -> int:
        """Return a slot's pages in a layer with this window: enough for its tokens wherever the first page begins."""
        return min(-(-(window - 1) // PAGE) + 1, self.table)

    def pages_in(self, window: int | None) -> int:
        """Return the pages of a layer with this window, page 0 included."""
        return 1 + (self.pages if window is None else self.slots * self.ring(window))


def plan_cache(
    lengths: Sequence[tuple[int, int]],
    config: DecoderConfig,
    dtype,
    *,
    cache_dtype=None,
    batch_size: int | None = None,
    free: float | None = None,
    siblings: Sequence[int] | int = 1,
    limit: str = "--max-tokens",
    rows: int = 1,
    begun: int = 0,
) -> CachePlan:
    """Plan the cache for answers.

    Args:
        lengths: tokens of each answer's prompt, and of prompt and answer together at most; at least one.
        config: the model's shape.
        dtype: of activations.
        cache_dtype: of keys and values; by default that of activations.
        batch_size: the most sequences at once; by default as many as memory holds, up to `MOST_SLOTS`.
        free: bytes for cache and activations; by default the device's.
        siblings: answers, each included, that hold the full pages of its prompt together.
        limit: flag of an answer's most tokens.
        rows: tokens of a sequence in a step, of which recurrent layers keep what they give to its states.
        begun: sequences that keep their pages, also while they wait; by default those at once.

    Raises:
        ValueError: too little memory for the longest sequence.
    """
    prompts, ends = np.array(lengths).T
    shared = (prompts - 1) // PAGE * (1 - 1 / np.asarray(siblings))
    longest, table = int(ends.max()), _bucket(pages_of(int(ends.max())))
    free = free_bytes() if free is None else free
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    row = int(max(prompts.max(), min(PREFILL_TOKENS, prompts.sum())))
    spare = _SHARE * free - activation_bytes(config, dtype, row)
    page, rings = _page_bytes(config, cache_dtype, CachePlan(slots=1, pages=1, table=table, bytes=0))
    state = state_bytes(config, dtype) + (rows * _kept_bytes(config, dtype) if rows > 1 else 0)
    slot = rings + state + _LOGITS * 4 * config.vocab_size
    held = ((prompts + ends) / 2 / PAGE - shared).mean()  # many answers end early; the last to come waits
    expected = math.ceil(held) * page
    most = min(len(lengths), batch_size or MOST_SLOTS)
    slots = max(1, min(most, _rounded_down(int(spare / (slot + expected)))))
    longest_need = pages_of(longest)
    needed = max(_bucket(math.ceil(np.sort(-(-ends // PAGE) - shared)[-max(slots, begun) :].sum())), longest_need)
    room = _rounded_down(int((spare - slots * slot) / page) - 1) if page else needed
    pages = min(needed, max(room, longest_need))  # the estimate of activations refuses no single sequence
    size = (pages + 1) * page + slots * rings + (slots + 1) * state
    if size > free:
        alone = (longest_need + 1) * page + rings + 2 * state
        raise ValueError(
            f"a sequence of {longest:,} tokens needs {alone / 2**30:.1f} GiB of cache, but {free / 2**30:.1f} GiB of "
            f"memory are free: lower {limit}, shorten the prompt, or hold the weights with --quantize nf4"
        )
    return CachePlan(slots=slots, pages=pages, table=table, bytes=size)


def _page_bytes(config: DecoderConfig, dtype, plan: CachePlan) -> tuple[int, int]:
    """Return the bytes of a page of all layers that see all tokens, and of a slot's rings in the others."""
    pages = [(kind.window, PAGE * kind.mixer.token_bytes(kind, dtype)) for kind in config.layer_kinds]
    rings = sum(plan.ring(window) * page for window, page in pages if window is not None)
    return sum(page for window, page in pages if window is None), rings


def _bucket(pages: int) -> int:
    """Return `pages` rounded up to an eighth of a power of two, so that few programs are compiled."""
    step = max(2, 1 << (pages - 1).bit_length() - 3) if pages > 8 else 1 << (pages - 1).bit_length()
    return max(2, -(-pages // step) * step)


def _rounded_down(count: int) -> int:
    """Return a count of at least 0 rounded down to an eighth of a power of two."""
    step = 1 << max(count.bit_length() - 4, 0)
    return max(count, 0) // step * step


def pages_of(length: int) -> int:
    """Return the pages that hold a sequence of this length."""
    return -(-length // PAGE)


def token_bytes(config: DecoderConfig, dtype) -> int:
    """Return a token's bytes in the cache of all layers, whose float8 values have scales."""
    return sum(kind.mixer.token_bytes(kind, dtype) for kind in config.layer_kinds)


def state_bytes(config: DecoderConfig, dtype) -> int:
    """Return a sequence's bytes in recurrent layers, however long it is."""
    return sum(kind.mixer.state_bytes(dtype) for kind in config.layer_kinds)


def _kept_bytes(config: DecoderConfig, dtype) -> int:
    """Return the bytes of what a token gives to the states of recurrent layers."""
    mixers = [kind.mixer for kind in config.layer_kinds if kind.mixer.recurrent]
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for mixer in mixers for spec in mixer.step_values(dtype))


def activation_bytes(config: DecoderConfig, dtype, tokens: int) -> float:
    """Return an upper estimate of a prefill's activations, and of expanded weights of a layer.

    Rows above `PREFILL_TOKENS` pass in pieces, apart from attention.
    """
    D, shapes, moe = config.stream_width, config.shapes, config.moe
    heads = max((config.num_attention_heads + 2 * shape.kv_heads) * shape.head_dim for shape in shapes)
    F = max(shape.intermediate_size for shape in shapes)
    hidden = F if moe is None else moe.num_experts_per_tok * (moe.intermediate_size + D) + moe.shared_size
    matrices = 3 * D * (F if moe is None else moe.num_experts * moe.intermediate_size + moe.shared_size)
    whole, piece = 6 * D + 2 * heads + max(mixer.prefill_values for mixer in config.mixer_kinds), 3 * hidden
    elements = tokens * whole + min(tokens, PREFILL_TOKENS) * piece + 2 * matrices
    return _RESERVE * (jax.default_backend() != "cpu") + elements * jnp.dtype(dtype).itemsize


def free_bytes(limit: float = math.inf, device: jax.Device | None = None) -> float:
    """Return a device's free memory within a limit of its use; on CPUs, half of the host's.

    Args:
        limit: bytes that may be in use.
        device: by default the first.
    """
    if stats := (device or jax.local_devices()[0]).memory_stats():
        return min(limit, stats["bytes_limit"]) - stats["bytes_in_use"]
    return min(limit, psutil.virtual_memory().available / 2)


class PagePool:
    """Pages with the number of their holders; page 0 is nobody's.

    Free pages keep their contents until they are taken: those with a name last, the oldest first.
    """

    def __init__(self, pages: int):
        self._free, self._kept = list(range(pages, 0, -1)), dict[int, None]()
        self._holders = [0] * (pages + 1)
        self._named, self._names = dict[bytes, int](), dict[int, bytes]()

    def __len__(self) -> int:
        """Return the number of free pages."""
        return len(self._free) + len(self._kept)

    def take(self, count: int) -> list[int]:
        """Return free pages, with one holder each."""
        assert count <= len(self)
        taken = [self._free.pop() if self._free else self._forget() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder of these pages."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Remove a holder of these pages; those without any are free."""
        for page in reversed(list(pages)):  # the first ones, which more texts begin with, are kept longest
            self._holders[page] -= 1
            if not self._holders[page] and page in self._names:
                self._kept[page] = None
            elif not self._holders[page]:
                self._free.append(page)

    def name(self, pages: Iterable[int], names: Iterable[bytes]) -> None:
        """Name held pages by their contents; pages and names that have one another already stay so."""
        for page, name in zip(pages, names, strict=False):
            if name not in self._named and page not in self._names:
                self._named[name], self._names[page] = page, name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Return the pages with these names, up to the first that there is none of."""
        found = []
        for name in names:
            if (page := self._named.get(name)) is None:
                break
            found.append(page)
        return found

    def kept(self, pages: Iterable[int]) -> int:
        """Return how many of these pages are free."""
        return sum(page in self._kept for page in pages)

    def held_by(self, holders: Iterable[Iterable[int]], but: Collection[int] = ()) -> int:
        """Return how many pages no others hold than these, without some pages."""
        counts = Counter(page for pages in holders for page in pages if page not in but)
        return sum(self._holders[page] == count for page, count in counts.items())

    def forget(self) -> None:
        """Forget all names."""
        self._named.clear()
        self._names.clear()
        self._free += self._kept
        self._kept.clear()

    def _forget(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page], self._named[self._names.pop(page)]
        return page


def page_names(tokens: Int[np.ndarray, " n"], ranks: Bool[np.ndarray, " R"] | None = None) -> list[bytes]:
    """Return a digest for each full page of a text, of its tokens, those before them, and the ranks in use."""
    names, name = list[bytes](), b"" if ranks is None else ranks.tobytes()
    for page in np.asarray(tokens, np.int32)[: len(tokens) // PAGE * PAGE].reshape(-1, PAGE):
        name = hashlib.blake2b(name + page.tobytes(), digest_size=16).digest()
        names.append(name)
    return names


def ring_table(slots: Int[Array, " S"], ring: int, table: int) -> Int[Array, "S P"]:
    """Return the pages of these slots in the rings of a layer with a window, of numpy or jax arrays."""
    return 1 + slots[:, None] * ring + np.arange(table) % ring


def make_caches(plan: CachePlan, config: DecoderConfig, dtype, activations, device=None, rows: int = 1) -> list[Any]:
    """Return the empty caches of all layers; page 0, and a slot more than the plan's, belong to no sequence.

    Args:
        plan: of the cache.
        config: the model's shape.
        dtype: of keys and values.
        activations: dtype of activations.
        device: device or sharding.
        rows: tokens of a sequence in a step; of several, recurrent layers keep what they give to its states.
    """

    def cache(kind: LayerKind) -> Any:
        slots = plan.slots + 1
        sizes = CacheSizes(plan.pages_in(kind.window), PAGE, slots, dtype, activations, device)
        made = kind.mixer.make_cache(kind, sizes)
        if rows == 1 or not kind.mixer.recurrent:
            return made
        return Replayed.empty(made, kind.mixer.step_values(activations), slots, rows, device)

    return [cache(kind) for kind in config.layer_kinds]
