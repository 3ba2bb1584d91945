"""Numbers as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from twoaxis.show import numbers


@pytest.mark.parametrize(
    ("write", "value", "expected"),
    [
        (numbers.whole, 1234567, "1,234,567"),
        (numbers.digits, 0.000123456, "0.0001235"),
        (numbers.loss, 2.30607, "2.3061"),
        (numbers.difference, -0.0213, "-0.0213"),
        (numbers.difference, 3.14e-5, "+3.1e-05"),
        (numbers.difference, 6.9e-4, "+0.0007"),
        (numbers.difference, 0.0, "+0.0000"),
        (numbers.percent, 0.125, "12.5%"),
        (numbers.share, 0.0, "0%"),
        (numbers.share, 1e-6, "<0.01%"),
        (numbers.share, 1e-4, "0.01%"),
        (numbers.share, 0.3333, "33.33%"),
        (numbers.share, 2.0, "200.00%"),
        (numbers.increase, 0.00213, "+0.21%"),
        (numbers.increase, 0.0, "0"),
        (numbers.times, 1.0666, "1.07x"),
        (numbers.si, 512, "512 B"),
        (numbers.si, 999, "999 B"),
        (numbers.si, 999.7, "1 kB"),
        (numbers.si, 3_141_592, "3.14 MB"),
        (numbers.si, -2.5e9, "-2.5 GB"),
        (numbers.si, 4e21, "4e+03 EB"),
        (numbers.count, 1_100_000, "1.1M"),
        (numbers.count, 12, "12"),
        (numbers.seconds, 0.0, "0 s"),
        (numbers.seconds, 3.1e-5, "31 us"),
        (numbers.seconds, 0.0461, "46.1 ms"),
        (numbers.seconds, 52.2, "52.2 s"),
        (numbers.seconds, 200, "3 min 20 s"),
        (numbers.seconds, 3601, "1 h"),
        (numbers.seconds, 7140, "1 h 59 min"),
        (numbers.seconds, 7200, "2 h"),
        (numbers.seconds, 183_600, "2 d 3 h"),
        (numbers.error, 0.0, "0"),
        (numbers.error, 3.14e-12, "3.1e-12"),
    ],
)
def test_numbers(write: Callable[[float | None], str], value: float, expected: str) -> None:
    assert write(value) == expected
    assert write(None) == numbers.NOTHING


def test_units_write_round_ticks_in_few_signs() -> None:
    ticks = {"": 0.25, "count": 2e6, "bytes": 2e7, "seconds": 0.5, "percent": 0.05, "difference": -0.02, "times": 1.5}
    written = [numbers.UNITS[unit](value) for unit, value in ticks.items()]
    assert written == ["0.25", "2M", "20 MB", "500 ms", "5%", "-0.02", "1.5x"]
    assert numbers.UNITS["difference"](0.0) == "0"
    assert numbers.UNITS["flops"](2e9) == "2 GFLOP"
    assert all(write(None) == numbers.NOTHING for write in numbers.UNITS.values())
