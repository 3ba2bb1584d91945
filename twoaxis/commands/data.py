"""The command that shows what would be trained on: data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from twoaxis.data.load import TaskData


def data(
    *,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE")] = ("stdlib",),
    tokenizer: str = "bpe:2048",
    text_field: str = "text",
    context: int = 256,
    held_out: float = 0.05,
    isolate: bool = False,
    cache: str | None = None,
    seed: int = 0,
    examples: int = 1,
    check: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Show what a run would train on: documents, tokens, split, fingerprint and some examples.

    Args:
        data: stdlib, files and folders, hf:DATASET, or one task:NAME[:option=value,...].
        tokenizer: bytes, bpe:SIZE (trained on the training split), or the folder or hub name of a tokenizer.
        text_field: Where jsonl, parquet and Hugging Face records keep their text.
        context: Tokens of a training example.
        held_out: Part of the documents kept for evaluation.
        isolate: Keep packed documents from seeing each other.
        cache: Folder of tokenised data. None is the user's cache folder.
        seed: Whose order the examples are shown in.
        examples: How many to show, from the first on.
        check: Read all documents again and hash all tokenised data; what is damaged is made anew.
        json_output: Print one JSON document instead of lines.
    """
    if examples < 0:
        raise ValueError(f"examples must not be negative, got {examples}")
    from twoaxis.data.options import DataOptions

    options = DataOptions(
        data=data,
        tokenizer=tokenizer,
        text_field=text_field,
        context=context,
        held_out=held_out,
        isolate=isolate,
        cache=cache,
    )
    shown = describe(options, seed=seed, examples=examples, check=check)
    print(json.dumps(shown.to_dict(), indent=1, ensure_ascii=False) if json_output else shown.text())
    return 0


@dataclass(frozen=True)
class Described:
    """What a run would train on.

    Attributes:
        facts: of the data; see `Data.describe`.
        seed: whose order the examples are in.
        examples: training examples as text, from the first on.
    """

    facts: dict[str, Any]
    seed: int
    examples: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.facts | {"seed": self.seed, "examples": self.examples}

    def text(self) -> str:
        """Lines for a terminal."""
        rows = _task_lines(self.facts) if self.facts["tokenizer"] is None else _text_lines(self.facts)
        lines = [f"{name:<14} {value}" for name, value in rows]
        for number, example in enumerate(self.examples):
            lines += ["", f"example {number} of seed {self.seed}", *(f"  | {line}" for line in example.splitlines())]
        return "\n".join(lines)


def describe(options: Any, *, seed: int = 0, examples: int = 1, check: bool = False) -> Described:
    """Load data and describe it.

    Args:
        options: DataOptions, or a run's.
        seed: whose order the examples are shown in.
        examples: how many to show.
        check: see `load_data`.
    """
    from twoaxis.data.load import TaskData, bars, load_data

    if not options.data[0].startswith("task:"):
        from twoaxis.model.load import quiet

        quiet()
    with bars() as watch:
        loaded = load_data(options, watch=watch, check=check)
    facts = loaded.describe()
    if isinstance(loaded, TaskData):
        facts["solver"] = _solved(loaded, seed)
    return Described(facts, seed, [loaded.excerpt(number, seed=seed) for number in range(examples)])


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
