"""Ctrl-C and SIGTERM end a run between two steps, after a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop and can be taken up again; the message says how.

    Attributes:
        signal: the number of the signal; None where another process got it.
    """

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.signal = number


class Stop:
    """Remembers that somebody asked to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def asked(self) -> bool:
        """Whether somebody did."""
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catch SIGINT and SIGTERM; a second one is not waited for. Signals reach the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def heard(number: int, frame: Any) -> None:
            if self.asked:
                raise Interrupted("interrupted before the step was done; what was saved before is kept", number)
            self.signal = number

        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
