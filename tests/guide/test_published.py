"""Published figures: the counts that must agree, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from twoaxis.guide.cost_page import part, parts, write_page
from twoaxis.guide.published import SAME, Figure, _attention_residuals, compared

PAGE = Path(__file__).parent.parent.parent / "docs" / "cost.md"


@pytest.mark.slow
def test_attention_residuals_by_hand() -> None:
    rows = {row.what: row for row in _attention_residuals()}
    plain = next(row for what, row in rows.items() if "plain residual" in what)
    assert (plain.published, plain.ours) == ("3", "3")
    block = next(row for what, row in rows.items() if "8 blocks, two-phase" in what)
    assert float(block.ours) == pytest.approx(5.5, rel=0.15)
    assert rows["parameters"].ours == rows["parameters"].published == "2,680,832"


def bounds(ours: str) -> tuple[float, float]:
    low, _, high = ours.partition(" to ")
    return float(low), float(high)


@pytest.mark.slow
def test_figures_agree_or_say_why() -> None:
    rows = compared()
    for row in rows:
        assert row.why, row
        if row.why == SAME:
            assert row.ours == row.published, row
    speeds = [row for row in rows if " to 0." in row.ours or " to 1." in row.ours]
    assert len(speeds) >= 5
    for row in speeds:  # a published speed is between as written and fused, give or take a tenth of it
        low, high = bounds(row.ours)
        assert 0.9 * low <= float(row.published) <= 1.1 * high, row


@pytest.mark.slow
@pytest.mark.parametrize("name", list(parts(PAGE.read_text())))
def test_the_page_says_what_the_tool_prints(name: str) -> None:
    assert parts(PAGE.read_text())[name] == part(name), "run python -m twoaxis.guide.cost_page docs/cost.md"


def test_the_page_answers_by_commands_and_has_the_table() -> None:
    found = parts(PAGE.read_text())
    assert "published" in found
    assert sum(name.startswith("twoaxis cost ") for name in found) == 3
    assert f"| {' | '.join(('source', 'what', 'published', 'ours', 'why they differ'))} |" in found["published"]


def test_pages_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Nothing\n")
    with pytest.raises(ValueError, match="has no parts"):
        write_page(tmp_path / "page.md")
    with pytest.raises(ValueError, match="or what a twoaxis cost command prints, got 'rm -r x'"):
        part("rm -r x")
    assert Figure._fields == ("source", "what", "published", "ours", "why")
