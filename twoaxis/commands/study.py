"""Commands about the methods themselves: verify, methods, check."""

from __future__ import annotations

from typing import Annotated

import tyro

from twoaxis.commands.app import app
from twoaxis.commands.emit import emit


@app.command
def verify(
    *,
    seed: int = 0,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAMILY")] = (),
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Measure the certificates on random instances; exit with 1 if one does not hold.

    Args:
        seed: Seed of the random instances.
        only: Families to measure: duality, neutral, blend, algebra, reduction, sequence, orders. None named is all.
        json_output: Print one JSON document instead of lines.
    """
    import torch

    from twoaxis.verify.run import Certificates, certificates

    torch.set_num_threads(1)  # the instances are small
    results = []
    for certificate in certificates(seed, only):
        results.append(certificate)
        if not json_output:
            print(certificate.line(), flush=True)  # as it is measured: all of them take a while
    result = Certificates(seed, tuple(results))
    if json_output:
        return emit(result, "json")
    print(result.closing())
    return result.exit_code


@app.command
def methods(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    *,
    blocks: int = 12,
    width: int = 768,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_width: int | None = None,
    hidden: int | None = None,
    columns: Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN")] = (),
    markdown: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Print the map of every method with exact costs for a shape of decoder, or the page of one method.

    Args:
        name: Method whose page is printed. None named is the map.
        blocks: Number of blocks.
        width: Width of the residual stream.
        heads: Attention heads. None is one per 64 channels.
        kv_heads: Key and value heads. None is as many as heads.
        head_width: Width of a head. None is width / heads.
        hidden: Hidden width of the MLP. None is 8/3 of the width.
        columns: Columns of the map, or groups of them: read, weights, wiring, cost, origin, or all of these.
        markdown: Print Markdown, by default with all columns.
        json_output: Print one JSON document with everything.
    """
    if markdown and json_output:
        raise ValueError("--markdown and --json are two forms of one document; give one of them")
    if columns and (json_output or name is not None):
        raise ValueError("--columns belongs to the map; a page and --json always have everything")
    from twoaxis.guide import entries, pages

    shape = entries.make_shape(blocks, width, heads, kv_heads, head_width, hidden)
    form = "json" if json_output else "markdown" if markdown else "text"
    if name is not None:
        return emit(pages.MethodPage(entries.entry(name, shape)), form)
    return emit(pages.MethodMap(shape, columns or (("all",) if markdown else ())), form)


@app.command
def check(
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    *,
    compiled: Annotated[bool, tyro.conf.arg(name="compile")] = True,
    seed: int = 0,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Run the conformance kit on every stream and mixer that a Python file defines; exit with 1 if a check fails.

    Args:
        path: The file. It is imported: check your own files only.
        compiled: Also compile with fullgraph=True and compare; --no-compile leaves it out and is much quicker.
        seed: Seed of the random instances.
        json_output: Print one JSON document instead of text.
    """
    import torch

    from twoaxis.verify.load import check_file
    from twoaxis.verify.report import Checked

    torch.set_num_threads(1)  # the instances are small
    return emit(Checked(seed, tuple(check_file(path, compile=compiled, seed=seed))), "json" if json_output else "text")
