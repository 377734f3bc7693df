"""Which answers decode next, in which slots and pages: host work alone, between two windows of steps.

Answers wait in order, get a slot and the pages of their prompt, take further pages as they grow, and leave at their
stop token or limit. Where pages run out, the sequence that came last gives its own up and waits again, with its tokens.
"""

from collections import abc, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.grammar import Grammar, Matcher
from jaxglue.generation.pages import PAGE, PREFILL_TOKENS, PROMPTS, CachePlan, PagePool, page_names, pages_of
from jaxglue.ops.segments import aligned
from jaxglue.vision.rows import PromptImages

LONGEST_SUFFIX = 512
"""Tokens after a known beginning up to which reading its keys for each takes less time than computing them again.

For short texts it is half of them: a prompt's tokens cost less in longer rows.
"""
_GATHERED = 16
"""Part of the slots that is free before some of many answers begin that wait for one."""
_LONG = 32
"""Behind very long texts a suffix of this part of them is read so, too."""
Finish = Literal["stop", "length", "until"]
"""Why an answer ended: a stop token, its limit or the model's, or the caller."""


@dataclass(frozen=True)
class Request:
    """A prompt to answer."""

    prompt: abc.Sequence[int] | Int[np.ndarray, " n"]
    """Its tokens."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    index: int = 0
    """Distinguishes the random numbers of prompts with one seed."""
    n: int = 1
    """Answers, whose random numbers differ."""
    stop: Collection[int] = ()
    """Further tokens that end its answers."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to these tokens' logits."""
    top_log_probs: int = 0
    """Most likely tokens to report with each of its answers'."""
    ranks: Bool[np.ndarray, " R"] | None = None
    """Ranks of the adapters that its tokens use; None for all."""
    grammar: Grammar | None = None
    """Grammar of its answers; None for free ones."""
    holds: bool = False
    """Its answer's pages stay when it has ended, until they are released: another request may go on from it."""
    after: "Sequence | None" = None
    """The answer that held its pages and that the prompt goes on from, if there is one."""
    images: PromptImages | None = None
    """Its images; None for text alone."""


class Tokens(NamedTuple):
    """New tokens of an answer, with what `Completion` says of them."""

    ids: Int[np.ndarray, " L"]
    log_probs: Float[np.ndarray, " L"]
    model_log_probs: Float[np.ndarray, " L"]
    top_ids: Int[np.ndarray, "L top"]
    top_log_probs: Float[np.ndarray, "L top"]


@dataclass(eq=False)
class Sequence:
    """An answer that waits or grows."""

    number: int
    """Index of its request."""
    answer: int
    """Index among the answers of its request."""
    request: Request
    end: int
    """Limit of prompt and answer together."""
    received: list[Tokens] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    """Its tokens so far."""
    length: int = 0
    """Tokens of prompt and answer that are known."""
    reach: int = 0
    """Tokens of both after all windows that were given out, at most."""
    sure: int = 0
    """Tokens that these have at least, unless they end it; of a grammar, which may refuse all, those that are known."""
    windows: int = 0
    """Given out and not received yet."""
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    """Its place in the grammar, if it follows one."""
    drafted: int = 0
    """Tokens that a head drafted for it, and those of them that were accepted."""
    accepted: int = 0
    back: bool = False
    """Its grammar has refused tokens, so that the device must go back to those that are known."""

    def __post_init__(self) -> None:
        self.length = self.reach = self.sure = len(self.request.prompt)
        self.matcher = self.request.grammar.start() if self.request.grammar else None

    @property
    def waits(self) -> bool:
        """Return whether its next window depends on the result of the one under way."""
        return self.matcher is not None and self.windows > 0

    @property
    def ends_under_way(self) -> bool:
        """Return whether it certainly ends in the windows that were given out."""
        return self.sure >= self.end

    @property
    def tokens(self) -> Int[np.ndarray, " n"]:
        """Return the tokens of prompt and answer so far."""
        parts = [np.asarray(self.request.prompt, np.int32), *(part.ids for part in self.received)]
        return np.concatenate(parts)

    def names(self, tokens: Int[np.ndarray, " n"]) -> list[bytes]:
        """Return the names of the pages of its first tokens, in which its images' stand for their content."""
        images = self.request.images
        return page_names(tokens if images is None else images.keyed(tokens), self.request.ranks)


class Prefill(NamedTuple):
    """Tokens whose keys and values are to be written to a slot's pages."""

    tokens: Int[np.ndarray, " n"]
    slot: int
    pages: list[int]
    begin: int = 0
    """Tokens whose keys and values are there."""
    ranks: Bool[np.ndarray, " R"] | None = None
    """As in `Request`."""
    images: PromptImages | None = None
    """As in `Request`."""
    fork: int = 0
    """Tokens of the prompt before its last, as far as they are among these."""
    tile: int = 1
    """Tokens at whose multiples in a row they begin, and those behind the fork."""

    @property
    def places(self) -> Int[np.ndarray, " n"]:
        """Return the places of the tokens in the part of a row that they take."""
        place = np.arange(len(self.tokens))
        return np.where(place < self.fork, place, place - self.fork + aligned(self.fork, self.tile))

    @property
    def missing(self) -> int:
        """Return the tokens whose keys and values are not there."""
        return len(self.tokens) - self.begin

    @property
    def room(self) -> int:
        """Return the tokens of a row that they take."""
        return aligned(self.fork, self.tile) + aligned(len(self.tokens) - self.fork, self.tile)


@dataclass(eq=False)
class PageCopy:
    """Pages outside of the cache."""

    count: int
    values: Any = None
    """Of each layer; None until the copy is made."""


@dataclass(eq=False)
class Held:
    """Pages of an answer that has ended, in the cache or outside of it."""

    pages: list[int]
    copy: PageCopy | None = None


@dataclass
class SchedulerOutput:
    """Pages to save and to load, prompts to prefill, pages to copy, and then a window of steps."""

    saves: list[tuple[PageCopy, list[int]]] = field(default_factory=list)
    """Pages that leave the cache, before all else."""
    loads: list[tuple[PageCopy, list[int]]] = field(default_factory=list)
    """Pages that come back to it, after those that leave."""
    prompts: list[Prefill] = field(default_factory=list)
    suffixes: list[Prefill] = field(default_factory=list)
    """Prompts of which the beginnings are there, or are among the prompts; after these."""
    read: int = 0
    """Tokens of both that are computed."""
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages from and to, copied after the prefill."""
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    """Slots from and to, copied with all that a slot has besides numbered pages."""
    fresh: list[Sequence] = field(default_factory=list)
    """Answers that begin, or go on from what the host knows: after they waited, or where a grammar refused tokens."""
    answers: list[Sequence] = field(default_factory=list)
    """Answers that decode in the window."""

    @property
    def tokens(self) -> int:
        """Return the known tokens of the answers that decode, with their prompts'."""
        return sum(sequence.length for sequence in self.answers)

    @property
    def rows(self) -> Iterator[list[Prefill]]:
        """Yield prompts that share a row of `PREFILL_TOKENS`, `PROMPTS` at most, or one that is longer."""
        return _packed(self.prompts, PREFILL_TOKENS, lambda prompt: prompt.room)

    @property
    def suffix_rows(self) -> Iterator[list[Prefill]]:
        """Yield suffixes that share a row of `LONGEST_SUFFIX` tokens."""
        return _packed(self.suffixes, LONGEST_SUFFIX, lambda suffix: suffix.missing)


def _packed(prefills: abc.Sequence[Prefill], most: int, tokens_of: Callable[[Prefill], int]) -> Iterator[list[Prefill]]:
    """Yield those that share a row of so many tokens, `PROMPTS` at most, in order; a longer one is alone."""
    row, used = list[Prefill](), 0
    for prefill in prefills:
        count = tokens_of(prefill)
        if row and (used + count > most or len(row) == PROMPTS):
            yield row
            row, used = [], 0
        row.append(prefill)
        used += count
    if row:
        yield row


class Scheduler:
    """Slots and pages of answers.

    Args:
        plan: of the cache.
        steps: of a window, each of which chooses a token of every answer.
        remembers: let prompts share the pages of texts that begin alike, also after these have ended.
        rewinds: answers can go back some tokens in what they hold; otherwise it is computed again.
        rows: tokens that a step chooses at most, where a head drafts; then at least one of a prompt's is always
            computed, since the first draft reads its state.
        outside: pages of held answers for which there is room outside of the cache.
        tile: answers have training's bits, whose keys are in tiles of so many tokens; None for any bits. Pages of
            answers then serve no prompt, whose tiles do not begin anew within it.
        gathers: more answers than find a slot wait until a part of the slots is free, and for others to their prompt:
            all others wait for a pass of prompts, which takes long however few these are.
        most_read: tokens of prompts before a window from which the next prompt waits for a later one: nobody waits for
            those of all who come at once, and the first of these have their tokens before the last. None for any.
    """

    def __init__(
        self,
        plan: CachePlan,
        steps: int,
        *,
        remembers: bool = False,
        rewinds: bool = True,
        rows: int = 1,
        outside: int = 0,
        tile: int | None = None,
        gathers: bool = False,
        most_read: int | None = None,
    ):
        self._tile = tile
        self._remembers, self._rewinds, self._outside = remembers, rewinds, outside
        self._least, self._drafts = steps, rows > 1
        self._held, self._saves = dict[Sequence, Held](), list[tuple[PageCopy, list[int]]]()
        self._waiting, self._steps = deque[Sequence](), steps * rows
        self._pool, self._slots = PagePool(plan.pages), list(range(plan.slots - 1, -1, -1))
        self._pages, self._gathered = max(plan.pages, 1), max(plan.slots // _GATHERED, 1) if gathers else 1
        self._most_read = float("inf") if most_read is None else most_read
        self._running: list[Sequence] = []
        self._promised = 0
        """Pages that the running answers are likely to take yet."""

    def add(self, answers: Iterable[Sequence]) -> None:
        """Let further answers wait, in order."""
        for sequence in answers:
            sequence.reach = sequence.sure = sequence.length
            self._waiting.append(sequence)

    def forget(self) -> None:
        """Forget the texts whose pages were kept for prompts that begin alike: the weights have changed."""
        for sequence in [*self._held]:
            self.release(sequence)
        self._pool.forget()

    @property
    def is_done(self) -> bool:
        """Return whether all answers have ended, or will in windows under way."""
        return not self._waiting and all(sequence.ends_under_way for sequence in self._running)

    @property
    def waiting(self) -> list[Request]:
        """Return the requests with answers that wait for their first slot, in order."""
        return list({id(each.request): each.request for each in self._waiting if not each.received}.values())

    @property
    def free_slots(self) -> int:
        """Return the slots less the answers that wait for one; below 0 where more wait."""
        return len(self._slots) - len(self._waiting)

    @property
    def beginning(self) -> int:
        """Return how many of the answers that wait begin with the next window where no prompt is known."""
        read, requests, count = 0, set[int](), 0
        for sequence in islice(self._waiting, len(self._slots)):
            if read >= self._most_read:
                break
            count, read = count + 1, read + sequence.length * (id(sequence.request) not in requests)
            requests.add(id(sequence.request))
        return count

    def next(self, resting: Collection[Sequence] = ()) -> SchedulerOutput | None:
        """Return the next window and what precedes it; None while results of windows under way decide.

        Args:
            resting: answers that keep their slots and do not decode in it.
        """
        for sequence in [sequence for sequence in self._running if sequence.ends_under_way]:
            self._leave(sequence, ends=True)  # it ends in a window under way, so its slot is free after that
        work = SchedulerOutput()
        if not self._grow():
            return None
        self._promised = sum(map(self._promise, self._running))
        if not self._running or len(self._slots) >= min(len(self._waiting), self._gathered):
            while self._waiting and self._slots and work.read < self._most_read and self._admit(work):
                pass
        rests = set(resting).difference(work.fresh)  # who has just got a slot begins
        going = [sequence for sequence in self._running if not sequence.waits and sequence not in rests]
        work.fresh += [sequence for sequence in going if sequence.back and sequence not in work.fresh]
        # The longest first: programs of attention begin in this order, and the last ones to end are short.
        work.answers = sorted(going, key=lambda sequence: -sequence.reach)
        for sequence in work.answers:
            sequence.windows, sequence.back = sequence.windows + 1, False
            self._foresee(sequence)
        if not work.answers:
            return None
        work.saves, self._saves = self._saves, []
        return work

    def _foresee(self, sequence: Sequence) -> None:
        """Set how far an answer comes in the windows that were given out."""
        sequence.reach = min(sequence.length + sequence.windows * self._steps, sequence.end)
        windows = 0 if sequence.matcher else sequence.windows
        sequence.sure = min(sequence.length + windows * self._least, sequence.end)

    def receive(self, sequence: Sequence, tokens: Tokens, ends: bool, *, back: bool = False) -> None:
        """Note an answer's new tokens, whether it ended before its limit, and whether its grammar refused further ones.

        Those of the device that it refused are chosen again.
        """
        sequence.received.append(tokens)
        sequence.new += tokens.ids.tolist()
        sequence.length += len(tokens.ids)
        if ends:
            self.end(sequence)
            return
        self._foresee(sequence)
        sequence.back = back
        if back and not self._rewinds:
            self._leave(sequence)
            self._waiting.appendleft(sequence)

    def end(self, sequence: Sequence) -> None:
        """End an answer early."""
        sequence.end = sequence.length
        if sequence in self._running:
            self._leave(sequence, ends=True)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Let go of the pages that an answer held when it ended: nothing goes on from it any more."""
        if (held := self._held.pop(sequence, None)) is not None:
            self._let_go(held)

    def _let_go(self, held: Held) -> None:
        self._pool.give_back(held.pages)
        if held.copy is not None:
            self._outside += held.copy.count

    def interrupt(self, sequence: Sequence) -> None:
        """Take slot and pages of an answer, or its place in the queue; it goes on once it is added again."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)

    @property
    def cache_use(self) -> float:
        """Return the share of pages that answers hold."""
        return 1 - len(self._pool) / self._pages

    def _leave(self, sequence: Sequence, *, ends: bool = False) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        if ends and self._remembers and sequence.request.holds:
            self._held[sequence] = Held(sequence.pages)
        else:
            if self._remembers and sequence.length == sequence.end:
                # The last token is not in the cache, nor any after it in a window under way in a full page.
                self._pool.name(sequence.pages, self._names(sequence, sequence.tokens[:-1]))
            self._pool.give_back(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.pages = None, []

    def _available(self, but: Held | None = None, needed: Collection[int] = ()) -> int:
        """Return the pages that are free, or would be if held ones left the cache, but for those that are needed."""
        holders = [held.pages for held in self._held.values() if held is not but]
        return len(self._pool) + self._pool.held_by(holders, frozenset(needed))

    def _has(self, count: int, but: Held | None = None) -> bool:
        """Return whether so many pages are available; held ones, which take long to count, often need not be."""
        return count <= len(self._pool) or count <= self._available(but)

    def _take(self, count: int, but: Held | None = None) -> list[int]:
        """Take pages, for which held ones leave the cache where too few are free: those of the last ones to end.

        Their episodes are the last to go on, if all wait alike.
        """
        if len(self._pool) < count:
            for sequence, held in reversed([*self._held.items()]):
                if held is not but and held.pages:
                    self._move_out(sequence, held)
                if len(self._pool) >= count:
                    break
        return self._pool.take(count)

    def _move_out(self, sequence: Sequence, held: Held) -> None:
        """Let held pages leave the cache; without room outside they are computed again when they are needed."""
        if (count := len(held.pages)) <= self._outside:
            held.copy = PageCopy(count)
            self._outside -= count
            self._saves.append((held.copy, held.pages))
        else:
            del self._held[sequence]
        self._pool.give_back(held.pages)
        held.pages = []

    def _grow(self) -> bool:
        """Take the pages that the window fills, from the answers that came last where none are free.

        Returns:
            False if it must be known first how far these came.
        """
        for sequence in [each for each in self._running if not each.waits and self._lack(each) > 0]:
            while sequence.slot is not None and not self._has(lack := self._lack(sequence)):
                last = self._running[-1]
                if last.windows:
                    return False
                self._leave(last)
                self._waiting.appendleft(last)
            if sequence.slot is not None:
                sequence.pages += self._take(lack)
        return True

    def _lack(self, sequence: Sequence) -> int:
        return pages_of(min(sequence.reach + self._steps, sequence.end)) - len(sequence.pages)

    def _admit(self, work: SchedulerOutput) -> bool:
        """Give slots to the next answer, and to those after it that continue the same prompt; False without pages."""
        first = self._waiting[0]
        if first.request.after is not None and (held := self._held.get(first.request.after)) is not None:
            if self._may_extend(first):
                return self._go_on(first, held, work)
            self.release(first.request.after)
        known = first.length - 1  # the window begins with the last known token
        tokens = first.tokens[:known]
        shared, all_pages = known // PAGE, pages_of(min(first.length + self._steps, first.end))
        group = self._siblings(first)
        names = self._names(first, tokens) if self._remembers else []
        there = self._pool.find(names[: (known - 1) // PAGE] if self._drafts else names)
        images = first.request.images
        if images is not None and images.places[-1] >= len(there) * PAGE:
            there = []  # features enter rows of whole prompts alone
        if known - len(there) * PAGE > min(LONGEST_SUFFIX, known // 2):
            there = []
        shared_anew = shared - len(there) + self._pool.kept(there)
        free = self._available(needed=there)
        spare = free - self._promised - shared_anew
        fits = min(len(group), len(self._slots), max(spare, 0) // max(self._expected(first) - shared, 1))
        if not self._running and not work.fresh:
            fits = max(fits, 1)  # the pool holds the longest sequence
        elif fits < min(len(group), self._gathered):
            return False  # the prompt would pass again for its other answers
        if fits < 1 or shared_anew + fits * (all_pages - shared) > free:
            return False
        self._pool.share(there)
        prefix = there + self._take(shared - len(there))
        self._pool.name(prefix, names)
        for index, sequence in enumerate(group[:fits]):
            self._waiting.popleft()
            sequence.slot, sequence.pages = self._slots.pop(), prefix + self._take(all_pages - shared)
            if index:
                self._pool.share(prefix)
            self._running.append(sequence)
            self._promised += self._promise(sequence)
            work.fresh.append(sequence)
        if known:
            self._prefill(work, group[:fits], tokens, len(there) * PAGE)
        return True

    def _names(self, sequence: Sequence, tokens: Int[np.ndarray, " n"]) -> list[bytes]:
        """Return the names of the pages of a sequence's first tokens that serve other texts which begin alike."""
        return sequence.names(tokens if self._tile is None else tokens[: len(sequence.request.prompt) - 1])

    def _may_extend(self, sequence: Sequence) -> bool:
        """Return whether the tokens after those of held pages are computed behind them, and not all of them again."""
        assert sequence.request.after is not None
        known, held = sequence.length - 1, sequence.request.after.length - 1
        if (images := sequence.request.images) is not None and images.places[-1] >= held:
            return False  # features enter rows of whole prompts alone
        return not sequence.received and known - held <= max(LONGEST_SUFFIX, known // _LONG)

    def _go_on(self, first: Sequence, held: Held, work: SchedulerOutput) -> bool:
        """Give a slot to an answer to a prompt that goes on from held pages; False without further ones."""
        assert first.request.after is not None
        begin, known = first.request.after.length - 1, first.length - 1
        all_pages = pages_of(min(first.length + self._steps, first.end))
        lack = max(all_pages - len(held.pages), 0)
        if not self._has(lack + self._promised, held) and (self._running or work.fresh or not self._has(lack, held)):
            return False
        further = self._take(lack, held)
        del self._held[first.request.after]
        self._waiting.popleft()
        self._pool.give_back(held.pages[all_pages:])
        first.slot, first.pages = self._slots.pop(), held.pages[:all_pages] + further
        if held.copy is not None:
            self._outside += held.copy.count
            work.loads.append((held.copy, first.pages[: pages_of(begin)]))
        self._running.append(first)
        self._promised += self._promise(first)
        work.fresh.append(first)
        tokens = first.tokens[:known]
        for start in range(begin, known, LONGEST_SUFFIX):
            self._prefill(work, [first], tokens[: start + LONGEST_SUFFIX], start)
        return True

    def _siblings(self, first: Sequence) -> list[Sequence]:
        """Return the answers at the front that are to the same request: their numbers may be those of others, too."""
        if first.received:
            return [first]
        group = list[Sequence]()
        for sequence in self._waiting:
            if sequence.request is not first.request or sequence.received:
                break
            group.append(sequence)
        return group

    def _prefill(
        self, work: SchedulerOutput, group: abc.Sequence[Sequence], tokens: Int[np.ndarray, " n"], begin: int
    ) -> None:
        first, *others = group
        assert first.slot is not None
        if begin < len(tokens):
            fork = min(len(first.request.prompt) - 1, len(tokens))
            own: Any = {"fork": fork, "tile": self._tile or 1}
            prefill = Prefill(tokens, first.slot, first.pages, begin, first.request.ranks, first.request.images, **own)
            (work.suffixes if begin else work.prompts).append(prefill)
            work.read += prefill.missing if begin else prefill.room
        full, partial = divmod(len(tokens), PAGE)
        for sequence in others:
            assert sequence.slot is not None
            work.slot_copies.append((first.slot, sequence.slot))
            if partial:
                work.page_copies.append((first.pages[full], sequence.pages[full]))

    def _expected(self, sequence: Sequence) -> int:
        """Return the pages that an answer is likely to need: half of those that it may still take."""
        return pages_of((sequence.reach + sequence.end + 1) // 2)

    def _promise(self, sequence: Sequence) -> int:
        """Return the pages that an answer is likely to take yet."""
        return max(self._expected(sequence) - len(sequence.pages), 0)
