"""Turns of requests: an owner with many answers gives up slots to others, and its answers stay the same."""

import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from selection import repeat, repeats_parts_of

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.scheduler import Request
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.service import FullError, Service

SAMPLED = SamplingConfig(temperature=1.5, top_p=1.0, seed=5)


@pytest.fixture(scope="module")
def assistant(folders):
    return Assistant(ServeConfig(model=folders[0], adapter=folders[1]))


@pytest.fixture
def service(assistant):
    service = Service(assistant, slots=4, length=256, most=8)
    yield service
    service.close()


class Asker:
    """Submits requests, and keeps their tokens and the order of their ends."""

    def __init__(self, service):
        self._service, self.ended, self.tokens = service, [], {}
        self._done = threading.Semaphore(0)

    def ask(self, owner, request, listen=lambda event: None):
        """Submit a request of an owner."""

        def hear(event):
            self.tokens.setdefault((owner, event.answer), []).extend(event.tokens)
            listen(event)
            if event.finish:
                self.ended.append(owner)
                self._done.release()

        return self._service.submit(request, hear, owner)

    def wait(self, count):
        """Wait for so many ends."""
        assert all(self._done.acquire(timeout=60) for _ in range(count))


def long_request(n=1, **changes):
    return Request([5, 6], replace(SAMPLED, max_tokens=100), n=n, logit_bias={2: -1e6, 1: -1e6, 0: -1e6}, **changes)


@repeats_parts_of("test_an_interrupted_answer_may_be_left")
@pytest.mark.parametrize("penalty", [repeat(0.0), 0.5])
def test_interrupted_answers_are_those_of_an_idle_server(service, penalty):
    request = long_request(n=4)
    request = replace(request, sampling=replace(request.sampling, frequency_penalty=penalty))
    alone = Asker(service)
    alone.ask("hostile", request)
    alone.wait(4)
    interrupted = []

    def interrupt(sequence, original=service._batch.interrupt):
        if worked := original(sequence):
            interrupted.append((sequence.answer, sequence.length))
        return worked

    service._batch.interrupt = interrupt
    beside, begun = Asker(service), threading.Event()
    beside.ask("hostile", request, lambda _: begun.set())
    assert begun.wait(60)
    for number in range(6):
        beside.ask(f"other {number}", Request([7, 8], replace(SAMPLED, max_tokens=8)))
    beside.wait(10)
    assert any(length > 4 for _, length in interrupted), "none was interrupted while it grew"
    for answer in range(4):
        assert beside.tokens["hostile", answer] == alone.tokens["hostile", answer] != []
    assert beside.ended[-1] == "hostile"
    assert service.running == service.waiting == 0 and not service._open and not service._owners


@repeats_parts_of("test_owners_have_turns_and_none_has_all_slots")
@pytest.mark.parametrize("others", [repeat(0), 2])
def test_further_answers_of_an_owner_take_turns_in_windows_that_would_be_slow(assistant, others):
    service = Service(assistant, slots=8, length=256, most=8)
    request, short = long_request(n=6), Request([7, 8], replace(SAMPLED, max_tokens=60))
    alone = Asker(service)
    alone.ask("many", request)
    alone.wait(6)
    windows = []

    def next_window(resting, original=service._batch._scheduler.next):
        if work := original(resting):
            windows.append(sorted(answer.request is request for answer in work.answers))
        return work

    service._batch._scheduler.next = next_window
    service._batch.widest = lambda count: 4 if count <= 3 else 3
    beside, begun = Asker(service), threading.Event()
    beside.ask("many", request, lambda _: begun.set())
    assert begun.wait(60)
    assert service.running == 3, "further ones begin as windows are filled up"
    for number in range(others):
        beside.ask(f"other {number}", short)
    beside.wait(6 + others)
    assert max(map(len, windows)) == (4 if others else 3)
    assert all(True in window for window in windows if beside.ended[-1] == "many"), "the first one never rests"
    for answer in range(6):
        assert beside.tokens["many", answer] == alone.tokens["many", answer] != []
    service.close()


def test_short_answers_wait_for_no_long_ones_and_long_ones_have_turns(assistant):
    service = Service(assistant, slots=8, length=256, most=16)
    service._batch.widest = lambda count: 3
    windows = list[list[int]]()

    def next_window(resting, original=service._batch._scheduler.next):
        if work := original(resting):
            windows.append(sorted(answer.request.sampling.max_tokens for answer in work.answers))
        return work

    service._batch._scheduler.next = next_window
    asker, grown = Asker(service), threading.Semaphore(0)
    for number in range(4):
        asker.ask(f"long {number}", long_request(), lambda _: grown.release())
    assert all(grown.acquire(timeout=60) for _ in range(12)), "each has more tokens than short answers"
    before = len(windows)
    for number in range(4):
        asker.ask(f"short {number}", replace(long_request(), sampling=replace(SAMPLED, max_tokens=40)))
    asker.wait(8)
    service.close()
    beside = [window for window in windows[before:] if 40 in window]
    assert len(beside) <= 11, "two in each of eight windows after the first: nearly all places but for one"
    assert all(window.count(100) == 1 for window in beside[1:8]), "one of the long ones has its turn"
    assert {len(window) for window in windows[2:before]} == {3}


def test_an_interrupted_answer_may_be_left(service):
    asker, begun = Asker(service), threading.Event()
    ticket = asker.ask("hostile", long_request(n=4), lambda _: begun.set())
    assert begun.wait(60)
    for number in range(3):
        asker.ask(f"other {number}", Request([7, 8], replace(SAMPLED, max_tokens=30)))
    service.cancel(ticket)
    asker.wait(3)
    assert Counter(asker.ended)["hostile"] <= 1
    service.call(lambda: None).result(60)
    while service.waiting or service.running:
        service.call(lambda: None).result(60)
    assert not service._open and not service._waiting


def test_a_request_with_many_prompts_is_one_of_those_that_wait(service):
    asker = Asker(service)
    for _ in range(20):
        asker.ask("many", Request([5], replace(SAMPLED, max_tokens=2)))
    for number in range(7):
        asker.ask(number, Request([5], replace(SAMPLED, max_tokens=2)))
    asker.wait(27)
    gate = threading.Event()
    for number in range(8):
        asker.ask(number, Request([5], replace(SAMPLED, max_tokens=2)), lambda _: gate.wait(60))
    with pytest.raises(FullError):
        asker.ask("ninth", Request([5], replace(SAMPLED, max_tokens=2)))
    gate.set()
    asker.wait(8)


def test_the_default_length_is_the_models(assistant):
    service = Service(assistant, slots=2, most=2)
    assert service.length == assistant.config.max_generated_positions == 1024
    service.close()


@repeats_parts_of("test_programs_of_a_new_kind_are_compiled_beside_the_answers_of_others")
def test_programs_of_longer_prompts_are_compiled_once_nobody_asks(assistant):
    service = Service(assistant, slots=2, length=1024, most=4)
    gate, lengths, done = threading.Event(), [], threading.Event()

    def receive(ticket, original=service._receive):
        lengths.append(len(ticket.request.prompt))
        original(ticket)
        if 513 in lengths:
            done.set()

    service._receive = receive
    service.warm_up()
    assert [sizes.take(2, True)[1] is None for sizes in service._batch._sizes.values()] == [False] * 2, "of both kinds"
    asker = Asker(service)
    asker.ask("a client", Request([5], replace(SAMPLED, max_tokens=16)), lambda _: gate.wait(60))
    before = len(lengths)
    gate.set()
    asker.wait(1)
    assert done.wait(120) and 257 in lengths and before < len(lengths)
    service.close()


def test_programs_are_compiled_later_where_clients_come_first(service):
    submit, refusals = service.submit, [FullError()]

    def refuse_once(*arguments):
        if refusals:
            raise refusals.pop()
        return submit(*arguments)

    service.submit = refuse_once
    service._programs_to_come.append(5)
    while service._programs_to_come:
        service.call(lambda: None).result(60)
    assert not refusals and service.call(lambda: None).result(60) is service.failure is None


def test_work_of_others_has_the_thread_between_windows(service):
    assert service.call(lambda: threading.current_thread().name).result(60) == "service"
    with pytest.raises(ZeroDivisionError):
        service.call(lambda: 1 // 0).result(60)
    gate = threading.Event()
    service.call(lambda: gate.wait(60))
    left = service.call(lambda: None)
    assert left.cancel(), "by a client that has gone"
    gate.set()
    asker = Asker(service)
    asker.ask("still answers", Request([5], replace(SAMPLED, max_tokens=2)))
    asker.wait(1)


def test_times_of_windows_that_none_precedes_are_known(service):
    asker = Asker(service)
    for number in range(3):  # of which the first does not count
        asker.ask(number, Request([5], replace(SAMPLED, max_tokens=2)))
        asker.wait(1)
    assert service._batch._latest.seconds(1) is not None


def spare_once(service, seconds):
    """Let the first window that is under way leave so much time; return the events of that, and windows' answers."""
    waits, windows = threading.Event(), list[int]()

    def spare(batch=service._batch):
        if batch._under_way and not waits.is_set():
            waits.set()
            return seconds
        return 0.0

    def next_window(resting, original=service._batch._scheduler.next):
        if work := original(resting):
            windows.append(len(work.answers))
        return work

    service._batch.spare, service._batch._scheduler.next = spare, next_window
    return waits, windows


def test_a_request_that_comes_during_a_window_is_in_the_next_one(service):
    waits, windows = spare_once(service, 60.0)
    asker = Asker(service)
    asker.ask("first", long_request())
    assert waits.wait(60)
    asker.ask("second", long_request())
    asker.wait(2)
    assert windows[:2] == [1, 2]


def test_prompts_of_many_who_come_at_once_are_read_before_several_windows(assistant, monkeypatch):
    monkeypatch.setattr("jaxglue.serve.service._READ", 8)
    service = Service(assistant, slots=4, length=256, most=8)
    _, windows = spare_once(service, 0.0)
    gate, asker = threading.Event(), Asker(service)
    service.call(lambda: gate.wait(60))
    for client in "abcd":
        asker.ask(client, Request([5, 6, 7, 8, 9, 10], replace(SAMPLED, max_tokens=30)))
    gate.set()
    asker.wait(4)
    service.close()
    assert windows[:2] == [2, 4]  # of each prompt five tokens are read


def test_a_service_that_waits_for_news_works_and_ends(assistant):
    service = Service(assistant, slots=2, length=256, most=4)
    waits, windows = spare_once(service, 600.0)
    service._batch.spare, once = lambda: once() or 600.0 * bool(service._batch._under_way), service._batch.spare
    Asker(service).ask("a client", long_request())
    assert waits.wait(60)
    assert service.call(lambda: len(windows)).result(60) == 1
    service.close()
    assert not service._thread.is_alive()


def test_a_window_waits_for_no_request_that_would_find_no_slot(service):
    def has_room(owners, ending=0, waiting=0):
        answers = [SimpleNamespace(ends_under_way=number < ending) for number in range(len(owners))]
        found = zip((SimpleNamespace(owner=owner) for owner in owners), answers, strict=True)
        service._running, service._waiting = dict(enumerate(found)), {"others": [None] * waiting}
        return service._has_room

    assert has_room("abc") and not has_room("abcd")
    assert has_room("abcd", ending=1), "its slot becomes free"
    assert not has_room("abcd", ending=1, waiting=1), "which gets it"
    assert has_room("abbc", waiting=3), "the one with two gives one up"
    service._running, service._waiting = {}, {}


def test_a_wait_that_is_over_before_the_thread_sleeps_ends(service):
    left, asker = 40_000, Asker(service)

    def spare():
        nonlocal left
        left -= 1
        if left % 2:  # news that are there when the thread asks
            service.call(lambda: None)
        return 1e-7 if left > 0 else 0.0

    service._batch.spare = spare
    asker.ask("a client", Request([5], replace(SAMPLED, max_tokens=2)))
    asker.wait(1)
