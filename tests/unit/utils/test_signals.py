"""Signals that wait for the end of a block."""

import signal
import threading

import pytest

from fedjax_het.utils.signals import defer_signals


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Handlers that raise; the test must leave them installed."""

    def stop(number, frame):
        raise SystemExit(number)

    before = signal.signal(signal.SIGTERM, stop)
    yield
    assert signal.getsignal(signal.SIGTERM) is stop
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGTERM, before)


def test_each_signal_is_delivered():
    done = []
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised, defer_signals():
        signal.raise_signal(signal.SIGINT)
        with defer_signals():  # nested blocks wait for the outer block
            signal.raise_signal(signal.SIGTERM)
        done.append(True)
    assert done
    assert {type(raised.value), type(raised.value.__context__)} == {KeyboardInterrupt, SystemExit}


def test_error_of_the_block_is_kept():
    with pytest.raises(KeyboardInterrupt) as raised, defer_signals():
        signal.raise_signal(signal.SIGINT)
        raise KeyError
    assert isinstance(raised.value.__context__, KeyError)


def test_blocks_without_a_change():
    reached = []

    def run_block():
        with defer_signals():
            reached.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run_block)
    thread.start()
    thread.join()
    with defer_signals(enabled=False):
        reached.append(signal.getsignal(signal.SIGINT))
    assert reached == [signal.default_int_handler] * 2
