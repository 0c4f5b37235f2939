"""Run edgeq's work on a board over SSH. Store files under their hashes, admit one user at a time, and stop the
processes that this user started.

    edgeq_board.py serve FOLDER WHO           answers requests, one JSON object a line; holds the board's lock
    edgeq_board.py attach FOLDER TOKEN -- ... runs a command until that lock is released

The program writes only inside FOLDER and uses only the standard library. It starts on any Python 3, so that it can
report a version that is too old. Both commands end when the SSH connection ends. `serve` also ends at the end of its
input, or after a minute without a message. `attach` and all processes that it started end within a second after the
lock is released.
"""

import base64
import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

# The workstation sends `alive` while it works, so after this silence it is gone.
SILENCE_S = 60.0
CHUNK = 1 << 20
# The listing of all files of a bundle is one line.
LONGEST_LINE = 1 << 24
# `attach` must end within a second after the lock is released.
_LOOK_S = 1.0
# Files that describe the board and the limits of its processes. edgeq/hardware/detect.py reads their contents.
_GROUP_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.max", "memory.limit_in_bytes")
_FILES = ("proc/meminfo", "proc/self/cgroup")
_TREE_FILES = ("proc/device-tree/model", "proc/device-tree/compatible")
_CACHE_FILES = ("level", "type", "size")


class RefusedError(Exception):
    """Report a request that was refused, with the reason in one line."""


class EndedError(Exception):
    """Report that the input ended, or was silent for too long, in the middle of a file."""


def main(arguments):
    """Run one command and return its exit code."""
    if arguments[0] == "serve":
        return serve(Path(arguments[1]), arguments[2])
    return attach(Path(arguments[1]), arguments[2], arguments[4:])


def serve(folder, who):
    """Answer requests until the input ends or is silent for too long."""
    hello = {"python": "%d.%d.%d" % sys.version_info[:3], "system": os.name, "folder": str(folder)}
    # The workstation explains what is missing, so the answer only says what is there.
    if sys.version_info < (3, 9) or os.name != "posix":
        _send(hello)
        return 0
    lock, holder = _take_lock(folder, who)
    if lock is None:
        _send(dict(hello, busy=holder))
        return 0
    try:
        _clear(folder)
        _send(dict(hello, token=_read_lock(folder)["token"], free=_count_free(folder), **_find_modules(folder)))
        lines = _Lines(0)
        while True:
            line = lines.read_line(SILENCE_S)
            if line is None:
                return 0
            request = json.loads(line.decode())
            if request["do"] == "alive":
                continue
            try:
                _send(_ANSWERS[request["do"]](folder, request, lines))
            except OSError as error:
                _send({"error": error.strerror or str(error), "free": _count_free(folder)})
            except RefusedError as error:
                _send({"error": str(error)})
            except EndedError:
                return 0
            if request["do"] == "clean":
                return 0
    finally:
        if folder.is_dir():
            _clear(folder)
        os.close(lock)


def attach(folder, token, command):
    """Run `command` with this process's input and output. When the lock is released, kill the command and all processes
    that it started.
    """
    environment = dict(os.environ, TMPDIR=str(folder / "tmp"), ORT_DISABLE_TELEMETRY="1")
    parent = os.getppid()
    # A session of its own, so that its whole process group can be killed.
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    waiting = threading.Thread(target=child.wait)
    waiting.start()
    try:
        # The parent is the SSH server; without it, nobody reads the output.
        while waiting.is_alive() and os.getppid() == parent and _has_lock(folder, token):
            waiting.join(_LOOK_S)
    finally:
        try:
            os.killpg(child.pid, 9)
        except ProcessLookupError:
            waiting.join()
    waiting.join()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


class _Lines:
    """Read lines and blocks of bytes from a file descriptor, with a limit on how long it may be silent."""

    def __init__(self, descriptor):
        self._descriptor = descriptor
        self._pending = b""

    def read_line(self, patience_s):
        """Return the next line. Return None if the input ended or was silent for `patience_s` seconds."""
        while b"\n" not in self._pending:
            if len(self._pending) > LONGEST_LINE or not self._receive(patience_s):
                return None
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def read_chunks(self, count):
        """Yield `count` bytes, piece by piece."""
        while count:
            if not self._pending and not self._receive(SILENCE_S):
                raise EndedError
            piece, self._pending = self._pending[:count], self._pending[count:]
            count -= len(piece)
            yield piece

    def _receive(self, patience_s):
        ready, _, _ = select.select([self._descriptor], [], [], patience_s)
        more = os.read(self._descriptor, CHUNK) if ready else b""
        self._pending += more
        return bool(more)


def _send(answer):
    data = json.dumps(answer).encode() + b"\n"
    # A write to a pipe may take only a part.
    while data:
        data = data[os.write(_OUT, data) :]


def _take_lock(folder, who):
    """Take the lock, and return its file descriptor and None. If another session has the lock, return None and a record
    of that session.
    """
    import fcntl

    descriptor = os.open(str(folder / "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    # A session that has just ended may hold the lock for a moment.
    for attempt in range(4):
        try:
            # The kernel releases the lock whenever the process ends, even after a crash, so the lock is never stale.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.3 * (attempt < 3))
            continue
        content = {"token": base64.b16encode(os.urandom(8)).decode(), "who": who, "since": int(time.time())}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        return descriptor, None
    os.close(descriptor)
    return None, _read_lock(folder)


def _read_lock(folder):
    try:
        return json.loads((folder / "lock").read_text())
    except (OSError, ValueError):
        return {"token": "", "who": "", "since": 0}


def _has_lock(folder, token):
    """Return whether the session of `token` still has the lock."""
    import fcntl

    try:
        descriptor = os.open(str(folder / "lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return _read_lock(folder)["token"] == token
    finally:
        os.close(descriptor)


def _clear(folder):
    """Remove the temporary files of the last session, and other versions of this program."""
    shutil.rmtree(str(folder / "tmp"), ignore_errors=True)
    (folder / "tmp").mkdir(exist_ok=True)
    for program in folder.glob("board-*"):
        if program.name != Path(__file__).name:
            program.unlink()


def _count_free(folder):
    return shutil.disk_usage(str(folder)).free


def _find_modules(folder):
    """Return the versions of numpy and onnxruntime, the user's own package folder if there is one, and whether this
    Python is the one in FOLDER/venv.
    """
    import importlib.util
    import site
    from importlib import metadata

    private = Path(sys.prefix).resolve() == (folder / "venv").resolve()
    # Isolated processes do not search the user's own folder by themselves.
    paths = [p for p in (site.getusersitepackages(),) if Path(p).is_dir()]
    sys.path += [p for p in paths if p not in sys.path]
    versions = {}
    for module, packages in (("numpy", ("numpy",)), ("onnxruntime", ("onnxruntime", "onnxruntime-gpu"))):
        if importlib.util.find_spec(module) is not None:
            versions[module] = ""
            for package in packages:
                try:
                    versions[module] = metadata.version(package)
                    break
                except metadata.PackageNotFoundError:
                    continue
    return {"modules": versions, "paths": paths, "private": private}


def _resolve_inside(folder, name):
    """Return the path of `name` in `folder`. Refuse a name that leads out of `folder`."""
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise RefusedError("file name %r is not a plain path" % name)
    return folder.joinpath(*parts)


def _hash_file(path):
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _make_folders(folder, keep):
    """Return the folder for files and the folder for directories. With `keep` they are permanent. Otherwise they belong
    only to this session.
    """
    base = folder if keep else folder / "tmp"
    for name in ("blobs", "trees"):
        (base / name).mkdir(parents=True, exist_ok=True)
    return base / "blobs", base / "trees"


def _assemble_tree(folder, request, lines):
    """Check all files of a listing, put them into a directory, and return the directory's path as `path`. `path` is ""
    if a file or the listing is missing.
    """
    blobs, trees = _make_folders(folder, request["keep"])
    digest = request["digest"]
    root, listing = _resolve_inside(trees, digest), _resolve_inside(trees, digest + ".json")
    if not listing.exists():
        return {"path": ""}
    text = listing.read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        listing.unlink()
        return {"path": ""}
    files = json.loads(text.decode())
    complete = True
    for name, (sha256, size) in files.items():
        path, blob = _resolve_inside(root, name), _resolve_inside(blobs, sha256)
        stored = path if path.exists() else blob
        if stored.exists() and (stored.stat().st_size != size or _hash_file(stored) != sha256):
            for place in (path, blob):  # one file under two names, if the file system has hard links
                if place.exists():
                    place.unlink()
        if not path.exists():
            if not blob.exists():
                complete = False
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(str(blob), str(path))
            except OSError:  # a file system without hard links
                shutil.copyfile(str(blob), str(path))
    if complete:
        _remove_others(root, files)
    return {"path": str(root) if complete else ""}


def _remove_others(root, files):
    """Remove everything under `root` that is not in `files`, such as compiled code from a run, which no hash covers."""
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(root).as_posix() not in files:
            path.unlink()


def _store_listing(folder, request, lines):
    """Store a listing, which is {path: [sha256, size]} as JSON. Return the hashes of the files that are missing on this
    board.
    """
    blobs, trees = _make_folders(folder, request["keep"])
    text = request["listing"].encode()
    digest = hashlib.sha256(text).hexdigest()
    (trees / (digest + ".json")).write_bytes(text)
    missing = {sha for sha, _ in json.loads(text.decode()).values() if not _resolve_inside(blobs, sha).exists()}
    return {"missing": sorted(missing), "free": _count_free(folder)}


def _store(folder, request, lines):
    """Read the bytes of a file, which come after the request, and store them under their hash."""
    blobs, _ = _make_folders(folder, request["keep"])
    draft = folder / "tmp" / "incoming"
    # Hash while storing: the bytes come from another machine.
    digest, problem = hashlib.sha256(), None
    with draft.open("wb", buffering=0) as stream:
        for piece in lines.read_chunks(request["size"]):
            digest.update(piece)
            try:
                while piece and problem is None:
                    piece = piece[stream.write(piece) :]
            except OSError as error:  # read the rest anyway, because it would otherwise be taken for requests
                problem = error
    if problem is not None:
        draft.unlink()
        raise problem
    if digest.hexdigest() != request["sha256"]:
        raise RefusedError("a file arrived with other content")
    # A file that is stored under its hash must not change.
    draft.chmod(0o400)
    draft.replace(_resolve_inside(blobs, request["sha256"]))
    return {}


def _describe_board(folder, request, lines):
    """Describe the board and its state. `request["runtime"]` is the folder that contains edgeq_device."""
    if request["runtime"] not in sys.path:
        sys.path.insert(0, request["runtime"])
        # Compiled files would not be in the listing of the folder.
        sys.dont_write_bytecode = True
    from edgeq_device.engines.catalog import describe_problem, engines, read_installed_version, read_installed_versions
    from edgeq_device.measure import environment
    from edgeq_device.system import features
    from edgeq_device.system.gpus import read_gpus

    versions = read_installed_versions(request["packages"])
    runtime = versions.get("onnxruntime") or versions.get("onnxruntime-gpu", "")
    evidence = features.gather()
    answers = evidence.cpuid
    plugins = {}
    for name, engine in engines().items():
        version = read_installed_version(engine)
        problem = describe_problem(engine, runtime) if version and engine.module else ""
        plugins[name] = {"version": version, "problem": problem}
    uname = os.uname()
    return {
        "evidence": {
            **{name: getattr(evidence, name) for name in ("system", "machine", "cpuinfo", "sysctl")},
            "auxv": base64.b64encode(evidence.auxv).decode(),
            "cpuid": answers and {"leaves": [[*k, *v] for k, v in answers.leaves.items()], "xcr0": answers.xcr0},
        },
        "files": {name: text for name, text in _read_system_files(features.read_text) if text is not None},
        "affinity": len(features.read_allowed_cores()),
        "os": "%s %s" % (uname.sysname, uname.release),
        "versions": versions,
        "engines": plugins,
        "gpus": [gpu.to_dict() for gpu in read_gpus()[0]],
        "state": {
            "clock_mhz": max(environment.read_frequencies().values(), default=None),
            "governors": list(environment.read_governors()),
            "temperature_c": environment.read_temperatures(),
            "thermal_throttles": environment.read_throttle_count(),
            "load": environment.read_load(),
            "free_bytes": _count_free(folder),
        },
    }


def _read_system_files(read_text):
    root = Path("/")
    for name in _FILES:
        yield name, read_text(root / name)
    for name in _TREE_FILES:
        # A zero byte ends each text of the device tree. The workstation would show it as an escape.
        text = read_text(root / name)
        yield name, text and text.replace("\0", "\n")
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        for name in _CACHE_FILES:
            yield str((index / name).relative_to(root)), read_text(index / name)
    base = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = base / controllers if controllers else base
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            for name in _GROUP_FILES:
                yield str((mount / folder / name).relative_to(root)), read_text(mount / folder / name)


def _remove_everything(folder, request, lines):
    """Remove everything and return its size in bytes."""
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    shutil.rmtree(str(folder))
    return {"bytes": size}


_ANSWERS = {
    "tree": _assemble_tree,
    "listing": _store_listing,
    "put": _store,
    "describe": _describe_board,
    "clean": _remove_everything,
}

if __name__ == "__main__":
    # Text that a library prints must not end up between the answers.
    _OUT = os.dup(1)
    if sys.argv[1] == "serve":
        os.dup2(2, 1)
    sys.exit(main(sys.argv[1:]))
