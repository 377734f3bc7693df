"""The scheduler: an order of windows, and random walks beside a device that is played."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from selection import repeats

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.pages import PAGE, CachePlan
from jaxglue.generation.scheduler import Request, Scheduler, Sequence, Tokens

STEPS, STOP, OUTSIDE = 8, 7, 9


def test_a_window_begins_with_the_longest_answers():
    plan = CachePlan(slots=4, pages=64, table=16, bytes=0)
    scheduler = Scheduler(plan, STEPS)
    lengths = [5, 300, 70, 9, 200]  # the last one waits for a slot
    requests = [Request([1] * length, SamplingConfig(max_tokens=8 if length == 70 else 100)) for length in lengths]
    scheduler.add(
        [Sequence(i, 0, each, len(each.prompt) + each.sampling.max_tokens) for i, each in enumerate(requests)]
    )
    windows = [scheduler.next() for _ in range(2)]
    assert [[len(answer.request.prompt) for answer in work.answers] for work in windows] == [
        [300, 70, 9, 5],
        [300, 200, 9, 5],
    ]


def test_answers_that_wait_begin_together():
    """A pass of prompts holds up all others: some slots stay free until several answers to a prompt find one."""
    lengths = np.random.default_rng(0).integers(100, 1000, 32 * 8)
    requests = [Request([1] * 70, SamplingConfig(max_tokens=1000), n=8) for _ in range(32)]
    scheduler = Scheduler(CachePlan(slots=64, pages=4096, table=32, bytes=0), STEPS, gathers=True)
    scheduler.add(Sequence(i // 8, i % 8, requests[i // 8], 70 + int(length)) for i, length in enumerate(lengths))
    passes, begun = list[int](), 0
    while (work := scheduler.next()) is not None:
        passes += [len(work.prompts)] if work.prompts else []
        begun += len(work.fresh)
        receive(scheduler, work, [[2] * 8] * len(work.answers))
    assert begun == len(lengths) and len(passes) <= sum(passes) <= 2 * len(requests)


def test_nobody_waits_for_the_prompts_of_many_who_come_at_once():
    """But where all are wanted soon; what is known of prompts, and siblings', is not read again."""
    many = [Request([n] * 500, SamplingConfig(max_tokens=80), n=1 + (n == 3)) for n in range(50)]

    def begun(**options) -> list[int]:
        scheduler = Scheduler(CachePlan(slots=64, pages=4096, table=32, bytes=0), STEPS, **options)
        scheduler.add([Sequence(n, i, each, 580) for n, each in enumerate(many) for i in range(each.n)])
        windows = list[int]()
        while scheduler.waiting:
            beginning, work = scheduler.beginning, scheduler.next()
            windows.append(len(work.fresh))
            assert beginning == windows[-1] and work.read == 499 * len(work.prompts)
            receive(scheduler, work, [[2] * 8] * len(work.answers))
        return windows

    assert begun(most_read=7680) == [17, 16, 16, 2] and begun() == [51]


def test_known_beginnings_are_not_read_before_a_window():
    scheduler = Scheduler(CachePlan(slots=64, pages=4096, table=128, bytes=0), STEPS, remembers=True, most_read=7680)
    text = [1] * (31 * PAGE)
    scheduler.add([Sequence(0, 0, Request(text, SamplingConfig(max_tokens=8)), len(text) + 8)])
    receive(scheduler, work := scheduler.next(), [[2] * 8] * len(work.answers))
    requests = [Request([*text, n], SamplingConfig(max_tokens=8)) for n in range(40)]
    scheduler.add([Sequence(n, 0, each, len(text) + 9) for n, each in enumerate(requests)])
    work = scheduler.next()
    assert len(work.fresh) == 40 and work.read < 2 * PAGE


@pytest.mark.parametrize("place", [None, 20, 90])
def test_a_turn_behind_a_new_image_is_computed_whole(place):
    """Features enter rows of whole prompts alone; held pages serve turns whose images are in them."""
    scheduler = Scheduler(CachePlan(slots=1, pages=64, table=16, bytes=0), STEPS, remembers=True)
    first = Sequence(0, 0, Request([1] * 70, SamplingConfig(max_tokens=8), holds=True), 78)
    scheduler.add([first])
    while (work := scheduler.next()) is not None:
        receive(scheduler, work, [[2] * 8] * len(work.answers))
    keyed = lambda tokens: tokens  # noqa: E731
    images = None if place is None else SimpleNamespace(places=np.array([place]), keyed=keyed)
    request = Request([1] * 70 + [2] * 8 + [3] * 20, SamplingConfig(max_tokens=8), after=first, images=images)
    scheduler.add([Sequence(1, 0, request, 106)])
    work = scheduler.next()
    begins = [prefill.begin for prefill in (*work.prompts, *work.suffixes)]
    assert begins == ([0] if place == 90 else [77])


def written(answer: Sequence, position: int) -> int:
    """Return the token of an answer at a position of its text: the same however often it is decoded."""
    if position < len(answer.request.prompt):
        return int(answer.request.prompt[position])
    number = (answer.number * 1009 + answer.answer * 131 + position * 31) % 4099
    return STOP if number % 97 == 0 else 100 + number


@dataclass
class Matcher:
    """A grammar that refuses some tokens unless they were chosen among those that it takes."""

    position: int

    def take(self, tokens: list[int]) -> int:
        taken = 0
        while taken < len(tokens) and (not taken or (self.position + taken) % 5):
            taken += 1
        self.position += taken
        return taken


@dataclass
class Grammar:
    prompt: int

    def start(self) -> Matcher:
        return Matcher(self.prompt)


@dataclass
class Device:
    """Pages with the tokens whose keys they hold, and slots, as windows leave them."""

    pages: dict[int, list[int | None]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    """The position of each slot's last token, which is not in the cache."""
    rows: int = 1
    """Tokens that a step verifies, of which some are accepted."""

    def _write(self, pages: list[int], position: int, token: int) -> None:
        if position // PAGE >= len(pages):
            assert self.rows > 1, "a token without a page"
            return
        self.pages.setdefault(pages[position // PAGE], [None] * PAGE)[position % PAGE] = token

    def _held(self, pages: list[int], length: int) -> list[int | None]:
        return [token for page in pages for token in self.pages.get(page, [None] * PAGE)][:length]

    def run(self, work) -> list[list[int]]:
        """Return the tokens of the window's answers."""
        for copy, pages in work.saves:
            copy.values = [list(self.pages.get(page, [None] * PAGE)) for page in pages]
        for copy, pages in work.loads:
            assert len(pages) <= copy.count
            self.pages |= dict(zip(pages, copy.values, strict=False))
        for prefill in [*work.prompts, *work.suffixes]:
            assert self._held(prefill.pages, prefill.begin) == prefill.tokens[: prefill.begin].tolist()
            for position in range(prefill.begin, len(prefill.tokens)):
                self._write(prefill.pages, position, int(prefill.tokens[position]))
        for source, target in work.page_copies:
            self.pages[target] = list(self.pages[source])
        for answer in work.fresh:
            self.slots[answer.slot] = answer.length - 1
        return [self._decode(answer) for answer in work.answers]

    def _decode(self, answer: Sequence) -> list[int]:
        new = list[int]()
        for _ in range(STEPS):
            first = self.slots[answer.slot]
            accepted = first * 7 % self.rows
            for row in range(self.rows):
                self._write(answer.pages, first + row, written(answer, first + row) if row <= accepted else -1)
            for last in range(first, first + accepted + 1):
                if last + 1 >= answer.end or (last >= len(answer.request.prompt) and written(answer, last) == STOP):
                    return new  # it has ended, perhaps in an earlier window
                text = [written(answer, position) for position in range(last + 1)]
                assert self._held(answer.pages, last + 1) == text, "attention over the keys of another text"
                new.append(written(answer, last + 1))
                self.slots[answer.slot] += 1
        return new


def receive(scheduler: Scheduler, work, results: list[list[int]]) -> None:
    """Do as the engine does with a window's results."""
    for answer, tokens in zip(work.answers, results, strict=True):
        answer.windows -= 1
        if not tokens or answer.length >= answer.end:
            continue
        count = answer.matcher.take(tokens) if answer.matcher else len(tokens)
        ids = np.array(tokens[:count], np.int32)
        empty = np.zeros(count, np.float32)
        ends = int(ids[-1]) == STOP or answer.length + count >= answer.end
        received = Tokens(ids, empty, empty, empty[:, None], empty[:, None])
        scheduler.receive(answer, received, ends, back=count < len(tokens))


def check_pages(scheduler: Scheduler, plan: CachePlan) -> None:
    """Check that each page is held by exactly the answers that run with it or held it, and that no other is lost."""
    pool, running, held = scheduler._pool, scheduler._running, [*scheduler._held.values()]
    holders = Counter(page for answer in [*running, *held] for page in answer.pages)
    assert scheduler._outside == OUTSIDE - sum(each.copy.count for each in held if each.copy)
    assert all(not each.pages or not each.copy for each in held)
    assert [pool._holders[page] for page in range(1, plan.pages + 1)] == [holders[p] for p in range(1, plan.pages + 1)]
    assert sorted([*pool._free, *pool._kept, *holders]) == list(range(1, plan.pages + 1))
    slots = [answer.slot for answer in running]
    assert sorted([*slots, *scheduler._slots]) == list(range(plan.slots))


def ended(answer: Sequence) -> bool:
    return answer.length >= answer.end and not answer.windows


def make_requests(rng: random.Random, count: int, longest: int) -> list[Request]:
    """Return requests some of which begin alike, in the middle of a page or after full ones."""
    texts = [[rng.randrange(10, 90) for _ in range(longest)] for _ in range(3)]
    requests = []
    for index in range(count):
        shared, rest = rng.choice((0, 1, PAGE, 2 * PAGE, rng.randrange(longest))), rng.randrange(1, PAGE)
        prompt = (rng.choice(texts)[:shared] + [rng.randrange(10, 90) for _ in range(rest)])[: longest // 2]
        most = rng.choice((1, 5, PAGE, longest // 2, -len(prompt) % PAGE or PAGE))  # the last one ends with a page
        sampling = SamplingConfig(max_tokens=most)
        grammar = Grammar(len(prompt)) if rng.random() < 0.2 else None
        holds = grammar is None and rng.random() < 0.5
        requests.append(Request(prompt, sampling, index, n=rng.choice((1, 1, 1, 2, 4)), grammar=grammar, holds=holds))
    return requests


# In the last ones, pages run out under a window, and a text goes on where another one ended with its page.
@pytest.mark.parametrize("seed", repeats([*range(24), 208, 228], *range(10, 16), *range(17, 20), *range(21, 24)))
def test_walks_lose_and_double_no_token_and_no_page(seed):
    rng = random.Random(seed)
    longest = rng.choice((2, 4, 6)) * PAGE
    least = longest // PAGE  # the longest answer's
    plan = CachePlan(slots=rng.choice((1, 3, 8)), pages=least + rng.choice((0, 1, 3, 12, 40)), table=least, bytes=0)
    options = {"remembers": seed % 3 > 0, "rewinds": seed % 4 > 0, "outside": OUTSIDE}
    scheduler = Scheduler(plan, STEPS, rows=(rows := (1, 3)[seed % 2]), **options)
    device, under_way, all_answers = Device(rows=rows), deque(), list[Sequence]()
    waiting, ended_early = make_requests(rng, 16, longest), set[int]()
    for _ in range(4000):
        if waiting and rng.random() < 0.3:
            request = waiting.pop()
            if all_answers and rng.random() < 0.5:  # a conversation goes on
                before = rng.choice(all_answers)
                prompt = [*before.request.prompt, *before.new, *request.prompt][: longest - 2]
                request = replace(request, prompt=prompt, grammar=request.grammar and Grammar(len(prompt)))
                if before.request.holds and ended(before) and len(prompt) > before.length:
                    request = replace(request, after=before, n=1)
            end = min(len(request.prompt) + request.sampling.max_tokens, longest)
            answers = [Sequence(request.index, index, request, end) for index in range(request.n)]
            all_answers += answers
            scheduler.add(answers)
        if all_answers and rng.random() < 0.02 and (answer := rng.choice(all_answers)).length < answer.end:
            scheduler.end(answer)
            ended_early.add(id(answer))
        if all_answers and rng.random() < 0.05 and ended(answer := rng.choice(all_answers)):
            scheduler.release(answer)
        resting = [answer for answer in scheduler._running if seed % 2 and rng.random() < 0.2]
        work = None if scheduler.is_done else scheduler.next(resting)
        assert not work or not any(answer in resting for answer in work.answers)
        check_pages(scheduler, plan)
        if work:
            under_way.append((work, device.run(work)))
        if under_way and (not work or len(under_way) > 1):
            receive(scheduler, *under_way.popleft())
            check_pages(scheduler, plan)
        if not waiting and not under_way and scheduler.is_done:
            break
    else:
        pytest.fail("the walk does not end")
    for answer in all_answers:
        scheduler.release(answer)
    assert not scheduler._held and scheduler._outside == OUTSIDE
    for answer in all_answers:
        begin = len(answer.request.prompt)
        text = [written(answer, position) for position in range(begin, answer.end)]
        text = text[: text.index(STOP) + 1] if STOP in text else text
        assert answer.new == text[: len(answer.new)]
        assert id(answer) in ended_early or answer.new == text
