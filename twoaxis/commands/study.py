"""Commands about the methods themselves: verify, methods, check."""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated, Any

import tyro


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

    from twoaxis.verify.run import certificates

    torch.set_num_threads(1)  # the instances are small
    results = []
    for certificate in certificates(seed, only):
        results.append(certificate)
        if not json_output:
            mark = "holds" if certificate.holds else "FAILS"
            numbers = f"{certificate.error:8.1e} <= {certificate.bound:<7.0e} {certificate.instances:4d}x"
            print(f"{mark}  {numbers}  {certificate.family:9s} {certificate.statement}", flush=True)
    failed = [c for c in results if not c.holds]
    if json_output:
        print(json.dumps(_certificates_document(seed, results), indent=1))
    else:
        held = f"{len(results) - len(failed)} of {len(results)} certificates hold"
        print(f"{held} (seed {seed}, float64, torch {torch.__version__})")
    return 1 if failed else 0


def _certificates_document(seed: int, results: list[Any]) -> dict[str, Any]:
    import torch

    import twoaxis

    return {
        "twoaxis": twoaxis.__version__,
        "torch": torch.__version__,
        "seed": seed,
        "holds": all(c.holds for c in results),
        "certificates": [{**c._asdict(), "holds": c.holds} for c in results],
    }


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
    from twoaxis.guide import document, entries, pages

    shape = entries.make_shape(blocks, width, heads, kv_heads, head_width, hidden)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # drawings must not fail where the encoding is narrow
    if json_output:
        rows = entries.entries(shape) if name is None else (entries.entry(name, shape),)
        print(json.dumps(pages.document(shape, rows), indent=1, ensure_ascii=False))
        return 0
    asked = columns or (("all",) if markdown else ())
    blocks_of_page = pages.the_map(shape, asked) if name is None else pages.page(entries.entry(name, shape))
    if markdown:
        print(document.markdown(blocks_of_page), end="")
    else:
        document.show([*blocks_of_page, pages.more()] if name is None and not columns else blocks_of_page)
    return 0


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

    import twoaxis
    from twoaxis.verify.load import check_file

    torch.set_num_threads(1)  # the instances are small
    reports = check_file(path, compile=compiled, seed=seed)
    ok = all(report.ok for report in reports)
    if json_output:
        found = {"twoaxis": twoaxis.__version__, "torch": torch.__version__, "seed": seed, "ok": ok}
        print(json.dumps({**found, "reports": [report.to_dict() for report in reports]}, indent=1))
    else:
        print("\n\n".join(report.text() for report in reports))
    return 0 if ok else 1
