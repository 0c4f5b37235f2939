"""Check, time and run this bundle on this device: python edgeq_run.py info|verify|bench|infer.

In a program: `sys.path.append(FOLDER); from edgeq_run import open_bundle; open_bundle().run("cat.jpg")`, where FOLDER
contains this file. Do not put FOLDER first: a file of the bundle could then hide a module of Python.

It needs Python 3.9 or newer, numpy and onnxruntime. Its code is in edgeq_device.zip next to this file. This file reads
that zip once, compares its hash with SHA256, and imports the code from memory, so no code of a changed zip runs. The
bundle's `__main__.py` is a copy of this file, so `python some.edgeq verify` works without unpacking the zip.
"""

import _signal  # the module `signal` without its imports, which take some milliseconds
import sys

# Ctrl-C ends the program at once and without a traceback while modules load.
if __name__ == "__main__" and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
# A compiled file next to the sources would not be in the manifest, so the next check would refuse the bundle.
sys.dont_write_bytecode = True
# Remove the bundle's own folder from the path: a `json.py` in it would be imported before anything could refuse it.
# Python puts this folder first whenever it runs a directory or a zip (__spec__). For a script it does so unless it runs
# isolated or with a safe path (-I, -P).
if __name__ == "__main__" and (
    __spec__ is not None or not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
):
    del sys.path[0]

import os  # noqa: E402  # Python has already loaded it

# Remove folders below the working directory, to which empty and relative entries of PYTHONPATH lead ("/opt/lib:").
if __name__ == "__main__" and os.environ.get("PYTHONPATH") and not sys.flags.ignore_environment:
    entries = [e for e in os.environ["PYTHONPATH"].split(os.pathsep) if not os.path.isabs(e)]  # noqa: PTH117
    sys.path[:] = [e for e in sys.path if e not in [os.path.abspath(entry) for entry in entries]]  # noqa: PTH100

import hashlib  # noqa: E402
import io  # noqa: E402
import stat  # noqa: E402
import zipfile  # noqa: E402
from importlib.machinery import SourceFileLoader  # noqa: E402
from importlib.util import spec_from_file_location  # noqa: E402
from pathlib import Path  # noqa: E402

# Remove the compiled file. `python BUNDLE/ verify` compiles this file (as __main__.py) before this file can prevent
# that.
if __spec__ is not None and __spec__.cached is not None and Path(__spec__.cached).is_file():
    Path(__spec__.cached).unlink()
    if not any(Path(__spec__.cached).parent.iterdir()):
        Path(__spec__.cached).parent.rmdir()

# Without this, onnxruntime's wheels report their use to Microsoft, and leave a file in the temporary folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Threads of numpy's BLAS spin for a second before they sleep, and would take a core from the model that is timed.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


PACKAGE = "edgeq_device"
ARCHIVE = f"{PACKAGE}.zip"
SHA256 = ""
"""SHA-256 hash of edgeq_device.zip. edgeq writes the hash here when it makes a bundle."""
_MOST = 1 << 24


class _Source(SourceFileLoader):
    """Load modules and tables from a zip in memory. Compiled files are never loaded.

    Attributes:
        content: bytes of the zip, for processes that this one starts.
    """

    def __init__(self, name, path, content, archive):
        super().__init__(name, path)
        self.content, self._archive = content, archive

    def path_stats(self, path):
        """Raise OSError, so that Python's loader uses the source and does not look for a compiled file."""
        raise OSError("no compiled file is looked for")

    def get_data(self, path):
        """Return the bytes of the zip's file at `path`. Raise OSError if there is no such file."""
        try:
            parts = Path(path).parts
            # The last folder of this name contains the package: a folder above the bundle may have the same name.
            start = len(parts) - 1 - parts[::-1].index(PACKAGE)
            return self._archive.read("/".join(parts[start:]))
        except (KeyError, ValueError) as error:
            raise FileNotFoundError(path) from error


class _Finder:
    """Find edgeq_device and its modules in the zip next to this file, if the zip's hash is the one in this file.

    Python's own finders would use an installed package or a folder of that name instead.
    """

    def __init__(self, root):
        try:
            content = _content(root)
        except (KeyError, FileNotFoundError) as error:
            raise ImportError(f"{ARCHIVE} is missing") from error
        except Exception as error:  # OSError, or an error that a damaged zip raises
            raise ImportError(f"{ARCHIVE} cannot be read ({_text(error)})") from error
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise ImportError(f"{ARCHIVE} was changed: it has another sha256 than edgeq_run.py states")
        self._folder, self._content = root / ARCHIVE / PACKAGE, content
        self._archive = zipfile.ZipFile(io.BytesIO(content))
        self._names = frozenset(self._archive.namelist())

    def find_spec(self, name, path=None, target=None):
        """Return the import spec of `edgeq_device` or one of its modules, or None for every other name."""
        package, *modules = name.split(".")
        if package != PACKAGE:
            return None
        inner = "/".join(modules)
        is_room = f"{PACKAGE}/{inner}/__init__.py".replace("//", "/") in self._names
        file = f"{inner}/__init__.py".lstrip("/") if is_room else f"{inner}.py"
        if f"{PACKAGE}/{file}" not in self._names:
            return None
        place = str(self._folder / file)
        loader = _Source(name, place, self._content, self._archive)
        folder = [str(self._folder / inner)] if is_room else None
        return spec_from_file_location(name, place, loader=loader, submodule_search_locations=folder)


def _content(root):
    """Return the bytes of the zip in a bundle. The bundle is a folder or itself a zip."""
    if root.is_dir():
        if not stat.S_ISREG((root / ARCHIVE).stat().st_mode):
            raise OSError("it is a pipe, a socket or a device")
        with (root / ARCHIVE).open("rb") as file:
            return file.read(_MOST)
    with zipfile.ZipFile(root) as bundle, bundle.open(ARCHIVE) as file:
        return file.read(_MOST)


def _text(error):
    return ascii(f"{type(error).__name__}: {' '.join(str(error).split())}")[1:-1]


def open_bundle(path=None, variant=None, threads=0, trust=None):
    """Open the model of the bundle at `path`, by default the bundle that contains this file: see `Model`.

    `open_bundle("dist").run("cat.jpg")` returns the outputs by name. Before anything in the bundle is used, its hashes
    are checked. Its signature is checked too, if keys are trusted here.
    """
    root = Path(os.path.realpath(__file__)).parent
    if PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder(root))
    from edgeq_device.program import open_model

    return open_model(root if path is None else path, variant, threads, trust)


def __getattr__(name):
    """Import `Answer`, which `Model.answer` returns, when a program asks for it."""
    if name != "Answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder(Path(os.path.realpath(__file__)).parent))
    from edgeq_device.answers.answer import Answer

    return Answer


if __name__ == "__main__":
    root = Path(os.path.realpath(__file__)).parent
    try:
        sys.meta_path.insert(0, _Finder(root))
    except ImportError as error:
        print(f"edgeq_run: {root} is incomplete: {error}. Get the bundle again", file=sys.stderr)
        sys.exit(7)
    try:
        from edgeq_device.cli import run_program

        # Use the bundle's path as the user wrote it, unless this file is itself a link into the bundle.
        sys.exit(run_program(root if Path(__file__).is_symlink() else Path(__file__).parent))
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "numpy":
            raise
        print(f"edgeq_run: numpy cannot be imported ({_text(error)}). Install it again", file=sys.stderr)
        sys.exit(8)
