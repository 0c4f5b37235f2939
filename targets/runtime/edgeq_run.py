"""Check, time and run this bundle on this device: python edgeq_run.py info|verify|bench|infer.

In a program: `from edgeq_run import open_bundle; open_bundle().run("cat.jpg")`, with this file's folder on the path.

Needs Python 3.9 or newer, numpy and onnxruntime. The same file is the bundle's `__main__.py`, so that
`python some.edgeq verify` works on the zip as it is.
"""

import sys

# A compiled file next to the sources would be one that the manifest does not know, and the next check would refuse it.
sys.dont_write_bytecode = True
# Python has put the bundle's own folder first: a `json.py` in it would be imported before anything could refuse it.
# Where it runs a script isolated or on a safe path (-I, -P) it has not; a directory or a zip (__spec__) always.
if __name__ == "__main__" and (
    __spec__ is not None or not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
):
    del sys.path[0]

import os  # noqa: E402
from importlib.machinery import SourceFileLoader  # noqa: E402
from importlib.util import spec_from_file_location  # noqa: E402
from pathlib import Path  # noqa: E402
from zipimport import zipimporter  # noqa: E402

# `python BUNDLE/ verify` has compiled this very file (as __main__.py) before it could turn that off.
if __spec__ is not None and __spec__.cached is not None and Path(__spec__.cached).is_file():
    Path(__spec__.cached).unlink()
    if not any(Path(__spec__.cached).parent.iterdir()):
        Path(__spec__.cached).parent.rmdir()

# onnxruntime's wheels report their use to their maker, and leave a file in the temporary folder, unless this is set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Threads of numpy's BLAS look for work for a second before they sleep, and take a core from the model that is timed.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


PACKAGE = "edgeq_device"


class _Source(SourceFileLoader):
    """Takes the source and never a compiled file next to it, which no check has seen yet."""

    archive = None

    def path_stats(self, path):
        """Raise OSError, by which Python's loader takes the source and looks for no compiled file."""
        raise OSError("no compiled file is looked for")

    def get_data(self, path):
        """The bytes of the file at `path`, from the folder or out of the zip; OSError where it is not there."""
        return super().get_data(path) if self.archive is None else self.archive.get_data(path)


class _Finder:
    """Finds edgeq_device and its modules next to this file, as the files of those names that the manifest lists.

    Python's own finders would take an installed package, an extension module, a compiled file or a folder instead.
    """

    def __init__(self, root):
        self._folder = root / PACKAGE
        self._archive = None if root.is_dir() else zipimporter(str(root))

    def find_spec(self, name, path=None, target=None):
        """The import spec of `edgeq_device` or a module of it; None for every other name, which Python finds itself."""
        package, _, module = name.partition(".")
        if package != PACKAGE:
            return None
        file = str(self._folder / f"{module or '__init__'}.py")
        loader = _Source(name, file)
        loader.archive = self._archive
        try:
            loader.get_data(file)
        except OSError:
            return None
        inside = None if module else [str(self._folder)]
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inside)


def open_bundle(path=None, variant=None, threads=0, trust=None):
    """Open the model of the bundle at `path`, by default the one that this file is part of: see `Model`.

    `open_bundle("dist").run("cat.jpg")` returns the outputs by name. The hashes are checked before anything of the
    bundle is used, and its signature where keys are trusted here.
    """
    root = Path(os.path.realpath(__file__)).parent
    if PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder(root))
    from edgeq_device.program import open_model

    return open_model(root if path is None else path, variant, threads, trust)


if __name__ == "__main__":
    root = Path(os.path.realpath(__file__)).parent
    finder = _Finder(root)
    if finder.find_spec(PACKAGE) is None:
        print(f"edgeq_run: {root} is not whole: {PACKAGE} is missing. Get the bundle again", file=sys.stderr)
        sys.exit(7)
    sys.meta_path.insert(0, finder)
    try:
        from edgeq_device.cli import program
    except Exception as error:  # whatever the sources of a damaged bundle raise; its hashes are not checked yet
        what = ascii(f"{type(error).__name__}: {' '.join(str(error).split())}")[1:-1]
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "numpy":
            print(f"edgeq_run: numpy cannot be imported ({what}). Install it again", file=sys.stderr)
            sys.exit(8)
        print(
            f"edgeq_run: {root} is not whole: its runner cannot be read ({what}). Get the bundle again", file=sys.stderr
        )
        sys.exit(7)

    # The bundle keeps the name by which it was called, but where this file alone is a link from somewhere else.
    sys.exit(program(root if Path(__file__).is_symlink() else Path(__file__).parent))
