"""What `edgeq preprocess` says is complete."""

from __future__ import annotations

import json

from edgeq.data.describe import SOURCE, STEPS, list_preprocessings, show_preprocessing
from edgeq.data.source_options import SourceOptions
from edgeq.data.steps import OPERATIONS


def test_every_step_and_source_option_is_described() -> None:
    steps = {name.strip() for names in STEPS for name in names.split(",")}
    assert steps == set(OPERATIONS)
    source = {name.strip().removeprefix("source.") for names in SOURCE for name in names.split(",")}
    assert source == set(SourceOptions.__dataclass_fields__)


def test_every_listed_name_can_be_shown() -> None:
    for entry in list_preprocessings()["preprocessings"]:
        shown = show_preprocessing(entry["name"])
        assert shown["arithmetic"]
        assert json.loads(json.dumps(shown)) == shown
