"""The command line: finds a command, parses its arguments, prints its result and turns errors into exit codes.

A command is a public typed function of `twoaxis.commands` that returns a result object; only this file prints one.
Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from twoaxis.base.files import json_text
from twoaxis.base.interrupt import Interrupted
from twoaxis.base.registry import did_you_mean

COMMANDS = {
    "compare": "twoaxis.commands.compare",
    "train": "twoaxis.commands.train",
    "data": "twoaxis.commands.data",
    "report": "twoaxis.commands.report",
    "methods": "twoaxis.commands.methods",
    "advise": "twoaxis.commands.advise",
    "cost": "twoaxis.commands.cost",
    "retrofit": "twoaxis.commands.retrofit",
    "probe": "twoaxis.commands.probe",
    "inspect": "twoaxis.commands.inspect",
    "generate": "twoaxis.commands.models",
    "eval": "twoaxis.commands.models:evaluate",
    "verify": "twoaxis.commands.verify",
    "check": "twoaxis.commands.check",
}
"""Commands in the order of the help, and the modules with a function of that name, or another one behind a colon."""

OF_LAB = ("transformers", "tokenizers", "accelerate", "datasets", "scipy", "matplotlib")
"""Packages of the extra `lab`, which many parts need and none of which must be there."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `twoaxis` command: exits with 0, 1 for a negative result, 2 for a mistake of the user's."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run a command line; returns the exit code, 128 + n after signal n."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed: nothing is read from it, and what is said there is lost
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # drawings must not fail where the encoding is narrow
    try:
        code = _run(list(argv))
        sys.stdout.flush()
    except Interrupted as stopped:
        print(f"twoaxis: {stopped}", file=sys.stderr)
        return 128 + (stopped.signal or 2)
    except KeyboardInterrupt:
        print("twoaxis: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit must not flush into the pipe
        return 141
    except ValueError as error:
        print(f"twoaxis: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:  # torch raises a bare RuntimeError where the CPU has too little
        first = str(error).partition("\n")[0]
        if isinstance(error, RuntimeError) and not re.search(r"can't allocate memory|out of memory", first):
            raise
        print(f"twoaxis: not enough memory ({first}); make the model, batch or context smaller", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in OF_LAB:
            raise
        from twoaxis.base.machine import needs

        print(f"twoaxis: {needs('this', error.name)}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"twoaxis: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    return code


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] == "--version":
        from twoaxis import __version__

        print(f"twoaxis {__version__}")
        return 0
    name, *rest = argv
    command = find(name)
    from twoaxis.commands.parsing import parse

    arguments, common = parse(command, name, rest)
    if common.use:
        from twoaxis.base.plugins import use

        use(*common.use)
    result = command(**arguments)
    from twoaxis.training.engines.processes import rank

    if rank() == 0:  # of several processes the first one speaks
        if common.json:
            print(json_text(result.to_dict()), end="")
        elif common.markdown:
            from twoaxis.show import markdown

            print(markdown.render(result.document()), end="")
        else:
            result.show()
    return result.exit_code


def find(name: str) -> Callable[..., Any]:
    """The function of a command; an unknown name is an error that suggests the nearest one."""
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise ValueError(f"unknown command {name!r}{hint}; the commands are {', '.join(COMMANDS)}")
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(module), function or name)


def overview() -> str:
    """The help page: what there is, a line each."""
    lines = [
        "usage: twoaxis COMMAND [options]",
        "",
        "Residual streams and local mixers for decoder language models.",
        "",
    ]
    width = max(map(len, COMMANDS)) + 4
    for name in COMMANDS:
        summary = inspect.cleandoc(find(name).__doc__ or "").split("\n")[0].split(". ")[0].rstrip(".")
        head = f"  {name}".ljust(width)  # alone under python -OO, which has no docstrings
        lines += textwrap.wrap(summary, 80, initial_indent=head, subsequent_indent=" " * width) or [head.rstrip()]
    return "\n".join([*lines, "", "twoaxis COMMAND --help shows the options of a command."])
