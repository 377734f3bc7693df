"""Processes of a run meet, gather objects and hear of a death; here they are threads."""

import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from jaxglue.distributed import processes
from jaxglue.distributed.channel import ControlChannel

TOKEN = b"secret of the run"


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def meet(port):
    """meet(n) → the channels of n processes, and a queue of their reports of lost ones."""
    lost = queue.Queue()

    def open_channel(index, count, timeout=20.0, token=TOKEN):
        def report(line):
            lost.put((index, line))

        return ControlChannel(index, count, ("127.0.0.1", port), token=token, timeout=timeout, lost=report)

    def make(count):
        with ThreadPoolExecutor(count) as pool:
            channels = list(pool.map(lambda index: open_channel(index, count), reversed(range(count))))
        return channels[::-1], lost

    make.open_channel = open_channel
    return make


def on_all(channels, function):
    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(function, channels, range(len(channels))))


def test_all_gather_object_keeps_the_order(meet):
    channels, lost = meet(4)
    for turn in range(3):
        results = on_all(
            channels, lambda channel, index, turn=turn: channel.all_gather_object({"id": index, "turn": turn})
        )
        assert results == [[{"id": index, "turn": turn} for index in range(4)]] * 4
    on_all(channels, lambda channel, index: channel.close())
    assert lost.empty()


@pytest.mark.parametrize("victim", [0, 2])
def test_all_others_hear_which_process_died(meet, victim):
    channels, lost = meet(3)
    channels[victim]._closing = True  # stands for a dead process, whose connections the system closes:
    for peer in channels[victim]._peers.values():
        peer.socket.shutdown(socket.SHUT_RDWR)
    told = dict(lost.get(timeout=10) for _ in range(2))
    assert set(told) == {0, 1, 2} - {victim}
    assert set(told.values()) == {f"process {victim} on {socket.gethostname()}: died"}


def test_failure_reaches_a_waiting_process(meet):
    channels, lost = meet(2)
    threading.Thread(target=channels[0].all_gather_object, args=(1,), daemon=True).start()
    channels[1].fail("error: no such file: chats.jsonl")
    assert lost.get(timeout=10) == (0, f"process 1 on {socket.gethostname()}: error: no such file: chats.jsonl")
    assert channels[0].broken.is_set()


def failures(meet, *processes, timeout=20.0):
    """Return the errors of processes, each an (index, count), that cannot meet."""

    def attempt(process):
        try:
            meet.open_channel(*process, timeout=timeout)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(attempt, processes))


def test_mismatch_is_explained_to_all(meet):
    for message in failures(meet, (0, 3), (1, 3), (1, 3)):
        assert "have --process-id 1: give each its own" in message
    for message in failures(meet, (0, 2), (1, 3)):
        assert "has 3: give all the same" in message


def test_waiting_for_others_times_out(meet, port):
    first, second = failures(meet, (0, 3), (1, 3), timeout=1.0)
    assert "of 3 processes these did not join in time: 2 (process 0 listened on" in first
    assert second == first
    (alone,) = failures(meet, (1, 2), timeout=0.5)
    assert f"could not reach process 0 at 127.0.0.1:{port} in time" in alone


def test_taken_port_is_named(meet, port):
    with socket.create_server(("", port)), pytest.raises(ValueError, match=rf"port {port} of .* cannot be used"):
        meet.open_channel(0, 2)


def test_ctrl_c_outside_training_ends_a_process_in_one_line(monkeypatch, capsys):
    ended, told = [], []
    monkeypatch.setattr(processes, "_FAREWELL_SECONDS", 0)
    monkeypatch.setattr(processes.os, "_exit", ended.append)
    channel = SimpleNamespace(broken=threading.Event(), fail=told.append)
    for error in (KeyboardInterrupt(), ValueError("no such folder")):
        processes._leave(error, channel)
    assert (ended, told) == ([130, 1], ["interrupted", "no such folder"])
    assert capsys.readouterr().err == "interrupted\nerror: no such folder\n"
