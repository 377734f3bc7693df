"""Answers to requests as they come: one thread owns the device, and every request's tokens go to its listener."""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import GREEDY
from jaxglue.generation.engine import DecodeBatch
from jaxglue.generation.grammar import is_installed
from jaxglue.generation.inputs import ProgramKind
from jaxglue.generation.pages import PAGE, PREFILL_TOKENS, CachePlan
from jaxglue.generation.sampling import Features
from jaxglue.generation.scheduler import LONGEST_SUFFIX, Finish, Request, Sequence

STOPS, BIASES = 32, 64
"""Stop tokens, and tokens with a bias, of a request, at most."""
_PIECE, _CUT = 16_384, 8
"""Characters of a long text that are tokenized at a time, and tokens that cutting it there may add."""
_SHARE, _AHEAD = 4, 4
"""A part of the slots that no owner has alone, and answers that wait in the batch for slots that become free."""
_READ = 2 * PREFILL_TOKENS - LONGEST_SUFFIX
"""Tokens of prompts before a window, at most, but for the last one's: they mostly fill two rows."""
_TURNS = 4
"""A part of a window for owners' answers that have rested the longest."""
_TYPICAL, _SHORTEST = 8192, 1024
"""Tokens of a text for which each slot has pages, and to which a default length is lowered at most."""
_USUAL, _RARE = Features(draws=True), Features(True, top_k=True, top_p=True, min_p=True, penalties=True, biases=True)


@dataclass(frozen=True)
class Event:
    """New tokens of one answer to a request, or what went wrong."""

    answer: int
    tokens: list[int]
    log_probs: list[float]
    """By the model alone, at temperature 1."""
    finish: Finish | None
    error: str | None = None
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most likely tokens in the place of each, with their log-probabilities, as many as the request asks for."""
    drafts: tuple[int, int] = (0, 0)
    """Tokens that were drafted for the answer so far, and those of them that were accepted."""


@dataclass(eq=False)
class Ticket:
    """A request in the service."""

    request: Request
    listen: Callable[[Event], None]
    """Called in the service's thread."""
    answers: list[Sequence] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    """Answers that nobody waits for."""
    owner: Hashable = None
    """Client's request that it is a part of: others' have their turns between its parts."""
    remaining: int = 0
    """Answers that have not ended."""


@dataclass(frozen=True)
class _Job:
    """Work for the service's thread between two windows."""

    run: Callable[[], Any]
    result: Future


class FullError(ValueError):
    """Reports that as many requests wait as the service takes."""


class TooLongError(ValueError):
    """Reports a prompt, or an answer after it, beyond the service's length."""


class EndedError(ValueError):
    """The service has ended by an error."""


class Service:
    """A thread that answers requests together.

    Args:
        assistant: the model.
        slots: answers at a time.
        length: the most tokens of prompt and answer together; by default the model's limit, or as many as fit.
        most: requests in the service at a time.
        memory: bytes for cache and activations; by default nearly all that are free.
    """

    def __init__(
        self, assistant: Assistant, *, slots: int, length: int | None = None, most: int, memory: float | None = None
    ):
        self._most, self._stops, self._engine = most, assistant.stops, assistant.engine
        self._running = dict[int, tuple[Ticket, Sequence]]()
        """Answers in the batch, by their ids."""
        self._rested, self._tokens = Counter[Sequence](), Counter[Hashable]()
        """Windows that answers have let go by since their last one, and tokens of those of each owner so far."""
        self._interrupted = dict[int, Ticket]()
        """Tickets of answers that gave up their slots, by the answers' ids."""
        self._waiting = dict[Hashable, deque[tuple[Ticket, Sequence]]]()
        """Answers that wait, by their owners, the next one's first."""
        self._open, self._owners, self._lock = set[Ticket](), Counter[Hashable](), threading.Lock()
        """Tickets with answers that have not ended, and their number by owner."""
        self._programs_to_come = deque[int]()
        """Lengths of prompts whose programs are not compiled yet."""
        self._slots, self._most_of_one = slots, slots - slots // _SHARE
        self._news = queue.Queue[Ticket | _Job | None]()  # Python 3.12's SimpleQueue may miss the end of a short wait
        plan, self.length = _plan(assistant, slots, length, memory)
        kind = ProgramKind(_USUAL, STOPS, BIASES, assistant.ranks, _RARE._replace(grammars=is_installed()))
        weights = assistant.adapter, assistant.frozen
        self.failure: str | None = None
        """Reason for the service's end; None while it runs."""
        self._batch: DecodeBatch = self._engine.open(*weights, plan, kind, whole=True, most_read=_READ)
        self._thread = threading.Thread(target=self._serve, name="service", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Return the answers that decode."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return the answers that wait for their turn."""
        return sum(ticket.remaining for ticket in self._open.copy()) - self.running

    @property
    def cache_use(self) -> float:
        """Return the share of the cache's pages that answers hold."""
        return self._batch.cache_use

    def submit(self, request: Request, listen: Callable[[Event], None], owner: Hashable = None) -> Ticket:
        """Queue a request, whose events go to `listen`, with others of one owner.

        Raises:
            ValueError: a request that the engine refuses, or one beyond the service's limits.
            FullError: too many requests wait.
            EndedError: an error has ended the service.
        """
        if self.failure:
            raise EndedError(self.failure)
        room = self.length - len(request.prompt)
        if room < 1:
            raise TooLongError(f"the prompt has {len(request.prompt):,} tokens, and texts may have {self.length:,}")
        if request.sampling.max_tokens > room:
            raise TooLongError(f"max_tokens is {request.sampling.max_tokens:,}, and the prompt leaves {room:,}")
        if len(self._stops.union(request.stop)) > STOPS or len(request.logit_bias) > BIASES:
            raise ValueError(f"at most {BIASES} tokens have a logit_bias, and {STOPS} end an answer")
        ticket = Ticket(request, listen, owner=owner)
        ticket.owner = ticket if owner is None else owner
        ticket.answers = self._engine.answers(request, 0)
        ticket.remaining = len(ticket.answers)
        with self._lock:
            if ticket.owner not in self._owners and len(self._owners) >= self._most:
                raise FullError
            self._open.add(ticket)
            self._owners[ticket.owner] += 1
        self._news.put(ticket)
        if self.failure:  # since the check above: the thread may not have seen the ticket
            raise EndedError(self.failure)
        return ticket

    def cancel(self, ticket: Ticket, answer: int | None = None) -> None:
        """End a request's answers, or one of them."""
        ticket.cancelled.update(range(len(ticket.answers)) if answer is None else [answer])

    def call[R](self, function: Callable[[], R]) -> "Future[R]":
        """Let the thread call a function between two windows; return its result to come.

        Raises:
            EndedError: an error has ended the service; the result may raise it, too.
        """
        job = _Job(function, Future())
        self._news.put(job)
        if self.failure:
            raise EndedError(self.failure)
        return job.result

    def replace_adapter(self, trainable: Any) -> None:
        """Let answers use other adapters, of the same shapes, from the next window on; called by `call` alone."""
        self._batch.replace_adapter(trainable)

    def uses(self, ranks: Any) -> bool:
        """Return whether an answer that has not ended uses these ranks, by their identity."""
        return any(ticket.request.ranks is ranks for ticket in self._open.copy())

    def warm_up(self) -> None:
        """Compile the programs of short answers, and of others in time that nobody asks for anything.

        These are of prompts of all lengths, and of some that go on from one before.

        Raises:
            EndedError: an error has ended the service.
        """
        for rare in (False, True):
            events = queue.SimpleQueue[Event]()
            self.submit(_warming(1, rare=rare), events.put)
            if (error := events.get().error) is not None:
                raise EndedError(error)
        longer = [2**power + 1 for power in range(8, (self.length - 1).bit_length())]
        lengths = [2 * PAGE + 1, 2 * PAGE + 6, 3 * PAGE + 6, *longer]  # two behind two known pages
        self._programs_to_come.extend(length for length in lengths if length < self.length)
        self._news.put(_Job(lambda: None, Future()))  # the thread may sleep

    def close(self) -> None:
        """End the thread, after the window under way."""
        self._news.put(None)
        self._thread.join()
        self._batch.close()

    def _serve(self) -> None:
        while True:
            try:
                if not self._take_news():
                    return
                self._fill()
                self._advance()
            except Exception as error:  # of the model or the device: nothing more can be answered
                self.failure = f"the service has ended: {error}"
                for ticket in self._open.copy():
                    ticket.listen(Event(0, [], [], None, self.failure))
                while not self._news.empty():
                    if isinstance(news := self._news.get(), _Job) and news.result.set_running_or_notify_cancel():
                        news.result.set_exception(EndedError(self.failure))
                raise

    def _take_news(self) -> bool:
        """Take news until it is time for the next window; return False at the service's end."""
        while True:
            patience = self._patience()
            try:
                news = self._news.get(timeout=patience)
            except queue.Empty:
                if patience == 0:
                    return True
                continue
            if news is None:
                return False
            if isinstance(news, _Job):
                _run(news)
            else:
                self._receive(news)

    def _patience(self) -> float | None:
        """Return for how many seconds news are waited for before the next window; None for any time."""
        if self._batch.is_busy or self._waiting:
            return self._batch.spare() if self._has_room else 0.0
        if self._programs_to_come and not self._open and self._news.empty():
            with suppress(FullError):  # clients have come since
                self.submit(_warming(self._programs_to_come[0]), lambda _: None)
                self._programs_to_come.popleft()
        return None

    @property
    def _has_room(self) -> bool:
        """Return whether a request that comes now may begin with the next window, also in a slot of others."""
        staying = [ticket.owner for ticket, answer in self._running.values() if not answer.ends_under_way]
        waiting = sum(map(len, self._waiting.values()))
        return len(staying) + waiting < self._slots or len(set(staying)) < len(staying)

    def _receive(self, ticket: Ticket) -> None:
        """Let a ticket's answers wait for their turns, once there are programs for them."""
        if (compiled := self._batch.prepare(ticket.request)) is not None:
            compiled.add_done_callback(lambda _: self._news.put(ticket))
        else:
            answers = self._waiting.setdefault(ticket.owner, deque())
            answers.extend((ticket, answer) for answer in ticket.answers)

    def _fill(self) -> None:
        """Give slots to answers of the owners that have the fewest, and never all slots to one.

        Those beyond an owner's first come as far as windows are filled up: others wait for no prompts of theirs.
        Where none is free, owners that have more than one that waits give up their last ones, which wait again: an
        owner's first answer waits behind none of them.
        """
        running = Counter(ticket.owner for ticket, _ in self._running.values())
        while ready := [owner for owner, answers in self._waiting.items() if not answers[0][1].windows]:
            owner = min(ready, key=running.__getitem__)
            if running[owner] and (running[owner] >= self._most_of_one or running.total() >= self._widest(running)):
                return
            enough = -_AHEAD if running[owner] else 0
            while self._batch.free_slots <= enough and self._interrupt_one(running, running[owner] + 1):
                pass
            if self._batch.free_slots <= -_AHEAD:
                return
            running[owner] += self._begin(owner)

    def _widest(self, running: Counter[Hashable]) -> int:
        """Return to how many answers a window of these owners' is filled up: one's alone, or the first of each."""
        owners = sum(map(bool, running.values()))
        return self._batch.widest(owners if owners > 1 else self._most_of_one)

    def _begin(self, owner: Hashable) -> bool:
        """Add an owner's next answer to the batch; return whether somebody waits for it."""
        answers = self._waiting.pop(owner)
        ticket, answer = answers.popleft()
        if answers:
            self._waiting[owner] = answers  # behind those of others
        self._interrupted.pop(id(answer), None)
        if answer.answer in ticket.cancelled:  # the client may have hung up
            self._batch.end(answer)
            self._end(ticket)
            return False
        self._running[id(answer)] = ticket, answer
        self._batch.add([answer], self._stops)
        return True

    def _interrupt_one(self, running: Counter[Hashable], most: int) -> bool:
        """Take a slot from the owner with the most, if these are above a number; return whether one became free."""
        owner = max(running, key=running.__getitem__, default=None)
        if owner is None or running[owner] <= most:
            return False
        for ticket, answer in reversed(list(self._running.values())):
            if ticket.owner == owner and self._batch.interrupt(answer):
                del self._running[id(answer)]
                self._interrupted[id(answer)] = ticket
                self._waiting.setdefault(owner, deque()).appendleft((ticket, answer))
                running[owner] -= 1
                return True
        return False

    def _advance(self) -> None:
        self._end_cancelled()
        resting = self._resting()
        self._rested = Counter({answer: self._rested[answer] + 1 for answer in resting})
        for answer, tokens, finish in self._batch.advance(resting):
            if (ticket := self._ticket_of(answer)) is None:
                continue
            self._tokens[ticket.owner] += len(tokens)
            new = answer.received[-1]
            pairs = zip(new.top_ids.tolist(), new.top_log_probs.tolist(), strict=True)
            top = [list(zip(*pair, strict=True)) for pair in pairs] if answer.request.top_log_probs else []
            drafts, log_probs = (answer.drafted, answer.accepted), new.model_log_probs.tolist()
            ticket.listen(Event(answer.answer, tokens.tolist(), log_probs, finish, top=top, drafts=drafts))
            if finish:
                self._forget(ticket, answer)

    def _resting(self) -> list[Sequence]:
        """Return the answers that let a window go by, where as many as there are would make it slow.

        Those that begin do not. Then come the first ones of owners, those that have fewer tokens before others, so that
        long answers make no short one slow; but a part of the window is for those that have rested the longest.
        Further ones fill it up.
        """
        running, firsts, further = Counter[Hashable](), dict[Sequence, int](), list[Sequence]()
        for ticket, answer in self._running.values():
            running[ticket.owner] += 1
            if answer.slot is None or answer.waits or answer.ends_under_way:
                continue
            if running[ticket.owner] == 1:
                firsts[answer] = self._tokens[ticket.owner]
            else:
                further.append(answer)
        room = max(self._widest(running) - self._batch.beginning, 1)
        late = sorted(firsts, key=self._rested.__getitem__, reverse=True)[: -(-room // _TURNS)]
        further.sort(key=lambda answer: answer.reach - len(answer.request.prompt))
        return list(dict.fromkeys([*late, *sorted(firsts, key=firsts.__getitem__), *further]))[room:]

    def _ticket_of(self, answer: Sequence) -> Ticket | None:
        """Return the ticket of an answer whose tokens came, also after it was interrupted; None if nobody waits."""
        if (entry := self._running.get(id(answer))) is not None:
            return entry[0]
        ticket = self._interrupted.get(id(answer))
        return None if ticket is None or answer.answer in ticket.cancelled else ticket

    def _forget(self, ticket: Ticket, answer: Sequence) -> None:
        """Forget an answer that has ended."""
        if self._running.pop(id(answer), None) is None:
            del self._interrupted[id(answer)]
            answers = self._waiting.pop(ticket.owner)
            answers.remove((ticket, answer))
            if answers:
                self._waiting[ticket.owner] = answers
        self._end(ticket)

    def _end_cancelled(self) -> None:
        """Free the slots and pages of answers that nobody waits for, before the next window."""
        for ticket, answer in list(self._running.values()):
            if answer.answer in ticket.cancelled:
                del self._running[id(answer)]
                self._batch.end(answer)
                self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        """Note the end of one of a ticket's answers, and forget the ticket with the last one."""
        ticket.remaining -= 1
        if ticket.remaining:
            return
        with self._lock:
            self._open.discard(ticket)
            self._owners[ticket.owner] -= 1
            if not self._owners[ticket.owner]:
                del self._owners[ticket.owner], self._tokens[ticket.owner]


def _plan(assistant: Assistant, slots: int, length: int | None, memory: float | None) -> tuple[CachePlan, int]:
    """Return a plan of the cache, and the most tokens of a text: those asked for, or of the model, where they fit.

    Where the host computes, which gathers all pages of a slot, the default is a text of typical length.

    Raises:
        ValueError: too little memory for one text.
    """
    limit = assistant.config.max_generated_positions
    longest = min(limit, length or (_TYPICAL if jax.default_backend() == "cpu" else limit))
    while True:
        lengths = [(end // 2, end) for end in (longest, *[min(longest, _TYPICAL)] * (slots - 1))]
        try:
            options: Any = {"free": memory, "limit": "--max-length"}
            return assistant.engine.plan_lengths(lengths, **options), longest
        except ValueError:
            if length is not None or longest // 2 < _SHORTEST:
                raise
            longest //= 2


def _warming(length: int, *, rare: bool = False) -> Request:
    """Return a request whose answers take the programs of a prompt's length, of rare features if asked."""
    sampling = replace(GREEDY, max_tokens=1, presence_penalty=float(rare))
    return Request([length % 2] * length, sampling, n=1 if rare else 2)


def _run(job: _Job) -> None:
    if not job.result.set_running_or_notify_cancel():
        return  # nobody waits for it
    try:
        job.result.set_result(job.run())
    except Exception as error:
        job.result.set_exception(error)


def require_short(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> None:
    """Raise TooLongError for a text that certainly has more tokens, as soon as its beginning has them.

    Args:
        tokenizer: of the model.
        text: of any length.
        most: tokens.
    """
    if len(text) <= most:
        return
    count = 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE].encode(errors="replace").decode()
        (encoding,) = tokenizer.backend_tokenizer.encode_batch_fast(
            [piece], add_special_tokens=False
        )  # without the GIL
        count += len(encoding) - _CUT
        if count > most:
            raise TooLongError(f"the prompt has more than {most:,} tokens, and texts may have {most:,}")
