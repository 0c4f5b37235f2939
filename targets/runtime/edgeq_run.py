"""Check, time and run this bundle on this device: python edgeq_run.py info|verify|bench|infer.

Needs Python 3.9 or newer, numpy and onnxruntime. The same file is the bundle's `__main__.py`, so that
`python some.edgeq verify` works on the zip as it is.
"""

import sys

# A compiled file beside the sources would be one that the manifest does not know, and the next check would refuse it.
sys.dont_write_bytecode = True
# Python has put the bundle's own folder first: a `json.py` in it would be imported before anything could refuse it.
# Where it runs a script isolated or on a safe path (-I, -P) it has not; a directory or a zip (__spec__) always.
if __name__ == "__main__" and (
    __spec__ is not None or not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
):
    del sys.path[0]

import os  # noqa: E402
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, PathFinder, SourceFileLoader  # noqa: E402
from importlib.util import module_from_spec  # noqa: E402
from pathlib import Path  # noqa: E402

# `python BUNDLE/ verify` has compiled this very file (as __main__.py) before it could say so.
if __spec__ is not None and __spec__.cached is not None and Path(__spec__.cached).is_file():
    Path(__spec__.cached).unlink()
    if not any(Path(__spec__.cached).parent.iterdir()):
        Path(__spec__.cached).parent.rmdir()

# onnxruntime's wheels report their use to their maker, and leave a file in the temporary folder, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class _Source(SourceFileLoader):
    """Takes the source and never a compiled file beside it, which no check has seen yet."""

    def path_stats(self, path):
        raise OSError("no compiled file is looked for")


def _load_package():
    """Import edgeq_device from beside this file and from nowhere else; an installed one does not take its place."""
    root = Path(os.path.realpath(__file__)).parent
    for folder in (root, root / "edgeq_device"):
        if folder.is_dir():  # not inside a zip
            sys.path_importer_cache[str(folder)] = FileFinder(str(folder), (_Source, SOURCE_SUFFIXES))
    spec = PathFinder.find_spec("edgeq_device", [str(root)])
    if spec is None or spec.loader is None or spec.origin is None:
        sys.exit(f"edgeq_run: {root} is not whole: edgeq_device is missing. Get the bundle again")
    package = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _load_package()
    from edgeq_device.cli import main

    sys.exit(main(root=Path(__file__).parent))
