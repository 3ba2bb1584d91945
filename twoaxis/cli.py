"""The command line: one typed function per command, in the file of its kind.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from twoaxis.commands.app import app

# in the order of the help page; their commands register themselves
for _file in (
    "study",
    "models",
    "inspect",
    "retrofit",
    "probe",
    "data",
    "train",
    "compare",
    "report",
    "cost",
    "advise",
):
    import_module(f"twoaxis.commands.{_file}")


def main() -> None:
    """Entry point of the `twoaxis` command: a mistake of the user's ends in one line, not in a traceback."""
    try:
        code = app.cli(
            prog="twoaxis",
            description="Residual streams and local mixers for decoder language models.",
        )
        sys.stdout.flush()
    except ValueError as error:
        print(f"twoaxis: {error}", file=sys.stderr)
        code = 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit must not flush into the pipe
            code = 141
        else:
            where = f"{error.filename}: " if error.filename else ""
            print(f"twoaxis: {where}{error.strerror or error}", file=sys.stderr)
            code = 2
    except KeyboardInterrupt:
        print("twoaxis: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code or 0)
