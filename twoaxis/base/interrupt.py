"""Signals end a run between two steps, after a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C, a request to end, and a terminal that was closed."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop and can be resumed; the message says how.

    Attributes:
        signal: the number of the signal; None where another process got it.
    """

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.signal = number


class StopSignal:
    """Stop flag that is set by a signal.

    Attributes:
        signal: the number of the signal that came; None before.
        patient: whether a first signal waits for the end of a step, where the flag is looked at. Until this is set a
            signal interrupts at once. It sets the flag all the same: Python drops an exception that is raised inside a
            fork hook or a finaliser.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.patient = False

    @property
    def requested(self) -> bool:
        """True once a signal arrived."""
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager that catches signals; a second one interrupts at once. Only the main thread gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, frame: FrameType | None) -> None:
            waits = self.patient and not self.requested
            self.signal = number
            if not waits:
                raise Interrupted("interrupted before the step was done; what was saved before is kept", number)

        # What is ignored stays ignored: nohup asks for that.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heard}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Context manager that holds signals back to its end, as around a fork, whose hooks would drop a Ctrl-C.

    A process that is forked inside has to `allow` them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def allow() -> None:
    """Let signals through again, in a process that was forked while they were held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
