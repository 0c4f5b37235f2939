"""Compile one ONNX file in the environment that has the toolkit, and run it in the toolkit's simulator.

Run this as `python worker.py JOB` in an empty folder. The Python that runs it does not need edgeq. JOB is a JSON file:

    config      arguments of RKNN.config
    model       the ONNX file
    output      path of the compiled file
    quantize    list of calibration samples for the toolkit's own quantizer; null if the file has its own scales
    inputs      names of the model's inputs
    answers     the folder for the simulator's answers; null skips the simulator

After compiling, the worker reads its standard input. Each line is the path of an .npz file with one array per input.
The worker writes the simulator's answer to the n-th file as n.npz in the folder for answers, counted from 0.

The exit status is 0 if everything was written. Otherwise, a line of stderr that begins with `REASON` names the failure.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

REASON = "edgeq-reason:"


class _Anything:
    """Accept every call and have every attribute. This class replaces torch, which the toolkit needs only to train."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Anything()

    def __getattr__(self, name: str) -> Any:
        # Python looks special names up to see what an object can do; a stub must not claim to be, for example, a
        # container.
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _TorchFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provide a replacement for torch. The toolkit imports torch but does not need it to compile."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a spec for the replacement of torch or of one of its modules."""
        del path, target
        if fullname.partition(".")[0] != "torch":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """Return an empty module that has every attribute."""
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module needs no content."""


def _refuse(reason: str) -> None:
    print(f"{REASON} {reason}", file=sys.stderr, flush=True)
    sys.exit(1)


def main(job: dict[str, Any]) -> None:
    """Run one job."""
    # torch takes gigabytes, and the toolkit imports it even to compile.
    if importlib.util.find_spec("torch") is None:
        sys.meta_path.append(_TorchFinder())
    import numpy as np
    from rknn.api import RKNN  # type: ignore[import-not-found]

    # Only the verbose log contains the table of layers.
    rknn = RKNN(verbose=True)
    rknn.config(**job["config"])
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("load_onnx", lambda: rknn.load_onnx(model=job["model"])),
        ("build", lambda: rknn.build(do_quantization=job["quantize"] is not None, dataset=job["quantize"])),
        ("export_rknn", lambda: rknn.export_rknn(job["output"])),
    ]
    if job["answers"] is not None:
        steps.append(("init_runtime", lambda: rknn.init_runtime(target=None)))
    for name, step in steps:
        # The toolkit reports failure by the return value, without an exception.
        if step() != 0:
            _refuse(f"{name} gives an error")
    for place, line in enumerate(sys.stdin if job["answers"] is not None else ()):
        with np.load(line.rstrip("\n"), allow_pickle=False) as sample:
            arrays = [sample[name] for name in job["inputs"]]
        answers = rknn.inference(inputs=arrays, data_format=["nchw"] * len(arrays))
        if answers is None:
            _refuse("the simulator gives no answer")
        answer_file = Path(job["answers"]) / f"{place}.npz"
        # The reader waits for the final name, so it never reads half a file.
        draft = answer_file.with_suffix(".draft.npz")
        np.savez(draft, *answers)
        draft.rename(answer_file)
    rknn.release()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
