import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxglue.terminal.interrupt import Interrupt


@pytest.fixture(autouse=True)
def default_handlers():
    """Handle signals as a command of its own does: those started in a shell's background ignore SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_asks_and_second_raises(number, status, capfd):
    with Interrupt() as interrupt:
        assert not interrupt.number
        signal.raise_signal(number)
        assert (interrupt.number, interrupt.status) == (number, status)
        assert f"{number.name}: saving a checkpoint and exiting after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt, match="before the checkpoint was saved"):
            signal.raise_signal(number)


def test_previous_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_leave_signals_alone():
    with ThreadPoolExecutor(1) as pool:
        before = signal.getsignal(signal.SIGTERM)
        pool.submit(Interrupt().__enter__).result()
        assert signal.getsignal(signal.SIGTERM) == before


def test_hangup_asks_once_unless_ignored():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interrupt.number == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            interrupt.output_closed()
        assert not interrupt.number
    finally:
        signal.signal(signal.SIGHUP, before)
