"""From a command's signature to its command line, and back to the keyword arguments that were typed.

    twoaxis train --out runs/delta --stream deep_delta --steps 500
    twoaxis.train(out="runs/delta", stream="deep_delta", steps=500)

are the same call: what is not typed is not passed, so that a command cannot tell the two apart. `**fields` of a command
stand for the fields of a run, and a parameter that is `Options` for all of its fields; in the help they are shown in
groups with their defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from twoaxis.base.options import Options, field_docs, parse_integer

F = TypeVar("F", bound=Callable[..., Any])


def plain(command: F) -> F:
    """Decorator: `help` shows `stream: Sequence[str] = ()`, not the annotations that tyro reads."""
    signature = inspect.signature(command)
    shown = [each.replace(annotation=_plain(each.annotation, command)) for each in signature.parameters.values()]
    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return command


def showing(defaults: Mapping[str, Any]) -> Callable[[F], F]:
    """Decorator: `--help` shows these defaults of fields of a run, which are the command's own."""

    def decorate(command: F) -> F:
        command.defaults = defaults  # type: ignore[attr-defined]
        return command

    return decorate


def _plain(note: Any, command: Callable[..., Any]) -> Any:
    """An annotation without its metadata; the names in it are the command's module's."""
    found = eval(note, command.__globals__) if isinstance(note, str) else note
    while get_origin(found) in (Annotated, Unpack):
        found = get_args(found)[0]
    return found


def word(metavar: str, read: Callable[[str], Any] = str) -> Any:
    """For `Annotated`: an option that Python gives in several forms and the command line as one word, which is read."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _named(text: str) -> str:
    if not text:
        raise ValueError("it names no folder")  # an empty path would be the current one
    return text


Folder = Annotated[str, word("DIR", _named)]
SavedFolder = Annotated[str, Positional, arg(metavar="DIR")]
File = Annotated[str | None, arg(metavar="FILE")]
Shape = arg(metavar="NAME|config.json")
Names = Annotated[Sequence[str], UseAppendAction, arg(metavar="NAME[:k=v,...]")]
Name = arg(metavar="NAME[:k=v,k=v]")
Numbers = Annotated[int | str | Sequence[int] | None, word("N|A,B,C")]
Rates = Annotated[float | str | Sequence[float] | None, word("RATE[,RATE,...]")]
Launcher = Annotated[str | None, arg(metavar="local|ray[:k=v,...]|slurm[:k=v,...]")]
AsBytes = Annotated[bool, arg(name="bytes")]


Repeated = Annotated[tuple[str, ...], UseAppendAction]
"""An option that may be given several times; () is "not given", as it cannot be typed."""

USE = "Python file that registers streams and mixers of your own. It is run: name only files you trust."


class Common(NamedTuple):
    """What every command takes."""

    json: bool  # print the result as one JSON document
    markdown: bool  # print it as Markdown
    use: tuple[str, ...]  # python files that register streams and mixers


def parse(command: Callable[..., Any], name: str, args: Sequence[str]) -> tuple[dict[str, Any], Common]:
    """The keyword arguments of a command as they were typed, and the options that all commands share.

    A mistake is an error of one line; after `--help` the process ends.

    Args:
        command: a function with annotated keyword parameters; `**fields` are the fields of a run.
        name: of the command.
        args: what stands behind it on the command line.
    """
    notes_of = {each: note for each, note in command.__annotations__.items() if each != "return"}
    # The result's type is imported for type checkers only: it would bring torch.
    parameters: Any = types.SimpleNamespace(__annotations__=notes_of)
    hints = get_type_hints(parameters, globalns=command.__globals__, include_extras=True)
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    rest = [each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
    # `**fields: Unpack[T]`: the keys of the TypedDict T are fields of a run.
    fields = set(get_type_hints(get_args(hints[rest[0]])[0])) if rest else set()
    made_of = {name: hint for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, Options)}
    own = [each for each in own if each.name not in made_of]
    notes: dict[str, Any] = {each.name: _with_hint(spelled(hints[each.name]), each.default) for each in own}
    keyword = inspect.Parameter.KEYWORD_ONLY
    more: list[inspect.Parameter] = []
    groups = {name: _group(options) for name, options in made_of.items()}
    if fields:
        from twoaxis.training.config import SECTIONS

        sections = {
            section: _group(options, fields - set(notes), getattr(command, "defaults", {}))
            for section, options in SECTIONS.items()
        }
        groups |= {section: group for section, group in sections.items() if group[0].__annotations__}
    for group, (made, default) in groups.items():
        notes[f"_{group}"] = Annotated[made, arg(name=group, help="")]
        more.append(inspect.Parameter(f"_{group}", keyword, default=default))
    for option, form in (("json", "one JSON document"), ("markdown", "Markdown")):
        text = arg(name=option, help=f"Print the result as {form}.", help_behavior_hint="")
        notes[f"_{option}"] = Annotated[bool, text, tyro.conf.FlagCreatePairsOff]
        more.append(inspect.Parameter(f"_{option}", keyword, default=False))
    if "use" not in notes:  # a comparison keeps the files with its plan
        notes["_use"] = Annotated[Repeated, arg(name="use", metavar="FILE.py", help=USE)]
        more.append(inspect.Parameter("_use", keyword, default=()))

    def typed(**given: Any) -> tuple[dict[str, Any], Common]:
        common = Common(given.pop("_json"), given.pop("_markdown"), given.pop("_use", ()))
        if common.json and common.markdown:
            raise ValueError("--markdown and --json are two forms of one result; give one of them")
        flat: dict[str, Any] = {}
        for option, value in given.items():
            group = option.removeprefix("_")
            flat |= {group: value} if group in made_of else value if option != group else {option: value}
        return {option: value for option, value in flat.items() if not (option in SPELLED and value == ())}, common

    typed.__signature__ = signature.replace(parameters=[*own, *more], return_annotation=Any)  # type: ignore[attr-defined]
    typed.__annotations__, typed.__doc__ = notes, command.__doc__
    _refuse_repeated(args, {each for each, note in notes.items() if UseAppendAction in get_args(note)})
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            config = (OmitArgPrefixes,)
            arguments, common = tyro.cli(typed, args=list(args), prog=f"twoaxis {name}", config=config)
    except SystemExit as ended:
        if ended.code:
            raise ValueError(_one_line(box.getvalue(), name)) from ended
        raise  # after the help
    typed_of = {each: made.from_dict(arguments.pop(each)) for each, made in made_of.items() if arguments[each]}
    return {each: value for each, value in arguments.items() if each not in made_of} | typed_of, common


def _refuse_repeated(args: Sequence[str], several: set[str]) -> None:
    """Refuse an option that is given twice, of which the last one would count, unless it is one to give `several` of.

    Both forms of a switch, --x and --no-x, are the same option.
    """
    typed = Counter(
        each.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        for each in args
        if each.startswith("--")
    )
    for name, times in typed.items():
        if times > 1 and name not in several | {"model", "use", ""}:
            more = "; twoaxis compare takes several" if name in ("stream", "mixer") else ""
            raise ValueError(f"--{name.replace('_', '-')} is given {times} times; give it once{more}")


def _one_line(box: str, name: str) -> str:
    """What tyro draws a box around: what is wrong, what may have been meant, and where to read more."""
    parts: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()[1:-1]:
        inside = line[2:-2].rstrip()
        if not inside.strip("─-"):
            parts.append([])
        elif not inside.startswith(" " * 8):  # where the help of an option stands
            parts[-1].append(inside.strip())
    text = ". ".join(" ".join(part).rstrip(".") for part in parts if part and part[0] != "Argument helptext:")
    if alone := re.match(r"Unrecognized options: ([^-,. ][^,]*?)(?=[,.] |$)", text):
        return f"{alone[1]!r} stands alone; options are --NAME VALUE, see twoaxis {name} --help"
    if several := re.search(
        r": no type matching (\S+) could be instantiated from \['(.*?)'\]\. Got errors:.*?(?=\. For full|$)", text
    ):
        return text.replace(
            several[0], f": {several[2]!r} is no {several[1].removeprefix('{None}|').replace('FLOAT', 'number')}"
        )
    choices = re.search(r"Expected one of \((.*?)\)", text)
    if choices is None:
        return text
    names = sorted(set(re.findall(r"'(.*?)'", choices[1])) - {"None"})
    return text.replace(choices[0], f"Expected one of {', '.join(names)}")


def spelled(hint: Any) -> Any:
    """An annotation as the command line reads and shows it: integers also as 1e6, 300k and 2M, and `None`, which is
    what an option is when it is not typed, not among the values to type."""
    inner, rest = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    parts = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
    bare = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts}
    if bare == {int}:
        return Annotated[(int, *rest, word("INT", parse_integer))]
    if bare == {int, types.NoneType}:
        read = lambda text: None if text == "None" else parse_integer(text)  # noqa: E731
        return Annotated[(int | None, *rest, word("INT", read))]
    if types.NoneType not in bare or len(bare) > 2:
        return hint
    (other,) = bare - {types.NoneType}
    if get_origin(other) is Literal:
        return Annotated[(inner, arg(metavar=f"{{{','.join(get_args(other))}}}"), *rest)]
    return Annotated[(inner, arg(metavar=other.__name__.upper()), *rest)] if isinstance(other, type) else hint


def _with_hint(note: Any, default: Any) -> Any:
    """The annotation of an option whose default goes without saying: not given, off, or none of several."""
    silent = default is None or default is False or (default in ("", ()) and UseAppendAction not in get_args(note))
    return Annotated[note, arg(help_behavior_hint="")] if silent else note


SPELLED: dict[str, Any] = {
    "model": Annotated[Repeated, arg(metavar="FIELD=VALUE[,...]")],
    "source": Annotated[str, arg(name="from", metavar="DIR")],
    "data": Annotated[tuple[str, ...], arg(metavar="SOURCE")],
}
"""Fields of a run that the command line writes in another way than Python."""


def _group(
    options: type[Options], wanted: set[str] | None = None, defaults: Mapping[str, Any] = types.MappingProxyType({})
) -> tuple[Any, dict[str, Any]]:
    """Fields of options, None is all of them, as a TypedDict, of which tyro returns what was typed, and its default.

    `defaults` are shown in place of the options' own.
    """
    hints, docs = get_type_hints(options, include_extras=True), field_docs(options)
    made: dict[str, Any] = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if wanted is not None and field.name not in wanted:
            continue
        default: Any = defaults.get(field.name, field.default)
        default = None if default is dataclasses.MISSING else default
        shown = (" ".join(map(str, default)) or None) if isinstance(default, tuple) else default
        hint = "" if shown is None or shown is False else f"(default: {shown})"
        help_of = arg(help=docs[field.name], help_behavior_hint=hint)
        made[field.name] = Annotated[SPELLED.get(field.name) or spelled(hints[field.name]), help_of]
    # tyro cannot leave a repeatable option of a TypedDict out: () stands for "not typed".
    return TypedDict(options.__name__, made, total=False), {name: () for name in made if name == "model"}  # type: ignore[operator,misc]
