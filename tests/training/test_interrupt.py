import signal

import pytest

from jaxglue.training.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_second_raises(number, capfd):
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        assert f"{number.name}: saving a checkpoint and exiting after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt, match="before the checkpoint was saved"):
            signal.raise_signal(number)


def test_previous_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
