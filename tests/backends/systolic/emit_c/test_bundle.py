"""C bundles are compiled and run, and the integers of every layer equal the simulator's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.emit_c.bundle import CBundle, write_c_bundle
from edgeq.backends.systolic.program import Conv, Fc, Float, Program
from edgeq.errors import DataError, HardwareError, ModelError, UsageError
from tests.backends.systolic.emit_c.compilers import RISCV, done, need
from tests.backends.systolic.emit_c.programs import (
    MODES,
    SMALL,
    Arrays,
    differing,
    model_cases,
    program_of,
    random_program,
)
from tests.graphs import proto

STRICT = "CFLAGS=-O0 -Wall -Wextra -Werror"


def run_all_modes(bundle: CBundle, program: Program, inputs: Arrays, binary: str, *runner: str) -> None:
    for mode, options in MODES.items():
        out = done(*runner, f"./{binary}", *mode, "check", "dump", folder=bundle.directory)
        assert "self-test: passed" in out
        assert f"layers: {len(bundle.layers)} of {len(bundle.layers)} equal" in out
        dump = (bundle.directory / "layers.bin").read_bytes()
        assert differing(bundle, program, inputs, dump, **options) == {}, mode


def check_random(seed: int, folder: Path) -> None:
    program, inputs = random_program(seed, folder)
    bundle = write_c_bundle(program, inputs, folder / "c", generation="2021" if seed // 4 % 2 else "2023")
    done("make", "-s", "host", STRICT, folder=bundle.directory)
    run_all_modes(bundle, program, inputs, "net-host")


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs(seed: int, tmp_path: Path) -> None:
    need("gcc", "make")
    check_random(seed, tmp_path / "g")


@pytest.mark.slow
def test_many_random_graphs(tmp_path: Path) -> None:
    need("gcc", "make")
    for seed in range(100, 124):
        check_random(seed, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["demo", "lenet_mnist", "resnet20_cifar10", "mlperf_tiny_vww", "mobilenet_v1_0.25_224"]
)
def test_models_under_qemu(name: str, shared_data: Path, tmp_path: Path) -> None:
    need("make", *RISCV)
    model, data, preprocess = model_cases(shared_data)[name]
    int8_program = program_of(model, str(data), preprocess=preprocess, count=8)
    program, inputs = int8_program[0], {key: values[:1] for key, values in int8_program[1].items()}
    generation = "2021" if name in ("lenet_mnist", "mlperf_tiny_vww") else "2023"
    bundle = write_c_bundle(program, inputs, tmp_path, generation=generation)
    done("make", "-s", "linux", folder=bundle.directory)
    run_all_modes(bundle, program, inputs, "net-linux", "qemu-riscv64")


@pytest.mark.slow
def test_bare_metal_under_a_whole_machines_emulator(tmp_path: Path) -> None:
    """The C runs on bare metal with picolibc's start-up code in place of the board's, and semihosting in place of its
    console.
    """
    need("make", "riscv64-unknown-elf-gcc", "qemu-system-riscv64")
    if done("riscv64-unknown-elf-gcc", "-print-file-name=picolibc.specs").strip() == "picolibc.specs":
        pytest.skip("picolibc-riscv64-unknown-elf not installed")
    program, inputs = random_program(8, tmp_path / "m")
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    memory = {"__flash": 0x80000000, "__flash_size": 0x1000000, "__ram": 0x81000000, "__ram_size": 0x1000000}
    places = " ".join(f"-Wl,--defsym={name}={value:#x}" for name, value in memory.items())
    flags = f"-DBAREMETAL -march=rv64gc -mabi=lp64d -mcmodel=medany --specs=picolibc.specs {places}"
    libs = "--oslib=semihost --crt0=hosted"
    done("make", "-s", "baremetal", f"BAREMETAL_FLAGS={flags}", f"BAREMETAL_LIBS={libs}", folder=bundle.directory)
    machine = [
        "-M",
        "virt",
        "-m",
        "64M",
        "-bios",
        "none",
        "-nographic",
        "-semihosting-config",
        "enable=on,target=native",
    ]
    out = done("qemu-system-riscv64", *machine, "-kernel", "net-baremetal", folder=bundle.directory)
    assert "self-test: passed" in out


def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    program, inputs = random_program(3, tmp_path / "m", ArrayConfig())
    one, two = (write_c_bundle(program, inputs, tmp_path / name) for name in ("a", "b"))
    assert one.files == two.files
    for name in one.files:
        assert (one.directory / name).read_bytes() == (two.directory / name).read_bytes()
    assert {"main.c", "params.h", "images.h", "expected.h", "Makefile", "README.md"} < set(one.files)


def test_names_from_a_model_do_not_reach_c(tmp_path: Path) -> None:
    program, inputs = random_program(5, tmp_path / "m", ArrayConfig())
    assert any("/etc/passwd" in step.name for step in program.steps)
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    for name in bundle.files:
        text = (bundle.directory / name).read_text()
        assert text.isascii()
        assert not any(bad in text for bad in ('"/etc/passwd"', "$(reboot)", "passwd*/"))


def test_a_wrong_value_fails_the_self_test(tmp_path: Path) -> None:
    need("gcc", "make")
    program, inputs = random_program(8, tmp_path / "m", ArrayConfig())
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    for file, array in (("expected.h", "expected_0_ws"), ("images.h", "images")):
        place = bundle.directory / file
        original = place.read_text()
        head, _, tail = original.partition(f" {array}[")
        sizes, _, values = tail.partition("= ")
        at = next(i for i, c in enumerate(values) if c not in "{\n ")
        end = at + min(values[at:].index(c) for c in ",}\n" if c in values[at:])
        wrong = -100 if int(values[at:end]) > 0 else 100
        place.write_text(f"{head} {array}[{sizes}= {values[:at]}{wrong}{values[end:]}")
        with pytest.raises(AssertionError, match="self-test: FAILED"):
            done("make", "-s", "check", folder=bundle.directory)
        place.write_text(original)
    done("make", "-s", "check", folder=bundle.directory)
    with pytest.raises(AssertionError, match="usage:"):
        done("./net-host", "sw", folder=bundle.directory)


HEADER = """
#define DIM 4 // of this chip
#define BANK_NUM 4
#define BANK_ROWS 16
#define ACC_ROWS 64
#include <stdint.h>
typedef int8_t elem_t;
/* typedef float elem_t; */
typedef int32_t acc_t;
typedef float scale_t;
typedef int32_t scale_acc_t;
typedef float acc_scale_t;
#define ACC_SCALE_T_IS_FLOAT
#define MVIN_SCALE_IDENTITY 1.0
#define ACC_SCALE_IDENTITY 1.0
"""


def test_a_chips_own_header(tmp_path: Path) -> None:
    need("gcc", "make")
    program, inputs = random_program(1, tmp_path / "m", SMALL)
    header = tmp_path / "gemmini_params.h"
    header.write_text(HEADER)
    bundle = write_c_bundle(program, inputs, tmp_path / "c", params_header=header)
    assert (bundle.directory / "portable/include/gemmini_params.h").read_text() == HEADER
    assert bundle.notes == ("gemmini_params.h has 64 accumulator rows, the target 32; the header's count is used",)
    done("make", "-s", "check", STRICT, folder=bundle.directory)
    done("./net-host", "os", "check", folder=bundle.directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("DIM 4", "DIM 16"), "DIM is 16, the target's is 4"),
        (("#define DIM", "#undef DIM"), "does not define DIM"),
        (("typedef int8_t elem_t", "typedef float elem_t"), "elem_t is float"),
        (("typedef int32_t acc_t", "typedef int16_t acc_t"), "acc_t is int16_t"),
        (("typedef float acc_scale_t", "typedef uint8_t acc_scale_t"), "output scale"),
    ],
)
def test_a_header_of_another_array_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    program, inputs = random_program(1, tmp_path / "m", SMALL)
    header = tmp_path / "gemmini_params.h"
    header.write_text(HEADER.replace(*change))
    with pytest.raises(HardwareError, match=message):
        write_c_bundle(program, inputs, tmp_path / "c", params_header=header)
    assert not (tmp_path / "c").exists()


def test_a_header_that_is_none_is_refused(tmp_path: Path) -> None:
    program, inputs = random_program(1, tmp_path / "m", SMALL)
    (tmp_path / "binary").write_bytes(b"\0DIM")
    for name in ("nowhere", "binary"):
        with pytest.raises(HardwareError, match=name):
            write_c_bundle(program, inputs, tmp_path / "c", params_header=tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("#define DIM 16", "#define DIM 8"), "another DIM"),
        (("typedef int8_t elem_t", "typedef int16_t elem_t"), "elem_t must be int8_t"),
        (("typedef int32_t acc_t", "typedef int64_t acc_t"), "acc_t must be int32_t"),
        (("typedef float acc_scale_t", "typedef int acc_scale_t"), "acc_scale_t must be a float"),
    ],
)
def test_the_compiler_refuses_another_array_too(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    need("gcc", "make")
    program, inputs = random_program(0, tmp_path / "m", ArrayConfig())
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    header = bundle.directory / "portable/include/gemmini_params.h"
    assert change[0] in header.read_text()
    header.write_text(header.read_text().replace(*change))
    with pytest.raises(AssertionError, match=message):
        done("make", "-s", "host", folder=bundle.directory)


def save(path: Path, text: str, weights: np.ndarray) -> None:
    """Write a model whose only weight is called w."""
    model = proto(text, opset=13)
    model.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), "w"))
    onnx.save(model, path)


def chain(folder: Path, middle: str) -> tuple[Program, Arrays]:
    """Return the program of Conv, another operator, Conv and Softmax."""
    random = np.random.default_rng(0)
    text = f"""g (float[1, 3, 6, 6] x) => (float[1, 3, 4, 4] y) {{
        [first] a = Conv <pads = [1, 1, 1, 1]> (x, w)
        [middle] b = {middle} (a)
        [second] c = Conv (b, w)
        [soft] y = Softmax <axis = 1> (c)
    }}"""
    save(folder / "m.onnx", text, random.normal(0, 0.4, (3, 3, 3, 3)))
    return program_of(
        folder / "m.onnx", [{"x": random.normal(0, 1, (1, 3, 6, 6)).astype(np.float32)} for _ in range(2)]
    )


def test_float_steps_at_the_ends_are_the_hosts(tmp_path: Path) -> None:
    program, inputs = chain(tmp_path, "Relu")
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    readme = (bundle.directory / "README.md").read_text()
    assert "after the outputs: `soft`" in readme
    assert [program.tensors[name].origin for name in bundle.outputs] == ["c"]


def test_float_steps_between_integers_are_refused(tmp_path: Path) -> None:
    program, inputs = chain(tmp_path, "Sin")
    with pytest.raises(ModelError, match=r"'middle' runs in float between integer layers"):
        write_c_bundle(program, inputs, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_network_without_convolutions(tmp_path: Path) -> None:
    need("gcc", "make")
    random = np.random.default_rng(0)
    text = "g (float[1, 6] x) => (float[1, 5] y) { y = MatMul (x, w) }"
    save(tmp_path / "m.onnx", text, random.normal(0, 0.4, (6, 5)))
    samples = random.normal(0, 1, (3, 1, 6)).astype(np.float32)
    program, inputs = program_of(tmp_path / "m.onnx", [{"x": sample} for sample in samples])
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    done("make", "-s", "host", STRICT, folder=bundle.directory)
    run_all_modes(bundle, program, inputs, "net-host")


def test_lines_and_rows(tmp_path: Path) -> None:
    """1-D convolutions with pooling between them, and a product of each time step, match the simulator."""
    need("gcc", "make")
    random = np.random.default_rng(0)
    text = """g (float[1, 6, 20] x) => (float[1, 5, 6] y)
        <int64[2] rows = {-1, 6}, int64[3] back = {1, 5, 6}, int64[1] axis = {2}> {
        [first] a = Conv <pads = [2, 1]> (x, w)
        [relu] b = Relu (a)
        [pool] c = MaxPool <kernel_shape = [2], strides = [2]> (b)
        [second] d = Conv <strides = [2], pads = [1, 2]> (c, w)
        [sum] e = Add (d, d)
        [turn] f = Transpose <perm = [0, 2, 1]> (e)
        [flat] h = Reshape (f, rows)
        [square] v = ReduceSum <keepdims = 0> (w, axis)
        [product] p = Gemm (h, v)
        [back] y = Reshape (p, back)
    }"""
    save(tmp_path / "m.onnx", text, random.normal(0, 0.4, (6, 6, 4)))
    samples = random.normal(0, 1, (3, 1, 6, 20)).astype(np.float32)
    program, inputs = program_of(tmp_path / "m.onnx", [{"x": sample} for sample in samples])
    assert [type(step).__name__ for step in program.steps if isinstance(step, Conv | Fc | Float)] == ["Conv"] * 2 + [
        "Fc"
    ]
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    done("make", "-s", "host", STRICT, folder=bundle.directory)
    run_all_modes(bundle, program, inputs, "net-host")


def test_an_inner_tensor_is_brought_into_an_order_once(tmp_path: Path) -> None:
    """A tensor that is an output of the graph and that a layer reads in the same order is reordered only once."""
    need("gcc", "make")
    random = np.random.default_rng(0)
    text = """g (float[1, 6, 8] x) => (float[1, 6, 5] a, float[1, 12, 5] y) {
        [first] a = Conv (x, w)
        [second] b = Conv <pads = [1, 2]> (a, w)
        [both] y = Concat <axis = 1> (a, b)
    }"""
    save(tmp_path / "m.onnx", text, random.normal(0, 0.4, (6, 6, 4)))
    samples = random.normal(0, 1, (3, 1, 6, 8)).astype(np.float32)
    program, inputs = program_of(tmp_path / "m.onnx", [{"x": sample} for sample in samples])
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    assert len({(layer.tensor, layer.order.tobytes()) for layer in bundle.layers}) == len(bundle.layers)
    done("make", "-s", "host", STRICT, folder=bundle.directory)
    run_all_modes(bundle, program, inputs, "net-host")


def test_products_of_rows(tmp_path: Path) -> None:
    """Products of rows match the simulator with activations, factors, a scalar bias and a sum between them."""
    need("gcc", "make")
    random = np.random.default_rng(0)
    text = """g (float[1, 5, 6] x) => (float[1, 5, 6] y)
        <int64[2] rows = {-1, 6}, int64[3] back = {1, 5, 6}, float half = {0.5}> {
        [flat] a = Reshape (x, rows)
        [first] b = Gemm <alpha = 0.5, beta = 2.0> (a, w, half)
        [relu] c = Relu (b)
        [second] d = MatMul (c, w)
        [added] e = Add (d, half)
        [sum] f = Add (e, c)
        [relu2] h = Relu (f)
        [back] y = Reshape (h, back)
    }"""
    save(tmp_path / "m.onnx", text, random.normal(0, 0.4, (6, 6)))
    samples = random.normal(0, 1, (3, 1, 5, 6)).astype(np.float32)
    program, inputs = program_of(tmp_path / "m.onnx", [{"x": sample} for sample in samples])
    assert not any(isinstance(step, Float) for step in program.steps)
    bundle = write_c_bundle(program, inputs, tmp_path / "c")
    done("make", "-s", "host", STRICT, folder=bundle.directory)
    run_all_modes(bundle, program, inputs, "net-host")


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    program, inputs = chain(tmp_path, "Relu")
    with pytest.raises(UsageError, match="1999"):
        write_c_bundle(program, inputs, tmp_path / "c", generation="1999")  # type: ignore[arg-type]
    with pytest.raises(DataError):
        write_c_bundle(program, {"x": np.zeros((0, 3, 6, 6), np.float32)}, tmp_path / "c")
    with pytest.raises(DataError):
        write_c_bundle(program, {"x": np.zeros((1, 3, 5, 5), np.float32)}, tmp_path / "c")


def test_slices_and_groups_go_to_the_array_in_2023_and_by_products_in_2021(tmp_path: Path) -> None:
    for seed in range(40):
        program, inputs = random_program(seed, tmp_path / "m", SMALL)
        if any(isinstance(s, Conv) and len(s.tiles) > 1 and s.strides[0] == s.strides[1] for s in program.steps):
            break
    texts = {}
    for generation in ("2021", "2023"):
        bundle = write_c_bundle(program, inputs, tmp_path / generation, generation=generation)  # type: ignore[arg-type]
        texts[generation] = (bundle.directory / "params.h").read_text()
    assert texts["2023"].count(".direct = true") > texts["2021"].count(".direct = true")
    assert ".in_dim = " in texts["2021"]
    assert ".in_row_dim = " in texts["2023"]
