"""Test the extension of the site that writes a page for each command."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from edgeq.cli import COMMANDS, group
from tests.docs.blocks import REPOSITORY


def test_each_command_has_a_page_with_all_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="the package sphinx is not installed")
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "_ext"))
    import commands

    (tmp_path / "reference").mkdir()
    commands.write(SimpleNamespace(srcdir=tmp_path))
    texts = {page.stem: page.read_text("utf-8") for page in (tmp_path / commands.FOLDER).iterdir()}
    assert texts.keys() == COMMANDS.keys()
    context = click.Context(group)
    for name, text in texts.items():
        command = group.get_command(context, name)
        assert command is not None
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        assert [p.opts[0] for p in options if p.opts[0] not in text] == []
    assert "## Quantization\n" in texts["quantize"]
    sys.modules.pop("commands")
