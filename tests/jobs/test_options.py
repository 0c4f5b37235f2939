from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from edgeq import demo
from edgeq.cli._arguments import build_arguments
from edgeq.cli._options import build_options
from edgeq.errors import UsageError
from edgeq.prove.request import Request


def options(*arguments: str) -> dict[str, Any]:
    """Return the values that click parses from the options that `quantize` and `package` share."""
    found: dict[str, Any] = {}

    @click.command()
    @build_options
    def command(**parsed: Any) -> None:
        found.update(parsed)

    command.main(list(arguments), standalone_mode=False)
    return found


def arguments(*line: str) -> dict[str, Any]:
    return build_arguments(options(*line))


def test_nothing_given_is_nothing_set() -> None:
    assert arguments() == {
        "data": None,
        "val": None,
        "head": None,
        "threshold": None,
        "cut_head": False,
        "statistics": None,
        "task": None,
        "fix": {},
        "workers": None,
        "overrides": {},
        "max_drop": None,
        "effort": "default",
        "require_coverage": None,
        "emulate": True,
        "timed": True,
        "force": False,
    }


def test_data() -> None:
    line = ("--data", "calib", "--val", "val", "--preprocess", "imagenet", "--count", "9", "--labels", "l.csv")
    found = arguments(*line, "--calibration", "stats", "--no-timing", "--force")
    assert vars(found["data"]) == {
        "source": "calib",
        "preprocess": "imagenet",
        "labels": None,
        "count": 9,
        "role": None,
    }
    expected = {"source": "val", "preprocess": "imagenet", "labels": "l.csv", "count": None, "role": None}
    assert vars(found["val"]) == expected
    assert (found["statistics"], found["timed"], found["force"]) == (Path("stats"), False, True)


def test_a_task_comes_with_its_options() -> None:
    task = arguments("--val", "val", "--task", "classification", "--class-offset", "1")["task"]
    assert (task.name, task.primary) == ("classification", "top1")


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        (("--method", "mse"), {"method": "mse"}),
        (
            ("--method", "percentile", "--percentile", "99.9"),
            {"method": "percentile", "method_options": {"percentile": 99.9}},
        ),
        (("--no-per-channel", "--reduce-range"), {"per_channel": False, "reduce_range": True}),
        (("--format", "QOperator", "--activation-type", "int8"), {"format": "QOperator", "activation_type": "int8"}),
        (("--activation-symmetric",), {"activation_symmetric": True}),
        (("--op-type", "Conv", "--op-type", "Gemm"), {"op_types": ("Conv", "Gemm")}),
        (("--exclude", "a", "--exclude", "b"), {"exclude": ("a", "b")}),
        (("--dynamic",), {"mode": "dynamic"}),
        (
            ("--weight-only", "8", "--block-compute", "int8"),
            {"mode": "weight-only", "weight_bits": 8, "weight_symmetric": True, "float_compute": ()},
        ),
        (
            ("--weight-only", "4", "--block-compute", "float32"),
            {"mode": "weight-only", "weight_bits": 4, "weight_symmetric": False, "float_compute": ("*",)},
        ),
        (
            ("--dynamic", "--op-type", "Conv", "--weight-type", "uint8"),
            {
                "mode": "dynamic",
                "op_types": ("Conv",),
                "weight_type": "uint8",
                "dynamic_weight_types": {"Conv": "uint8"},
            },
        ),
    ],
)
def test_options_override_the_profile(line: tuple[str, ...], overrides: dict[str, Any]) -> None:
    assert arguments(*line)["overrides"] == overrides


@pytest.mark.parametrize(
    ("text", "share"),
    [("0.01", 0.01), ("1%", 0.01), ("1pt", 0.01), (" 2.5 % ", 0.025), ("0", 0.0), ("100%", 1.0)],
)
def test_shares(text: str, share: float) -> None:
    request = Request.of(demo.MODEL, **arguments("--max-drop", text, "--require-coverage", text))
    assert request.max_drop == pytest.approx(share)
    assert request.require_coverage == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "x", "-1%", "1.01", "101%", "nan", "inf", "1%%", "1 percent"])
def test_refuses_malformed_shares(text: str) -> None:
    with pytest.raises(UsageError, match="`max_drop`"):
        Request.of(demo.MODEL, **arguments("--max-drop", text))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (("--task", "classification"), "--task needs labelled samples"),
        (("--block-compute", "int8"), "--block-compute needs --weight-only"),
        (("--weight-only", "8", "--block-compute", "float32"), "--block-compute float32 needs 4 bits"),
        (("--percentile", "99"), "--percentile needs --method percentile"),
        (("--dynamic", "--method", "mse"), "--method and --dynamic exclude each other"),
        (("--dynamic", "--activation-asymmetric"), "--activation-symmetric and --dynamic exclude each other"),
        (("--dynamic", "--weight-type", "int8"), "by operator type"),
    ],
)
def test_options_that_contradict_each_other(line: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        arguments(*line)
