"""Signals: what a first and a second one do, and that none is lost where Python drops exceptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from twoaxis.base.interrupt import SIGNALS, Interrupted, StopSignal


@pytest.mark.parametrize("number", SIGNALS)
def test_a_patient_stop_takes_one_signal_and_no_second(number: int) -> None:
    stop = StopSignal()
    with stop.listening():
        stop.patient = True
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.signal) == (True, number)
        with pytest.raises(Interrupted, match="interrupted before the step was done"):
            os.kill(os.getpid(), number)
    stop = StopSignal()
    with stop.listening(), pytest.raises(Interrupted) as caught:  # without patience the first one interrupts
        os.kill(os.getpid(), number)
    assert (caught.value.signal, stop.requested) == (number, True)


def test_handlers_come_back_and_what_is_ignored_stays_so() -> None:
    before = signal.getsignal(signal.SIGINT)
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopSignal().listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGHUP, kept)


FORK = """
import os, signal, sys
from twoaxis.base.interrupt import StopSignal, allow, deferred
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))

def fork():
    pid = os.fork()
    if pid == 0:
        allow()
        os._exit(0 if not signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 1)
    return os.waitpid(pid, 0)[1]

stop = StopSignal()
if sys.argv[1] == "flag":  # the exception is lost in the hook, the flag is not
    with stop.listening():
        fork()
        print(stop.requested)
else:
    try:
        with deferred():
            print(fork())
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize(("kind", "said"), [("flag", "True\n"), ("deferred", "0\ninterrupted\n")])
def test_a_signal_inside_a_fork_hook_is_not_lost(kind: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, kind], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == said, done.stderr
