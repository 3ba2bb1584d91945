"""The command that shows what would be trained on: data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from twoaxis.data.options import DataFields
from twoaxis.show.document import Block, Code, Document, Facts, Heading, Shown

if TYPE_CHECKING:
    from twoaxis.data.load import TaskData


def data(*, seed: int = 0, examples: int = 1, check: bool = False, **fields: Unpack[DataFields]) -> Shown:
    """Show what a run would train on: documents, tokens, split, fingerprint and some examples.

    Args:
        seed: Whose order the examples are shown in.
        examples: How many to show, from the first on.
        check: Read all documents again and hash all tokenised data; what is damaged is made anew.
        **fields: Of a run, about its data.
    """
    if not 0 <= examples <= MOST:
        raise ValueError(f"examples must lie between 0 and {MOST}, got {examples}")
    from twoaxis.data.load import TaskData, bars, load_data
    from twoaxis.data.options import DataOptions

    options = DataOptions.from_dict(fields, "data")
    if not options.data[0].startswith("task:"):
        from twoaxis.base.machine import quiet

        quiet()
    with bars() as watch:
        loaded = load_data(options, watch=watch, check=check)
    facts = loaded.describe()
    if isinstance(loaded, TaskData):
        facts["solver"] = _solved(loaded, seed)
    rows = _task_lines(facts) if isinstance(loaded, TaskData) else _text_lines(facts)
    blocks: list[Block] = [Facts(tuple(rows))]
    excerpts = [loaded.excerpt(number, seed=seed) for number in range(examples)]
    for number, excerpt in enumerate(excerpts):
        blocks += [Heading(f"example {number} of seed {seed}"), Code(excerpt)]
    return Shown(facts | {"seed": seed, "examples": excerpts}, Document("", tuple(blocks)))


MOST = 1000
"""Examples that can be shown at once."""


def _text_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    train, held, size = facts["train"], facts["held_out"], facts["bytes_per_token"]
    per = "" if size is None else f", {size:.3f} bytes per predicted held-out token"
    python = f", Python {facts['python']}" if "python" in facts else ""
    lines = [("data", f"{facts['name']}{python}")]
    for name, part in (("train", train), ("held out", held)):
        documents = f"{part['documents']:,} documents, {part['bytes']:,} bytes"
        lines.append((name, f"{documents}, {part['tokens']:,} tokens, {part['rows']:,} rows of {facts['context']:,}"))
    share = held["bytes"] / (train["bytes"] + held["bytes"])
    lines += [
        ("split", f"{share:.1%} of the bytes are held out, by a hash of each document"),
        ("tokenizer", f"{facts['tokenizer']}, {facts['vocab_size']:,} tokens{per}"),
        ("isolate", "yes" if facts["isolate"] else "no"),
        ("fingerprint", facts["fingerprint"]),
    ]
    return lines + [("note", note) for note in facts["notes"]]


def _task_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    options = ", ".join(f"{name}={value}" for name, value in facts["options"].items())
    solver = facts["solver"]
    return [
        ("data", facts["name"]),
        ("task", facts["summary"]),
        ("options", options),
        ("chance", f"accuracy {facts['chance']:.4g}, loss {facts['chance_loss']:.4f} nats"),
        ("solver", f"accuracy {solver['accuracy']:.4g} over {solver['answers']:,} answers"),
        ("fingerprint", facts["fingerprint"]),
    ]


def _solved(loaded: TaskData, seed: int) -> dict[str, Any]:
    """How the known solver does on the first examples."""
    examples = loaded.task.examples(seed, 0, 64)
    asked = examples.labels >= 0
    right = loaded.task.solve(examples.input_ids)[asked] == examples.labels[asked]
    return {"answers": int(asked.sum()), "accuracy": float(right.mean())}
