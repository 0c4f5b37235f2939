"""Outputs that appear whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeq.errors import OutputError


def check_free(path: Path, *, force: bool) -> None:
    """Refuse `path` early (before hours of work) if it exists without `force`, or cannot be written."""
    if path.exists() and not force:
        raise OutputError(f"{path} exists already", "Pass --force to replace it, or choose another output")
    parent = nearest_parent(path)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a directory", "Choose another output")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable", "Choose another output, or change its permissions")


def nearest_parent(path: Path) -> Path:
    """The closest ancestor of `path` that exists."""
    return next(p for p in path.absolute().parents if p.exists() or p.is_symlink())


@contextmanager
def output_file(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a temporary path in a private folder beside `path`; move what is written there to `path` on success.

    Every sibling that the writer leaves in that folder (external data) moves along, before the file itself.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a directory", "Name a file in it")
    with _staging(path, force=force) as stage:
        draft = stage / path.name
        yield draft
        siblings = sorted(p for p in stage.iterdir() if p != draft)
        for sibling in siblings:
            check_free(path.parent / sibling.name, force=force)
        for sibling in siblings:
            os.replace(sibling, path.parent / sibling.name)
        os.replace(draft, path)


@contextmanager
def output_directory(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a temporary directory beside `path`, renamed to `path` on success. An old one is removed only then."""
    with _staging(path, force=force) as stage:
        draft = stage / "new"
        draft.mkdir()
        yield draft
        if path.exists():
            old = stage / "old"
            os.replace(path, old)
            try:
                os.replace(draft, path)
            except OSError:
                os.replace(old, path)
                raise
        else:
            os.replace(draft, path)


@contextmanager
def _staging(path: Path, *, force: bool) -> Iterator[Path]:
    check_free(path, force=force)
    stage: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        yield stage
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"no space left while writing {path}", "Free some space and run again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(f"{path} cannot be written: {error.strerror}", "Choose another output") from error
        raise
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
