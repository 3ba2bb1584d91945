"""A document as text of a given width, with colours on a terminal.

A table wider than the page wraps the words of its cells, and long names after : and , too; where even that leaves
columns too narrow to read, it becomes several tables with the first column repeated. Charts and
wide grids are left out.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from twoaxis.show.charts import Chart, Grid
from twoaxis.show.document import Block, Code, Document, Facts, Heading, Items, Prose, Table, grid_table, spans

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

GAP = 2
"""Blank columns between the columns of a table."""
READABLE = 12
"""A column of words is not made narrower than this to fit one more beside it."""
NUMERIC = re.compile(r"[-+×<]?\.?\d|-?$")
"""How the cells of a column of numbers begin."""
PROSE = 100
"""Paragraphs are not wider than this however wide the terminal."""
WIDTH = 80
"""Columns where standard output is no terminal; COLUMNS in the environment says otherwise."""

STYLES = {"": "", "bold": "bold", "code": "cyan", "better": "green", "worse": "red", "warn": "yellow"}


def show(document: Document, width: int | None = None) -> None:
    """Print to standard output, in colour if somebody watches."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if width is None else width
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a drawing must not fail where the encoding is narrow
    print(render(document, width, colour=sys.stdout.isatty()), end="", flush=True)


def render(document: Document, width: int = WIDTH, *, colour: bool = False) -> str:
    """The document as text; only code, and a path in a list, may be wider than `width`."""
    from rich.console import Console
    from rich.text import Text

    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colour, highlight=False, markup=False, emoji=False)
    if document.title:
        console.print(
            Text(document.title, "bold"), Text("═" * min(len(document.title), width), "bright_black"), sep="\n"
        )
    blocks = [block for block in document.blocks if not isinstance(block, Chart)]
    for number, block in enumerate(b for b in blocks if not isinstance(b, Grid) or grid_table(b)):
        if number or document.title:
            console.print()
        if isinstance(block, Grid):
            _print(console, Heading(block.title, 3))
        _print(console, block)
    text = file.getvalue()
    return text if colour else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _print(console: Console, block: Block) -> None:
    from rich.text import Text

    width = min(console.width, PROSE)
    match block:
        case Heading(text, level):
            shout = level == 2 and "/" not in text  # a path means another thing in capitals
            console.print(Text(text.upper() if shout else text, "bold"))
        case Prose(text):
            console.print(_words(text), width=width)
        case Items(items):
            _list(console, [("-", item) for item in items], width)
        case Code(text):
            console.print(Text(textwrap.indent(text, "    "), "cyan"), soft_wrap=True)
        case Facts(pairs):
            _list(console, list(pairs), console.width)
        case Grid() if (made := grid_table(block)) is not None:
            _print(console, made)
        case Table(notes=notes):
            for order, (columns, widths) in enumerate(fit(block, console.width)):
                if order:
                    console.print()
                console.print(_table(block, columns, widths))
            for note in notes:
                console.print(_words(note), width=width, style="bright_black")


def _words(text: str) -> Text:
    """Words with their styles; code keeps its backticks, which set it apart without colours too."""
    from rich.text import Text

    pieces = [(f"`{piece}`" if style == "code" else piece, STYLES[style]) for piece, style in spans(text)]
    return Text.assemble(*pieces)


def _list(console: Console, pairs: list[tuple[str, str]], width: int) -> None:
    """Names and words beside them, each wrapped under itself; a path stays in one piece, so that it can be copied."""
    from rich.text import Text

    indent = max(len(name) for name, _ in pairs) + (1 if pairs[0][0] == "-" else GAP)
    for name, words in pairs:
        text = _words(words)
        # A command of several lines can be copied whole.
        mark = " \\" if words.startswith(("`twoaxis ", "twoaxis ")) else ""
        lines = text.divide(_starts(text.plain, width - indent - len(mark)))
        for number, line in enumerate(lines):
            line.rstrip()
            if number < len(lines) - 1:
                line.append(mark)
            head = Text(("" if number else name).ljust(indent), "" if name == "-" else "bright_black")
            console.print(head + line, soft_wrap=True)


def _starts(text: str, width: int) -> list[int]:
    """Where the second and later lines of a text begin: at words, and inside a word that is longer and no path.

    An option and its value, `--prompt TEXT`, are one word if they fit into a line.
    """
    starts, start = [], 0
    width = max(width, READABLE)  # names may take all of a narrow page
    pair = rf"--[a-z-]+ (?=[^-\s]\S*)\S{{1,{max(1, width - 12)}}}(?!\S)|\S+"
    for word in re.finditer(pair, text):
        if start < word.start() and word.end() - start > width:
            starts.append(start := word.start())
        while word.end() - start > width and "/" not in word[0]:
            starts.append(start := start + width)
    return starts


# Tables.


class Fit(NamedTuple):
    """A part of a table: which columns, and how wide each is."""

    columns: list[int]
    widths: list[int]


def plain(text: str) -> str:
    """Words as they stand on a terminal without styles."""
    return "".join(f"`{piece}`" if style == "code" else piece for piece, style in spans(text))


def pieces(text: str) -> list[str]:
    """Words that are not broken: what stands between spaces, and in a long name up to each : and ,."""
    return [piece for word in text.split() for piece in re.findall(r"[^:,]+[:,]*|[:,]+", word)] or [""]


def fold(text: str, width: int) -> list[str]:
    """Words in lines of at most `width`, broken at spaces, in longer names after : and ,, and else where they must."""
    lines = [""]
    for number, word in enumerate(text.split()):
        gap = " " if number and lines[-1] else ""
        if len(lines[-1]) + len(gap) + len(word) <= width:
            lines[-1] += gap + word
            continue
        for order, piece in enumerate(pieces(word) if len(word) > width else [word]):
            gap = gap if order == 0 else ""
            if lines[-1] and len(lines[-1]) + len(gap) + len(piece) > width:
                lines.append("")
                gap = ""
            lines[-1] += gap + piece
            while len(lines[-1]) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines


def fit(table: Table, width: int) -> list[Fit]:
    """The parts in which a table fits into `width`, each with the first column."""
    natural, needed, amount = [], [], []
    for place, column in enumerate(table.columns):
        cells = [plain(row[place].text) for row in table.rows]
        split = str.split if column.number or column.code else pieces
        words = [*column.head.split(), *(word for cell in cells for word in split(cell))]  # a head folds at its words
        if all(NUMERIC.match(cell) for cell in cells):
            words += cells  # a number and its unit, or the ends of an interval, stay on one line
        longest = max((len(word) for word in words), default=1)
        natural.append(max(longest, *map(len, cells), _two_lines(column.head), 1))
        needed.append(min(natural[-1], max(longest, READABLE)))
        amount.append(sum(map(len, cells)))
    parts = [[0]]
    for place in range(1, len(table.columns)):
        if len(parts[-1]) > 1 and sum(needed[i] + GAP for i in parts[-1]) + needed[place] > width:
            parts.append([0])
        parts[-1].append(place)
    fits = []
    for part in parts:
        whole, least, text = ([of[place] for place in part] for of in (natural, needed, amount))
        fits.append(Fit(part, _share(whole, least, text, width)))
    return fits


def _two_lines(head: str) -> int:
    """The least width at which a head folds into two lines at most."""
    return next((width for width in range(1, len(head)) if len(fold(head, width)) <= 2), len(head))


def _share(natural: list[int], needed: list[int], amount: list[int], width: int) -> list[int]:
    """Widths that fill `width`: what a column needs, if that is possible, and more where there is more text to fold.

    Args:
        natural: what each column takes when nothing is folded.
        needed: what its longest word takes.
        amount: characters in all of its cells.
        width: of them together, with the gaps.
    """
    free = width - GAP * (len(natural) - 1)
    if sum(needed) > free:  # one column beside the first
        first = max(1, min(needed[0], max(free // 2, free - needed[-1])))
        return [first, *(max(free - first, 1) for _ in natural[1:])]
    widths = list(needed)
    while sum(widths) < free and widths != natural:
        folded = [place for place, most in enumerate(natural) if widths[place] < most]
        widths[max(folded, key=lambda place: amount[place] / widths[place])] += 1
    return widths


def _table(table: Table, columns: list[int], widths: list[int]) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    # a column of the box is one blank wide, the padding is the rest of the gap
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), expand=False)
    for place, width in zip(columns, widths, strict=True):
        column = table.columns[place]
        style = "cyan" if column.code else ""
        head = Text("\n".join(fold(column.head, width)), "bold")
        made.add_column(head, width=width, justify="right" if column.number else "left", style=style, vertical="top")
    rows = [[fold(plain(row[i].text), w) for i, w in zip(columns, widths, strict=True)] for row in table.rows]
    tall = any(len(lines) > 1 for row in rows for lines in row)
    for number, row in enumerate(rows):
        if number in table.sections:
            made.add_row()
            made.add_row(Text(table.sections[number], "bold"))
        elif tall and number:
            made.add_row()  # rows of several lines need air between them
        styles = [STYLES[table.rows[number][place].tone] for place in columns]
        base = "italic" if number == table.baseline else ""
        made.add_row(*(Text("\n".join(lines), style) for lines, style in zip(row, styles, strict=True)), style=base)
    return made
