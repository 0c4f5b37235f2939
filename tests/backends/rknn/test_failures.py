"""Each failure of the toolkit gives one line. A script replaces its Python, so that these tests run without the
toolkit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.base import backend_for
from edgeq.backends.rknn.compile import Compiled, CompiledLayer, check_ran, compare_answers, layers_of
from edgeq.backends.rknn.data import toolkit
from edgeq.errors import CheckFailedError, EdgeqError, EngineError, ModelError, RuntimeUnavailableError, UsageError
from edgeq.run import toolkit as outside
from edgeq.run.toolkit import Ran, find_base, find_python, install
from tests.backends.build import residual
from tests.backends.rknn.build import RK3588, SCHEME, build_artifact

VARIABLE = toolkit().variable
ROW = "D RKNN: [9] 34   Conv   INT8  NPU  (1,64,1,1),(10,64,1,1),(10)  (1,10,1,1)  42/64/64  0  Conv:logits#2\n"
SPARSE = "D RKNN: [9] 2  Slice  FLOAT16  CPU  (1,16,32,32),(2) (1,16,16,16) 0/0/0  16  0.00 Slice:a slice\n"
ENDS = "D RKNN: [9] 0    InputOperator  INT8  CPU  \\  (1,3,32,32)  0/0/0  0  InputOperator:input\n"


def stand_in(folder: Path, action: str, version: str = "2.5.0") -> Path:
    """Write a Python that reports a release of the toolkit and runs `action` in place of the worker."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nif [ "$2" = -c ]; then echo {version}; exit 0; fi\n{action}\n')
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("action", "error", "line"),
    [
        ("kill -SEGV $$", EngineError, "rknn-toolkit2 2.5.0 ends with SIGSEGV. Keep nodes in float"),
        ("kill -FPE $$", EngineError, "rknn-toolkit2 2.5.0 ends with SIGFPE"),
        ("sleep 60", EngineError, "rknn-toolkit2 2.5.0 reached its time limit of 0.5 s. Set EDGEQ_TOOLKIT_SECONDS"),
        ("echo 'No lowering found for: y, node type = Mish, use X'", ModelError, "does not support Mish (y). Export"),
        (
            "printf '\\033[31mE\\033[0m load_onnx: Traceback\\nE load_onnx: opset 22 is not supported\\n' >&2; exit 1",
            EngineError,
            "ends with status 1: load_onnx: opset 22 is not supported. Keep",
        ),
        ("echo 'ValueError: bad' >&2; exit 1", EngineError, "ends with status 1: ValueError: bad"),
        ("exit 0", EngineError, "rknn-toolkit2 2.5.0 wrote no file"),
    ],
)
def test_each_failure_is_one_line(
    action: str, error: type[EdgeqError], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(stand_in(tmp_path, action)))
    monkeypatch.setenv(outside.SECONDS, "0.5")
    artifact, prepared, samples = build_artifact(residual(), tmp_path / "model")
    (tmp_path / "work").mkdir()
    with pytest.raises(error) as raised:
        backend_for(RK3588).finished(artifact, prepared, samples, tmp_path / "work")
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_toolkit_is_noticed_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_for(RK3588)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(
        RuntimeUnavailableError, match=r"is needed: .* not a Python\. Run `edgeq toolkit rknn --install`"
    ):
        backend.check(SCHEME)
    monkeypatch.setenv(VARIABLE, str(stand_in(tmp_path, "exit 0", version="1.6.0")))
    with pytest.raises(RuntimeUnavailableError, match=r"2\.5\.0 is needed: .* has rknn-toolkit2 1\.6\.0"):
        backend.check(SCHEME)
    monkeypatch.setenv(VARIABLE, sys.executable)
    with pytest.raises(RuntimeUnavailableError, match=r"has no rknn-toolkit2"):
        backend.check(SCHEME)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeUnavailableError, match="it is not installed"):
        backend.check(SCHEME)


def test_another_scheme_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(stand_in(tmp_path, "exit 0")))
    with pytest.raises(UsageError, match="rknn backend cannot build with activation_type = uint8"):
        backend_for(RK3588).check(SCHEME.replace(activation_type="uint8"))
    with pytest.raises(UsageError, match="no kernels for 16-bit"):
        backend_for(RK3588).check(SCHEME.replace(wide=("conv",)))


def test_no_python_of_its_releases_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside.sys, "version_info", type("V", (), {"major": 3, "minor": 13}))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(outside, "read_platform", lambda: "linux x86_64")
    with pytest.raises(RuntimeUnavailableError, match=r"needs Python 3\.10 or 3\.11 or 3\.12; this is 3\.13"):
        find_base(toolkit())
    monkeypatch.setattr(outside, "read_platform", lambda: "darwin arm64")
    with pytest.raises(RuntimeUnavailableError, match=r"there is no rknn-toolkit2 2\.5\.0 for darwin arm64"):
        find_base(toolkit())


def test_a_failed_installation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(outside, "find_base", lambda toolkit: Path("/bin/false"))
    with pytest.raises(RuntimeUnavailableError, match=r"cannot be installed"):
        install(toolkit())
    assert not toolkit().folder.exists()
    with pytest.raises(RuntimeUnavailableError):
        find_python(toolkit())


def test_the_table_is_read_between_other_lines() -> None:
    log = f"D RKNN: [1] >>>>>> start: pass\n{ENDS}\x1b[1m{ROW}\x1b[0mW build: ID Conv\n{SPARSE}"
    assert layers_of(log) == (
        CompiledLayer("logits#2", "Conv", "INT8", "NPU", 64),
        CompiledLayer("a slice", "Slice", "FLOAT16", "CPU", 0),
    )


def test_an_operator_without_a_form_fails_a_build_that_says_0(tmp_path: Path) -> None:
    (tmp_path / "m.rknn").write_bytes(b"RKNN")
    layer = CompiledLayer("a", "Conv", "INT8", "NPU", 1)
    check_ran(Ran(0, ROW, "Unkown op target: 0"), tmp_path / "m.rknn", (layer,), Path("m.onnx"))
    with pytest.raises(ModelError, match=r"m\.onnx: .* does not support Det"):
        check_ran(Ran(0, f"{ROW}No lowering found for: Det", ""), tmp_path / "m.rknn", (layer,), Path("m.onnx"))
    with pytest.raises(EngineError, match="printed no table of layers"):
        check_ran(Ran(0, "", ""), tmp_path / "m.rknn", (), Path("m.onnx"))


@pytest.mark.parametrize(
    ("dtype", "error", "said"),
    [
        ("INT8", 0.0, "equals ONNX Runtime's unfused kernels bit for bit on 1 sample"),
        ("FLOAT16", 1e-3, "float16 layers round"),
        ("INT8", 1e-3, "sums of floats round in another order"),
        ("INT8", 0.5, ""),
        ("FLOAT16", 0.5, ""),
    ],
)
def test_the_simulator_must_answer_the_same(dtype: str, error: float, said: str) -> None:
    right = np.linspace(-1, 1, 100, dtype=np.float32)
    compiled = Compiled(
        Path("m.rknn"), (CompiledLayer("a", "Conv", dtype, "NPU", 1),), ((right.reshape(10, 10) + error,),)
    )
    if said:
        assert said in compare_answers(compiled, [{"y": right}], [{"y": right * 1.01}], Path("m.onnx"))
    else:
        with pytest.raises(CheckFailedError, match=r"m\.onnx: the simulator's answers differ"):
            compare_answers(compiled, [{"y": right}], [{"y": right * 1.01}], Path("m.onnx"))


def test_roundings_of_sums_may_differ_in_few_values() -> None:
    right = np.linspace(-1, 1, 1000, dtype=np.float32)
    answers = right.copy()
    answers[0] += 0.01
    compiled = Compiled(Path("m.rknn"), (CompiledLayer("a", "Conv", "INT8", "NPU", 1),), ((answers,),))
    assert "99.90% of values equal" in compare_answers(compiled, [{"y": right}], [{"y": right * 1.01}], Path("m.onnx"))


def test_steps_far_below_the_quantization_noise_are_no_reason_to_refuse() -> None:
    # 8 % of the values differ by one step, as in a network of landmarks: 50 dB, where quantization leaves 40 dB.
    random = np.random.default_rng(0)
    right = [np.round(random.normal(size=500), 2).astype(np.float32) for _ in range(4)]
    answers = [array + 0.01 * (random.random(500) < 0.08).astype(np.float32) for array in right]
    floats = [{"y": array + random.normal(0, 0.01, 500).astype(np.float32)} for array in right]
    compiled = Compiled(
        Path("m.rknn"), (CompiledLayer("a", "Conv", "INT8", "NPU", 1),), tuple((array,) for array in answers)
    )
    assert "of values equal" in compare_answers(compiled, [{"y": array} for array in right], floats, Path("m.onnx"))


def test_each_output_is_judged_by_itself() -> None:
    random = np.random.default_rng(0)
    boxes, scores = 300 * random.random((4, 100)), random.random((4, 100))
    expected = [{"boxes": box, "scores": score} for box, score in zip(boxes, scores, strict=True)]
    floats = [{name: array * 1.01 for name, array in sample.items()} for sample in expected]
    answers = tuple((sample["boxes"], sample["scores"] + random.normal(0, 0.3, 100)) for sample in expected)
    compiled = Compiled(Path("m.rknn"), (CompiledLayer("a", "Conv", "INT8", "NPU", 1),), answers)
    with pytest.raises(CheckFailedError, match=r"m\.onnx: .* output 'scores' has .* on this machine \(4 samples"):
        compare_answers(compiled, expected, floats, Path("m.onnx"))


def test_a_chip_without_float_is_not_sent_to_float(tmp_path: Path) -> None:
    ran = Ran(1, "", "ValueError: The Conv('c') not supported 'float16' dtype at rv1103/rv1106!")
    with pytest.raises(EngineError, match="not supported") as caught:
        check_ran(ran, tmp_path / "m.rknn", (), Path("m.onnx"), float16=False)
    assert "`exclude`" not in str(caught.value)
