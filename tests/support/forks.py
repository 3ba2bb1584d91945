"""Children that are forked from this process instead of started anew: what they import is there already.

A worker of a comparison imports torch and perhaps transformers, which takes more time than all runs of a small
comparison. Forked, it runs the same function with the same words, environment, session and pipes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import IO, Any


class Forked:
    """A forked child with the part of `subprocess.Popen` that a launcher uses.

    Args:
        command: interpreter, `-m`, a module with a function `main`, and its words.
        stdin: a pipe, whatever is said.
        stdout: an open file, for stderr as well.
        env: the child's environment.
        **others: those of a child with a session of its own.
    """

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: IO[bytes], env: Mapping[str, str], **others: Any
    ) -> None:
        assert stdin == subprocess.PIPE
        assert others == {"stderr": stdout, "start_new_session": True}
        _, _, module, *words = command
        main = import_module(module).main
        self.returncode: int | None = None
        end, held = os.pipe()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.setsid()
                os.close(held)
                for number, file in enumerate((end, stdout.fileno(), stdout.fileno())):
                    os.dup2(file, number)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                os.environ.clear()
                os.environ.update(env)
                code = main(words)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self.pid = pid
        os.close(end)
        self.stdin = os.fdopen(held, "wb")

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """The exit code, once there is one."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal while it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))
