"""The command that shows the map of methods: methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.commands.parsing import plain

if TYPE_CHECKING:
    from twoaxis.show.document import Showable


@plain
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
) -> Showable:
    """Show the map of every method with exact costs for a shape of decoder, or the page of one method.

    Args:
        name: Method whose page is shown. None named is the map.
        blocks: Number of blocks.
        width: Width of the residual stream.
        heads: Attention heads. None is one per 64 channels.
        kv_heads: Key and value heads. None is as many as heads.
        head_width: Width of a head. None is width / heads.
        hidden: Hidden width of the MLP. None is 8/3 of the width.
        columns: Columns of the map, or groups of them: about, read, weights, wiring, cost, or all of these.
    """
    if columns and name is not None:
        raise ValueError(f"--columns belongs to the map; the page of {name} has everything")
    from twoaxis.guide.map import entry, make_shape
    from twoaxis.guide.pages import MethodMap, MethodPage

    shape = make_shape(blocks, width, heads, kv_heads, head_width, hidden)
    return MethodMap(shape, columns) if name is None else MethodPage(entry(name, shape))
