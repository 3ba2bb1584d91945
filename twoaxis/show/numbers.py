"""Numbers as people read them: the only place that turns a number into text.

Every function writes a missing number (None) as a dash.
"""

from __future__ import annotations

from collections.abc import Callable

NOTHING = "-"
"""What stands where there is no number."""


def whole(value: float | None) -> str:
    """A count with thousands set apart: 1,234,567."""
    return NOTHING if value is None else f"{value:,.0f}"


def digits(value: float | None, most: int = 4) -> str:
    """A number of any size with so many significant digits."""
    return NOTHING if value is None else f"{value:.{most}g}"


def loss(value: float | None) -> str:
    """A loss in nats: 2.3061."""
    return NOTHING if value is None else f"{value:.4f}"


def difference(value: float | None) -> str:
    """A difference of losses with its sign; small ones keep their leading digit: -0.0213, +0.0007, +3.1e-05."""
    if value is None:
        return NOTHING
    return f"{value:+.4f}" if abs(value) >= 0.00005 or value == 0 else f"{value:+.1e}"


def percent(value: float | None, places: int = 1) -> str:
    """A fraction in percent: 12.5%."""
    return NOTHING if value is None else f"{100 * value:.{places}f}%"


def share(value: float | None) -> str:
    """A part of a model in percent, where small is not nothing: 0%, <0.01%, 0.23%."""
    if value is None:
        return NOTHING
    return "0%" if value == 0 else "<0.01%" if value < 1e-4 else percent(value, 2)


def increase(part: float | None) -> str:
    """What is added, in percent of what was there: +0.21%."""
    if part is None:
        return NOTHING
    return "0" if not part else f"{100 * part:+.2g}%"


def times(value: float | None) -> str:
    """A ratio: 1.07x."""
    return NOTHING if value is None else f"{value:.3g}x"


def si(value: float | None, unit: str = "B") -> str:
    """An amount in powers of a thousand: 3.1 MB, 19.3 GFLOP, 512 B."""
    if value is None:
        return NOTHING
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while abs(value) >= 999.5 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.3g} {prefixes[0]}{unit}".rstrip()


def count(value: float | None) -> str:
    """A rounded count in as few characters as possible: 1.1M."""
    return si(value, "").replace(" ", "")


def seconds(value: float | None) -> str:
    """A duration: 31 us, 46.1 ms, 52.2 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    if value is None:
        return NOTHING
    if value < 119.5:
        unit, size = ("s", 1.0) if value >= 1 or value <= 0 else ("ms", 1e-3) if value >= 1e-3 else ("us", 1e-6)
        return f"{value / size:.3g} {unit}"
    large, small, size = ("min", "s", 1) if value < 3600 else ("h", "min", 60) if value < 86_400 else ("d", "h", 3600)
    most, rest = divmod(round(value / size), 24 if large == "d" else 60)
    return f"{most:,} {large} {rest} {small}" if rest else f"{most:,} {large}"


def error(value: float | None) -> str:
    """A deviation, of which the power matters: 3.1e-12; equality to the last bit is 0."""
    return NOTHING if value is None else "0" if value == 0 else f"{value:.1e}"


UNITS: dict[str, Callable[[float | None], str]] = {
    "": digits,
    "count": count,
    "whole": whole,
    "bytes": lambda value: si(value, "B"),
    "flops": lambda value: si(value, "FLOP"),
    "seconds": seconds,
    "percent": lambda value: NOTHING if value is None else f"{100 * value:.3g}%",
    "difference": lambda value: NOTHING if value is None else f"{value:+.3g}" if value else "0",
    "times": times,
}
"""How the numbers of an axis are written, by the name of their unit."""
