"""`edgeq preprocess`."""

from __future__ import annotations

import json

from click.testing import CliRunner

from edgeq.cli import group


def test_list_as_json_and_for_people() -> None:
    plain = json.loads(CliRunner().invoke(group, ["preprocess", "list", "--json"]).stdout)
    assert {"caffe", "imagenet", "tf"} <= {entry["name"] for entry in plain["preprocessings"]}
    text = CliRunner().invoke(group, ["preprocess", "list"]).stdout
    assert "preprocess_method1" in text
    assert "[source]" in text


def test_show_prints_the_constants() -> None:
    result = CliRunner().invoke(group, ["preprocess", "show", "caffe"])
    assert result.exit_code == 0
    assert "x - [103.94, 116.78, 123.68]" in result.stdout
    assert "x * 0.017" in result.stdout


def test_show_takes_steps() -> None:
    result = CliRunner().invoke(group, ["preprocess", "show", "divide=255,layout=NCHW", "--json"])
    assert json.loads(result.stdout)["spec"]["steps"][0] == {"op": "divide", "value": 255.0}


def test_an_unknown_name_lists_the_names() -> None:
    result = CliRunner().invoke(group, ["preprocess", "show", "imagnet"])
    assert result.exit_code == 4
    assert result.stderr.startswith("edgeq: no preprocessing is called 'imagnet'. Pass --preprocess with one of tf,")
    assert result.stderr.count("\n") == 1
