"""Call ONNX Runtime's own model-package reader through ctypes. This runs as a program, in its own process, because a
wrong slot would crash it:

    python ort_client.py PACKAGE COMPONENT INPUT.npy [PROVIDER LIBRARY]

It prints one JSON object. With the library of a plug-in, it registers and names the plug-in's provider in place of the
CPU's. `reachable` is false, with `reason`, if this onnxruntime does not export the functions.

In 1.28 to 1.30 the functions were experimental: `OrtApi::GetExperimentalFunction` finds them by name. From 1.31 on they
are a stable table, which `OrtApi::GetModelPackageApi` returns. In 1.31.1 the lookup knows only its own test function
and no model-package function. Slots of `OrtApi` never change once they are released. The numbers of these two slots
were found on 1.31.1: the first slot returns that test function, and the second returns the table that this file uses.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

POINTER = ctypes.c_void_p
SLOTS = {
    "GetErrorMessage": 2,
    "CreateEnv": 3,
    "Run": 9,
    "CreateSessionOptions": 10,
    "CreateTensorWithDataAsOrtValue": 49,
    "GetTensorMutableData": 51,
    "GetDimensionsCount": 61,
    "GetDimensions": 62,
    "GetTensorTypeAndShape": 65,
    "CreateCpuMemoryInfo": 69,
    "SessionGetInputName": 36,
    "SessionGetOutputName": 37,
    "GetAllocatorWithDefaultOptions": 78,
    "RegisterExecutionProviderLibrary": 301,
    "GetEpDevices": 303,
    "SessionOptionsAppendExecutionProvider_V2": 304,
    "HardwareDevice_Type": 307,
    "EpDevice_EpName": 312,
    "EpDevice_Device": 316,
    "GetExperimentalFunction": 422,
    "GetModelPackageApi": 427,
}
PACKAGE = (
    "CreateModelPackageOptionsFromSessionOptions",
    "ReleaseModelPackageOptions",
    "CreateModelPackageContext",
    "ReleaseModelPackageContext",
    "ModelPackage_GetSchemaVersion",
    "ModelPackage_GetComponentCount",
    "ModelPackage_GetComponentNames",
    "ModelPackage_GetVariantCount",
    "ModelPackage_GetVariantNames",
    "ModelPackage_GetVariantEpName",
    "ModelPackage_ResolveStringRef",
    "SelectComponent",
    "ReleaseModelPackageComponentContext",
    "ModelPackageComponent_GetSelectedVariantName",
    "ModelPackageComponent_GetSelectedVariantFolderPath",
    "CreateSession",
)


class RefusedError(Exception):
    """Report a status of ONNX Runtime, with its message."""


class Api:
    """Call `OrtApi` and the model-package functions with C values. A status becomes RefusedError."""

    def __init__(self, library: ctypes.CDLL, api: int, package: dict[str, int]) -> None:
        self._library = library
        self._slots = ctypes.cast(api, ctypes.POINTER(POINTER))
        self._package = package

    def append_cpu(self, options: POINTER) -> None:
        """Name the CPU provider, because variants match only named providers, not the fallback."""
        append = self._library.OrtSessionOptionsAppendExecutionProvider_CPU
        append.restype, append.argtypes = POINTER, (POINTER, ctypes.c_int)
        assert not append(options, 1)

    def append_plugin(self, env: POINTER, options: POINTER, provider: str, library: str) -> None:
        """Register a plug-in and name its CPU device without options, which the package has to provide."""
        self.call(
            "RegisterExecutionProviderLibrary",
            env,
            ctypes.c_char_p(provider.encode()),
            ctypes.c_char_p(library.encode()),
        )
        devices, count = ctypes.POINTER(POINTER)(), ctypes.c_size_t()
        out = [ctypes.cast(ctypes.pointer(value), POINTER) for value in (devices, count)]
        self.call("GetEpDevices", env, *out)
        for i in range(count.value):
            device = POINTER(devices[i])
            if self.get("EpDevice_EpName", ctypes.c_char_p, device) != provider.encode():
                continue
            if self.get("HardwareDevice_Type", ctypes.c_int, self.get("EpDevice_Device", POINTER, device)) == 0:
                one = ctypes.cast((POINTER * 1)(device), POINTER)
                nothing, none = POINTER(), ctypes.c_size_t(0)
                append = "SessionOptionsAppendExecutionProvider_V2"
                self.call(append, options, env, one, ctypes.c_size_t(1), nothing, nothing, none)
                return
        raise RefusedError(f"{provider} has no CPU device")

    def get(self, name: str, result: Any, *arguments: POINTER | None) -> Any:
        """Call a function that returns a value instead of a status."""
        values = [POINTER(a) if isinstance(a, int) else a for a in arguments]
        return ctypes.CFUNCTYPE(result, *[POINTER for _ in values])(self._slots[SLOTS[name]])(*values)

    def call(self, name: str, *arguments: Any) -> None:
        address = self._package.get(name) or self._slots[SLOTS[name]]
        status = ctypes.CFUNCTYPE(POINTER, *[type(a) for a in arguments])(address)(*arguments)
        if status:
            message = ctypes.CFUNCTYPE(ctypes.c_char_p, POINTER)(self._slots[SLOTS["GetErrorMessage"]])(status)
            raise RefusedError((message or b"").decode())

    def make(self, name: str, *arguments: Any) -> POINTER:
        """Call a function whose last parameter is `T** out`, and return what it created."""
        out = POINTER()
        self.call(name, *arguments, ctypes.cast(ctypes.pointer(out), POINTER))
        return out

    def text(self, name: str, *arguments: Any) -> str:
        found = self.make(name, *arguments)
        return ctypes.string_at(found.value or 0).decode()


def find() -> Api | str:
    """Return the functions, or the reason why they are not available."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    libraries = sorted(folder.glob("libonnxruntime.so*")) + sorted(folder.glob("libonnxruntime*.dylib"))
    libraries += sorted(folder.glob("onnxruntime.dll"))
    if not libraries:
        return f"the wheel of onnxruntime {onnxruntime.__version__} has no library with OrtGetApiBase"
    library = ctypes.CDLL(str(libraries[0]))
    base = library.OrtGetApiBase
    base.restype = ctypes.POINTER(POINTER)
    get_api = ctypes.CFUNCTYPE(POINTER, ctypes.c_uint32)(base()[0])
    minor = int(onnxruntime.__version__.split(".")[1])
    if minor < 28:
        return f"onnxruntime {onnxruntime.__version__} is older than the model package (1.28)"
    api = get_api(minor)
    if not api:
        return f"onnxruntime {onnxruntime.__version__} does not give out its API version {minor}"
    slots = ctypes.cast(api, ctypes.POINTER(POINTER))
    package = _stable(slots) if minor >= 31 else _experimental(slots)
    return (
        Api(library, api, package)
        if package
        else f"onnxruntime {onnxruntime.__version__} has no model-package functions"
    )


def _stable(slots: Any) -> dict[str, int]:
    table = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER))(slots[SLOTS["GetModelPackageApi"]])()
    return {name: table[i] for i, name in enumerate(PACKAGE)} if table else {}


def _experimental(slots: Any) -> dict[str, int]:
    look_up = ctypes.CFUNCTYPE(POINTER, ctypes.c_char_p)(slots[SLOTS["GetExperimentalFunction"]])
    found = {name: look_up(f"OrtModelPackageApi_{name}_SinceV28".encode()) for name in PACKAGE}
    return {name: address for name, address in found.items() if address} if all(found.values()) else {}


def describe(api: Api, root: str, component: str, data: np.ndarray[Any, Any], plugin: list[str]) -> dict[str, Any]:
    """Open the package, select a variant of `component`, and run it on `data` (float32, its only input)."""
    env = api.make("CreateEnv", ctypes.c_int(3), ctypes.c_char_p(b"edgeq"))
    options = api.make("CreateSessionOptions")
    if plugin:
        api.append_plugin(env, options, *plugin)
    else:
        api.append_cpu(options)
    package_options = api.make("CreateModelPackageOptionsFromSessionOptions", env, options)
    context = api.make("CreateModelPackageContext", ctypes.c_char_p(root.encode()))
    components = names(api, "ModelPackage_GetComponentNames", context)
    variants = {
        name: names(api, "ModelPackage_GetVariantNames", context, ctypes.c_char_p(name.encode())) for name in components
    }
    selected = api.make("SelectComponent", context, ctypes.c_char_p(component.encode()), package_options)
    session = api.make("CreateSession", env, selected, POINTER())
    return {
        "reachable": True,
        "components": variants,
        "selected": api.text("ModelPackageComponent_GetSelectedVariantName", selected),
        "folder": api.text("ModelPackageComponent_GetSelectedVariantFolderPath", selected),
        "output": run(api, session, data).tolist(),
    }


def names(api: Api, function: str, *arguments: Any) -> list[str]:
    array, count = POINTER(), ctypes.c_size_t()
    out = [ctypes.cast(ctypes.pointer(value), POINTER) for value in (array, count)]
    api.call(function, *arguments, *out)
    texts = ctypes.cast(array, ctypes.POINTER(ctypes.c_char_p))
    return [(texts[i] or b"").decode() for i in range(count.value)]


def run(api: Api, session: POINTER, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    data = np.ascontiguousarray(data, np.float32)
    memory = api.make("CreateCpuMemoryInfo", ctypes.c_int(0), ctypes.c_int(0))
    shape = (ctypes.c_int64 * data.ndim)(*data.shape)
    value = api.make(
        "CreateTensorWithDataAsOrtValue",
        memory,
        POINTER(data.ctypes.data),
        ctypes.c_size_t(data.nbytes),
        ctypes.cast(shape, POINTER),
        ctypes.c_size_t(data.ndim),
        ctypes.c_int(1),
    )
    allocator = api.make("GetAllocatorWithDefaultOptions")
    first = ctypes.c_size_t(0)
    pins = [
        (ctypes.c_char_p * 1)(api.text(name, session, first, allocator).encode())
        for name in ("SessionGetInputName", "SessionGetOutputName")
    ]
    values, results = (POINTER * 1)(value.value), (POINTER * 1)()
    one = ctypes.c_size_t(1)
    pointers: list[Callable[[], POINTER]] = [lambda a=a: ctypes.cast(a, POINTER) for a in (*pins, values, results)]
    inputs, outputs, given, taken = (make() for make in pointers)
    api.call("Run", session, POINTER(), inputs, given, one, outputs, one, taken)
    result = POINTER(results[0])
    info = api.make("GetTensorTypeAndShape", result)
    rank = ctypes.c_size_t()
    api.call("GetDimensionsCount", info, ctypes.cast(ctypes.pointer(rank), POINTER))
    sizes = (ctypes.c_int64 * rank.value)()
    api.call("GetDimensions", info, ctypes.cast(sizes, POINTER), rank)
    address = api.make("GetTensorMutableData", result)
    count = int(np.prod(list(sizes)))
    floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return np.array([floats[i] for i in range(count)], np.float32).reshape(list(sizes))


def main() -> None:
    root, component, file, *plugin = sys.argv[1:]
    api = find()
    if isinstance(api, str):
        print(json.dumps({"reachable": False, "reason": api}))
        return
    try:
        print(json.dumps(describe(api, root, component, np.load(file, allow_pickle=False), plugin)))
    except RefusedError as error:
        print(json.dumps({"reachable": True, "refused": str(error)}))


if __name__ == "__main__":
    main()
