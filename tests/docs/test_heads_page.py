"""Compare the page of heads with the families that devices have."""

from __future__ import annotations

from pathlib import Path

from edgeq_device.answers.family import all_families

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "heads.md"


def test_the_page_lists_each_head_with_its_outputs() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    listed = {row for row in rows if row.count("|") == 3}
    for family in all_families():
        assert f"| `{family.name}` | {family.title} |" in listed
