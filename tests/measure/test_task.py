from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import UsageError
from edgeq.measure.task import TaskOptions, make_task
from edgeq.measure.tasks.classification import Classification
from edgeq.util.registry import TASKS


def test_shipped_tasks_are_made_by_name() -> None:
    assert {"anomaly", "classification", "detection", "similarity", "text-recognition"} <= set(TASKS.names())
    assert make_task("anomaly").primary == "auc"
    assert make_task("classification", TaskOptions(class_offset=1)) == Classification(class_offset=1)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UsageError, match=r"anomaly, classification, depth, detection, .*, or path\.py:factory"):
        make_task("songs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_offset": "1"}, "class_offset is '1'. Give a whole number"),
        ({"confidence": "0.5"}, "confidence is '0.5'. Give a number from 0 to 1"),
        ({"annotations": 3}, "annotations is 3. Give a path"),
        ({"decoder": ["yolox"]}, r"decoder is \['yolox'\]. Give a name"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TaskOptions(**options)


def test_options_of_another_task_are_refused() -> None:
    with pytest.raises(UsageError, match="`class_offset` has no meaning for detection"):
        make_task("detection", TaskOptions(class_offset=0))
    with pytest.raises(UsageError, match="`decoder` has no meaning"):
        make_task("classification", TaskOptions(decoder="yolox"))


PLUGIN = """
class Mine:
    name, primary, higher_is_better = "mine", "error", False
    def __init__(self, options): self.offset = options.class_offset
    def start(self): return self
def factory(options): return Mine(options)
def half(options): return object()
broken = 3
"""


def test_a_users_own_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    task = make_task(f"{path}:factory", TaskOptions(class_offset=7))
    assert task.name == "mine"
    assert task.offset == 7
    with pytest.raises(UsageError, match="has no 'name'"):
        make_task(f"{path}:half")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "factory", "does not exist"),
        ("x = (", "factory", "SyntaxError"),
        ("raise OSError('no camera')", "factory", "OSError: no camera"),
        (PLUGIN, "missing", "no function 'missing'"),
        (PLUGIN, "broken", "no function 'broken'"),
    ],
)
def test_plugins_that_cannot_be_loaded(tmp_path: Path, text: str | None, name: str, message: str) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        make_task(f"{path}:{name}")
