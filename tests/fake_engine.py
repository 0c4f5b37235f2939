"""Install a fake plug-in engine: its package, metadata and description, and an onnxruntime that registers it.

The fake computes what onnxruntime's own kernels compute. A test can make it misbehave.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime  # noqa: F401  # the real one, for this process: only workers find the other one
import pytest

from edgeq.run.engines import Engine, load_engines

DESCRIPTION = """
title = "a fake"
provider = "FakeExecutionProvider"
packages = ["edgeq-fake-engine"]
module = "edgeq_fake_engine"
libraries = ["libfake.so"]
oldest = "1.2"
min_onnxruntime = "1.20"
driver = "Install the driver of the fake"
verified = "a test"

[precisions]
f32 = { value = "single" }
bf16 = { value = "brain", fast_on = ["amx_bf16"] }

[options]
streams = "1"
[options.config.CPU]
HINT = "{precision}"
THREADS = "{threads}"

[int8]
pairs = ["U8S8"]
"""

# Replaces the real module in a worker. The registered library is a text file that contains the behaviour.
_RUNTIME = """
import sys, os, json, signal, time
here = os.path.dirname(__file__)
sys.path.remove(here)
del sys.modules["onnxruntime"]
import onnxruntime as real
sys.path.append(here)
from types import SimpleNamespace as Of

devices, behaviour, runs = [Of(ep_name="CPUExecutionProvider")], "", []

def register(name, library):
    global behaviour
    with open(library) as file:
        behaviour = file.read()
    if behaviour == "crashes at load":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "does not load":
        raise real.capi.onnxruntime_pybind11_state.Fail("undefined symbol: fake")
    kind = "GPU" if behaviour == "no device" else "CPU"
    devices.append(Of(ep_name=name, device=Of(type=Of(name=kind))))

class SessionOptions(real.SessionOptions):
    def add_provider_for_devices(self, devices, options):
        with open(os.path.join(here, "options.json"), "w") as file:
            json.dump(options, file)

class InferenceSession(real.InferenceSession):
    def __init__(self, model, options):
        super().__init__(model, options, providers=["CPUExecutionProvider"])
    def get_providers(self):
        return [d.ep_name for d in devices if behaviour != "does not start"][::-1]
    def run(self, names, feeds):
        runs.append(names)
        if behaviour == "crashes at run" or (behaviour == "crashes later" and len(runs) > 1):
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "hangs":
            time.sleep(600)
        found = super().run(names, feeds)
        return [value * 1.001 for value in found] if behaviour == "answers wrong" else found

real.register_execution_provider_library, real.get_ep_devices = register, lambda: devices
real.SessionOptions, real.InferenceSession = SessionOptions, InferenceSession
"""

DIRECT = """
[options.load_config.CPU]
HINT = "{precision}"
THREADS = "{threads}"

[direct]
adapter = "direct_openvino"
packages = ["edgeq-fake-direct"]
module = "edgeq_fake_direct"
libraries = ["__init__.py"]
oldest = "1.2"
"""

# The part of openvino's interface that the adapter uses, implemented with onnxruntime.
_PACKAGE = r"""
import json, os, signal, time
import onnxruntime as real
from datetime import timedelta
from types import SimpleNamespace as Of

here = os.path.dirname(__file__)
with open(os.path.join(here, "behaviour")) as file:
    behaviour = file.read()
if behaviour == "crashes at load":
    os.kill(os.getpid(), signal.SIGSEGV)
if behaviour == "fails at import":
    raise ImportError("libfake.so: cannot open\nshared object file")
runs = []

class Model:
    def __init__(self, path):
        self.session = real.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.sizes = {place: list(info.shape) for place, info in enumerate(self.session.get_inputs())}
        ports = lambda specs: [
            Of(get_names=lambda name=spec.name: {name}, get_partial_shape=lambda shape=spec.shape: list(shape))
            for spec in specs
        ]
        self.inputs, self.outputs = ports(self.session.get_inputs()), ports(self.session.get_outputs())
        if behaviour == "other outputs":
            self.outputs = ports(self.session.get_inputs())
    def is_dynamic(self):
        return any(not isinstance(size, int) for sizes in self.sizes.values() for size in sizes)
    def reshape(self, sizes):
        fixed = all(isinstance(size, int) for shape in sizes.values() for size in shape)
        if behaviour == "takes no fixed sizes" and fixed:
            raise RuntimeError("not foldable")
        self.sizes = sizes

class Core:
    def read_model(self, path):
        return Model(path)
    def compile_model(self, model, device, properties):
        if behaviour == "refuses the model":
            raise RuntimeError("Check 'false' failed at\nsrc/fake.cpp:1")
        if behaviour == "crashes at compile":
            os.kill(os.getpid(), signal.SIGSEGV)
        with open(os.path.join(os.path.dirname(here), "compiled.jsonl"), "a") as file:
            file.write(json.dumps([device, properties, model.sizes]) + "\n")
        return Of(create_infer_request=lambda: Request(model.session))

class Request:
    def __init__(self, session):
        self.session = session
    def infer(self, inputs, share_inputs):
        runs.append(inputs)
        if behaviour == "crashes at run" or (behaviour == "crashes later" and len(runs) > 1):
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "hangs":
            time.sleep(600)
        names = [info.name for info in self.session.get_inputs()]
        found = self.session.run(None, {names[place]: value for place, value in inputs.items()})
        wrong = behaviour == "answers wrong"
        return Of(to_tuple=lambda: tuple(value * 1.001 for value in found) if wrong else tuple(found))
    def get_compiled_model(self):
        layer = Of(get_friendly_name=lambda: "c", get_rt_info=lambda: {"originalLayersNames": Of(value="c,r")})
        return Of(get_runtime_model=lambda: Of(get_ordered_ops=lambda: [layer]))
    def get_profiling_info(self):
        status = Of(EXECUTED=1, NOT_RUN=0)
        rows = [("c", "Convolution", "jit_i8", 1), ("folded", "Relu", "undef", 0)]
        make = lambda n, t, e, s: Of(node_name=n, node_type=t, exec_type=e, status=s, Status=status)
        return [Of(real_time=timedelta(microseconds=5), **vars(make(*row))) for row in rows]
"""


def install_direct(folder: Path, patch: pytest.MonkeyPatch, behaviour: str = "", version: str = "1.2.3") -> Engine:
    """Install the fake as a package that an adapter opens; its plug-in exists only for another platform.

    Otherwise this is the same as `install`.

    Args:
        behaviour: "crashes at load", "fails at import", "refuses the model", "crashes at compile", "other outputs",
            "takes no fixed sizes", "crashes at run", "crashes later", "hangs", "answers wrong"; any other text for a
            fake that works.
    """
    (folder / "engines").mkdir()
    described = DESCRIPTION.replace('verified = "a test"', 'verified = "a test"\nplatforms = ["nowhere none"]')
    (folder / "engines" / "fake.toml").write_text(described + DIRECT)
    if version:
        package, metadata = folder / "edgeq_fake_direct", folder / f"edgeq_fake_direct-{version}.dist-info"
        package.mkdir()
        metadata.mkdir()
        (package / "__init__.py").write_text(_PACKAGE)
        (package / "behaviour").write_text(behaviour)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: edgeq-fake-direct\nVersion: {version}\n")
    patch.syspath_prepend(folder)
    return load_engines(folder / "engines")["fake"]


def install(folder: Path, patch: pytest.MonkeyPatch, behaviour: str = "", version: str = "1.2.3") -> Engine:
    """Put the fake where this process and its workers find it.

    Args:
        behaviour: "crashes at load", "does not load", "no device", "does not start", "crashes at run", "crashes later"
            (at the second run), "hangs", "answers wrong"; any other text for a fake that works.
        version: the version of the package; "" for no package.
    """
    (folder / "engines").mkdir()
    (folder / "engines" / "fake.toml").write_text(DESCRIPTION)
    (folder / "onnxruntime.py").write_text(_RUNTIME)
    if version:
        package, metadata = folder / "edgeq_fake_engine", folder / f"edgeq_fake_engine-{version}.dist-info"
        package.mkdir()
        metadata.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('nothing imports the plug-in')\n")
        (package / "libfake.so").write_text(behaviour)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: edgeq-fake-engine\nVersion: {version}\n")
    patch.syspath_prepend(folder)
    return load_engines(folder / "engines")["fake"]
