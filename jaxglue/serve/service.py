"""Answers to requests as they come: one thread owns the device, and every request's tokens go to its listener."""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import GREEDY
from jaxglue.generation.engine import DecodeBatch
from jaxglue.generation.grammar import is_installed
from jaxglue.generation.inputs import ProgramKind
from jaxglue.generation.pages import PAGE, plan_cache
from jaxglue.generation.sampling import Features
from jaxglue.generation.scheduler import Finish, Request, Sequence

STOPS, BIASES = 32, 64
"""Stop tokens, and tokens with a bias, of a request, at most."""
_PIECE, _CUT = 16_384, 8
"""Characters of a long text that are tokenized at a time, and tokens that cutting it there may add."""
_SHARE, _AHEAD = 4, 4
"""A part of the slots that no owner has alone, and answers that wait in the batch for slots that become free."""
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
        length: the most tokens of prompt and answer together.
        most: requests in the service at a time.
        memory: bytes for cache and activations; by default nearly all that are free.
    """

    def __init__(self, assistant: Assistant, *, slots: int, length: int, most: int, memory: float | None = None):
        self.length = min(length, assistant.config.max_generated_positions)
        self._most, self._stops, self._engine = most, assistant.stops, assistant.engine
        self._tickets: dict[int, Ticket] = {}
        """Tickets of the answers in the batch."""
        self._open = set[Ticket]()
        """Tickets with answers that have not ended."""
        self._waiting = dict[Hashable, deque[Ticket]]()
        """Tickets by their owners, the next one's first."""
        self._most_of_one = slots - slots // _SHARE
        self._news: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        lengths = [(self.length // 2, self.length)] * slots
        options = {"cache_dtype": self._engine.cache_dtype, "free": memory}
        plan = plan_cache(lengths, assistant.config, assistant.dtype, **options)  # type: ignore[arg-type]
        kind = ProgramKind(_USUAL, STOPS, BIASES, assistant.ranks, _RARE._replace(grammars=is_installed()))
        weights = assistant.adapter, assistant.frozen
        self.failure: str | None = None
        """Reason for the service's end; None while it runs."""
        self._batch: DecodeBatch = self._engine.open(*weights, plan, kind, whole=True)
        self._thread = threading.Thread(target=self._serve, name="service", daemon=True)
        self._thread.start()

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
        ticket.answers = self._engine.answers(request, 0)
        if len(self._open) >= self._most:
            raise FullError
        self._open.add(ticket)
        self._news.put(ticket)
        if self.failure:  # since the check above: the thread may not have seen the ticket
            raise EndedError(self.failure)
        return ticket

    def cancel(self, ticket: Ticket, answer: int | None = None) -> None:
        """End a request's answers, or one of them."""
        ticket.cancelled.update(range(len(ticket.answers)) if answer is None else [answer])

    def warm_up(self) -> None:
        """Compile the programs with short answers: to prompts of all lengths, and to some that go on from one before.

        Raises:
            EndedError: an error has ended the service.
        """
        events = queue.SimpleQueue[Event]()
        longer = [2**power + 1 for power in range(8, (self.length - 1).bit_length())]
        for length in (1, 2 * PAGE + 1, 2 * PAGE + 6, 3 * PAGE + 6, *longer):  # two behind two known pages
            if length < self.length:
                sampling = replace(GREEDY, max_tokens=1, presence_penalty=float(length == 1))  # which most do not use
                self.submit(Request([length % 2] * length, sampling), events.put)
                if (error := events.get().error) is not None:
                    raise EndedError(error)

    def close(self) -> None:
        """End the thread, after the window under way."""
        self._news.put(None)
        self._thread.join()
        self._batch.close()

    def _serve(self) -> None:
        while True:
            try:
                while not self._news.empty() or not (self._batch.is_busy or self._waiting):
                    ticket = self._news.get()
                    if ticket is None:
                        return
                    self._receive(ticket)
                self._fill()
                self._advance()
            except Exception as error:  # of the model or the device: nothing more can be answered
                self.failure = f"the service has ended: {error}"
                for ticket in list(self._open):
                    ticket.listen(Event(0, [], [], None, self.failure))
                raise

    def _receive(self, ticket: Ticket) -> None:
        """Let a ticket wait for its turn, once there are programs for its answers."""
        if (compiled := self._batch.prepare(ticket.request)) is not None:
            compiled.add_done_callback(lambda _: self._news.put(ticket))
        else:
            self._waiting.setdefault(ticket.owner, deque()).append(ticket)

    def _fill(self) -> None:
        """Give free slots to tickets of all owners in turns, and never all slots to one."""
        running = Counter(ticket.owner for ticket in self._tickets.values())
        owners = deque(self._waiting)
        while owners and self._batch.free_slots > -_AHEAD:
            owner = owners.popleft()
            if running[owner] >= self._most_of_one:
                continue
            ticket, tickets = self._waiting[owner].popleft(), self._waiting.pop(owner)
            if tickets:
                self._waiting[owner] = tickets  # behind those of others
                owners.append(owner)
            running[owner] += self._begin(ticket)

    def _begin(self, ticket: Ticket) -> int:
        """Add a ticket's answers to the batch, but for those that nobody waits for; return their number."""
        answers = [answer for index, answer in enumerate(ticket.answers) if index not in ticket.cancelled]
        self._tickets |= {id(answer): ticket for answer in answers}
        if answers:  # the client may have hung up
            self._batch.add(answers, self._stops)
        else:
            self._open.discard(ticket)
        return len(answers)

    def _advance(self) -> None:
        self._end_cancelled()
        for answer, tokens, finish in self._batch.advance():
            ticket = self._tickets.get(id(answer))
            if ticket is None:
                continue
            new = answer.received[-1]
            pairs = zip(new.top_ids.tolist(), new.top_log_probs.tolist(), strict=True)
            top = [list(zip(*pair, strict=True)) for pair in pairs] if answer.request.top_log_probs else []
            ticket.listen(Event(answer.answer, tokens.tolist(), new.model_log_probs.tolist(), finish, top=top))
            if finish:
                self._end(answer)

    def _end_cancelled(self) -> None:
        """Free the slots and pages of answers that nobody waits for, before the next window."""
        for ticket in {ticket for ticket in self._tickets.values() if ticket.cancelled}:
            for index in list(ticket.cancelled):
                if id(answer := ticket.answers[index]) in self._tickets:
                    self._end(answer)
                    self._batch.end(answer)

    def _end(self, answer: Sequence) -> None:
        """Forget an answer, and its ticket with the last one."""
        ticket = self._tickets.pop(id(answer))
        if all(id(other) not in self._tickets for other in ticket.answers):
            self._open.discard(ticket)


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
        count += len(tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False).ids) - _CUT
        if count > most:
            raise TooLongError(f"the prompt has more than {most:,} tokens, and texts may have {most:,}")
