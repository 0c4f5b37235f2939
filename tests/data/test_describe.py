"""Test that the descriptions of `edgeq preprocess` are complete."""

from __future__ import annotations

import json
from pathlib import Path

from edgeq.data.preprocess import SOURCE, list_preprocessings, show_preprocessing, steps
from edgeq.data.source_options import SourceOptions
from edgeq.data.steps import is_step


def test_every_step_and_source_option_is_described() -> None:
    assert all(is_step(name) for names in list_preprocessings()["steps"] for name in names.split(", "))
    source = {name.strip().removeprefix("source.") for names in SOURCE for name in names.split(",")}
    assert source == set(SourceOptions.__dataclass_fields__)


def test_every_listed_name_can_be_shown() -> None:
    for entry in list_preprocessings()["preprocessings"]:
        shown = show_preprocessing(entry["name"])
        assert shown["arithmetic"]
        assert json.loads(json.dumps(shown)) == shown


def test_the_documented_table_of_steps_is_the_registry() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "data.md").read_text("utf-8")
    rows = "\n".join(f"| `{names}` | {text.replace('|', chr(92) + '|')} |" for names, text in steps().items())
    assert f"| step | what is written after its `=` |\n|---|---|\n{rows}\n" in page
