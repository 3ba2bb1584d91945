"""Pages of the reference that are made of the code: commands, configuration, checks, and llms.txt of all pages."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from twoaxis import cli
from twoaxis.base.method import Card
from twoaxis.base.options import field_docs
from twoaxis.guide import map as methods
from twoaxis.guide import pages as method_pages
from twoaxis.show import markdown
from twoaxis.show.document import Block, Column, Document, Heading, Items, Prose, table

DOCS = Path(__file__).parents[1]
ORDER = ("tutorial", "howto", "reference", "explanation", "results")
TITLES = {"tutorial": "Tutorial", "howto": "How to", "explanation": "Explanation"}


def pages() -> dict[str, str]:
    """Every generated page by its path below docs/."""
    return {
        "reference/cli.md": markdown.render(Document("Commands", tuple(_commands()))),
        "reference/configuration.md": markdown.render(Document("Configuration", tuple(_configuration()))),
        "reference/checks.md": markdown.render(Document("Checks", tuple(_checks()))),
        "reference/methods.md": markdown.render(Document("Methods", tuple(_methods()))),
    }


MEANINGS: dict[str, str] = {
    **{field.name: field_docs(Card)[field.name] for field in dataclasses.fields(Card)},
    "known_as": "Other names that every command takes.",
    "parameters": "Numbers learned beyond the plain model's, all blocks.",
    "parameters_share": "The same as a share of the attention and MLP matrices.",
    "flops": "Added floating-point operations per token and forward pass; a multiply-add is 2.",
    "flops_share": "The same as a share of those of the attention and MLP matrices.",
    "live": "Numbers per token carried from layer to layer, at their most; the plain residual's is the width.",
    "kept": "Numbers per sequence kept between tokens.",
    "neutral": "How exactly some parameters make the model the plain one: bitwise, rounding (order of sums), "
    "scale (up to the pre-norm's epsilon) or none.",
}
"""What stands in every column of the map of methods."""


OVERVIEW: dict[str, tuple[str, ...]] = {
    methods.TITLES["about"]: ("title", "known_as", "year", "goal"),
    "How it reads": ("granularity", "literal_qkv", "adaptivity"),
    methods.TITLES["cost"]: methods.SHORT["cost"],
}
"""Short columns that the page compares methods by; the others stand in each method's own section."""


def _methods() -> Iterator[Block]:
    shape = methods.make_shape()
    yield Prose(
        "For those who want to know what methods there are. Afterwards you know what each reads, how it weighs, "
        "where the result goes and what it costs; a method's own section has its equation, its options and what "
        "was published about it."
    )
    yield Prose(
        "The words come from the cards in the code, and the costs are those of modules built for one shape, not "
        "estimates. `twoaxis methods` prints the tables for any shape, `twoaxis methods NAME` one section."
    )
    rows = methods.entries(shape)
    for title, keys in OVERVIEW.items():
        yield from (Heading(title), methods.table(rows, keys, link=True))
    meanings = tuple(f"**{methods.header(key)}**: {MEANINGS[key]}" for key in methods.COLUMNS)
    yield from (Prose(method_pages.setting(shape)), Heading("What the words mean"), Items(meanings))
    for row in rows:
        yield from (Heading(row.name), *method_pages.page(row, level=2))


def _commands() -> Iterator[Block]:
    yield Prose(
        "For those at a terminal. Afterwards you know every command and option; `twoaxis COMMAND --help` has the same "
        "with types and defaults. All commands also take `--json`, `--markdown` and `--use FILE.py`, which runs a file "
        "that registers methods of your own."
    )
    for name in cli.COMMANDS:
        command = cli.find(name)
        about, _, arguments = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:\n")
        yield Heading(name)
        yield from map(Prose, (" ".join(each.split()) for each in about.strip().split("\n\n")))
        found = re.findall(r"^    (\**\w+): (.*?)(?=^    \S|\Z)", arguments, re.MULTILINE | re.DOTALL)
        kinds = inspect.signature(command).parameters
        yield Items(tuple(_option(name, " ".join(words.split()), kinds) for name, words in found if name not in PYTHON))


PYTHON = ("contenders",)
"""Parameters that the command line does not have."""


def _option(argument: str, words: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    if argument.startswith("**"):
        return "fields of a run, such as `--steps`, `--context`, `--lr`: see the page of the configuration"
    if parameters[argument].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return f"`{argument.upper()}` {words}"
    renamed = {"as_bytes": "bytes", "compiled": "compile"}.get(argument, argument)
    return f"`--{renamed.replace('_', '-')}` {words}"


def _configuration() -> Iterator[Block]:
    from twoaxis.model.config import ModelConfig
    from twoaxis.model.deployment import Deployment
    from twoaxis.model.presets import PRESETS, preset, preset_names
    from twoaxis.training.config import SECTIONS

    yield Prose(
        "For those who write a run down. Afterwards you know every field of a run, on the command line (`--lr 3e-3`), "
        "in a TOML, JSON or YAML file (`--config FILE`) and in Python (`twoaxis.train(lr=3e-3)`). What is said counts "
        "more than a file, a file more than the default."
    )
    for name, options in SECTIONS.items():
        yield Heading(f"Fields: {name}")
        yield Items(tuple(_fields(options)))
    yield Heading("Fields of a model")
    yield Prose("`--model FIELD=VALUE` changes a preset; the names are those of transformers.")
    yield Items(tuple(_fields(ModelConfig)))
    yield Heading("Fields of a deployment")
    yield Prose("Options of `twoaxis cost` and `twoaxis advise`.")
    yield Items(tuple(_fields(Deployment)))
    yield Heading("Presets")
    rows = []
    for name in preset_names():
        shape = preset(name)
        heads = f"{shape.num_attention_heads} x {shape.head_size}, {shape.kv_heads} for keys"
        sizes = (PRESETS[name].parameters, shape.num_hidden_layers, shape.hidden_size, shape.hidden_width(0))
        rows.append((f"`{name}`", *(f"{size:,}" for size in sizes), heads))
    yield table(("preset", "parameters", "blocks", "width", "MLP", Column("heads", number=False)), rows)


def _fields(options: type) -> Iterator[str]:
    docs: dict[str, str] = field_docs(options)
    for field in dataclasses.fields(options):
        default: Any = field.default if field.default is not dataclasses.MISSING else None
        spelled = " ".join(map(str, default)) if isinstance(default, tuple) else default
        yield f"`{field.name}` ({'none' if spelled in (None, '') else spelled}): {' '.join(docs[field.name].split())}"


def _checks() -> Iterator[Block]:
    from twoaxis.verify import run  # noqa: F401  every file of claims registers them
    from twoaxis.verify.claim import CLAIMS

    yield Prose(
        "For authors of methods, and for those who wonder what is proved. Afterwards you know what `twoaxis check` and "
        "`twoaxis verify` measure. `--only FAMILY` or `--only NAME` takes some."
    )
    for family in dict.fromkeys(claim.family for claim in CLAIMS.values()):
        yield Heading(family)
        yield Items(tuple(f"**{c.name}**: {_sentence(c.measure)}" for c in CLAIMS.values() if c.family == family))


def _sentence(measure: Any) -> str:
    """The first paragraph of what a claim says of itself."""
    return " ".join(inspect.cleandoc(measure.__doc__ or "").split("\n\n")[0].split())


def llms() -> str:
    """llms.txt: what this is, and every page with what it is for."""
    lines = [
        "# twoaxis",
        "",
        "> Residual streams and local mixers for decoder language models, in PyTorch: one transformer, its methods "
        "each held to its original code or a definition, compared with intervals, put onto models of "
        "transformers. Commands and Python functions have the same names and options.",
    ]
    for folder in ORDER:
        lines += ["", f"## {TITLES.get(folder, folder.capitalize())}", ""]
        for page in sorted((DOCS / folder).rglob("*.md")):
            title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
            first = " ".join(re.split(r"(?<=[.:]) ", " ".join(rest.split("\n\n")[0].split()))[:2])
            lines.append(f"- [{title.removeprefix('# ')}]({page.relative_to(DOCS).as_posix()}): {first}")
    return "\n".join(lines) + "\n"
