"""Files that workers need: named where workers see them, sent along where they do not."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from edgeq.distributed.workers import Workers


@dataclass(frozen=True)
class Files:
    """A file or folder with what belongs to it.

    Attributes:
        path: absolute.
        names: of all its files, relative to the folder that holds `path`.
        sha256: of their names and contents.
        contents: by name, where workers do not see them.
    """

    path: Path
    names: tuple[str, ...]
    sha256: str
    contents: Mapping[str, bytes] | None = None

    def here(self) -> bool:
        """Whether this process sees the same files at the same place."""
        try:
            return _digest(self.path.parent, self.names) == self.sha256
        except OSError:
            return False

    def place(self, stack: ExitStack) -> Path:
        """Where they lie in a worker: at their own place, or in a temporary folder that `stack` removes."""
        if self.contents is None:
            return self.path
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeq-worker-")))
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder / self.path.name


def files_for(workers: Workers, path: Path, beside: Iterable[Path] = ()) -> Files:
    """The file or folder `path`, and the files `beside` it that it needs, as all `workers` can have them."""
    path = path.absolute()
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path, *map(Path.absolute, beside)]
    names = tuple(dict.fromkeys(file.relative_to(path.parent).as_posix() for file in found))
    files = Files(path, names, _digest(path.parent, names))
    if workers.everywhere(Files.here, files):
        return files
    return replace(files, contents={name: (path.parent / name).read_bytes() for name in names})


def _digest(folder: Path, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        with (folder / name).open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
            # Names that are not UTF-8 hold lone surrogates.
            digest.update(f"{name}\0{content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
