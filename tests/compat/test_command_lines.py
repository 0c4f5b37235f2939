"""Every command line in the older tools' documents runs as written, or ends in one line with the command to type.

A case is the document, the line, and for a refused line the part of the message to type. Paths in the line are
shortened to the files of the fixture.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper
from PIL import Image

from edgeq.compat import static_quantize_runner
from tests.cli import process
from tests.graphs import proto

IMAGES, SIDE, CLASSES = 3, 224, 5
# The program in a document → the module of edgeq.compat that replaces it.
MODULES = {
    "calibrate.py": "calibrate",
    "optimize.py": "optimize",
    "onnxruntime.quantization.preprocess": "preprocess",
    "symbolic_shape_infer.py": "symbolic_shape_infer",
    "run.py": "run",
    "run_qdq.py": "run",
    "run_qdq_debug.py": "run_qdq_debug",
    "run_local.sh": "mlperf",
    "run_and_time.sh": "mlperf",
    "main.py": "mlperf",
}
README_2019, README_2020 = "quantization README, 2019", "quantization README, 2020"
FORK, FORK_RUNNER = "systolic_runner/quantization/README.md", "systolic_runner/imagenet_runner/README.md"
EXAMPLE, GPT2 = "image_classification/cpu/ReadMe.md", "language_model/gpt2/ReadMe.md"
MLPERF = "vision/classification_and_detection/README.md"
CASES: list[tuple[str, str, str]] = [
    (README_2019, "calibrate.py --model_path=model.onnx --dataset_path=images --calib_mode='naive'", ""),
    (README_2019, "calibrate.py --model_path=model.onnx --dataset_path=tensors.pb --calib_mode='naive'", ""),
    (
        README_2019,
        "calibrate.py --model_path=model.onnx --dataset_path=images --calib_mode='naive'"
        " --data_preprocess=preprocess_method1",
        "",
    ),
    (
        README_2020,
        "calibrate.py --model_path=model.onnx --output_model_path=o.onnx --dataset_path=images"
        " --data_preprocess=preprocess_method2",
        "",
    ),
    (
        README_2020,
        "calibrate.py --model_path=model.onnx --output_model_path=o.onnx --dataset_path=tensors.pb"
        " --data_preprocess=None",
        "",
    ),
    (
        f"{README_2020}: custom preprocessing",
        "calibrate.py --model_path=model.onnx --output_model_path=o.onnx --dataset_path=images"
        " --data_preprocess=my_method",
        "--data_preprocess=data_preprocess.py:my_method",
    ),
    (
        f"{README_2020}: what that says to type",
        "calibrate.py --model_path=model.onnx --output_model_path=o.onnx --dataset_path=images"
        " --data_preprocess=data_preprocess.py:my_method",
        "",
    ),
    (
        f"{README_2020}: options of April",
        "calibrate.py --model_path=model.onnx --dataset_path=images --data_preprocess=preprocess_method2"
        " --force_fusions True --op_types Conv,MatMul --black_nodes fc --white_nodes conv --augmented_model_path=a",
        "",
    ),
    (
        FORK,
        "calibrate.py --model_path $MODEL/model.onnx --dataset_path $MODEL --output_model_path $MODEL/q.onnx"
        " --static=True --data_preprocess=caffe2 --mode=int8",
        "",
    ),
    (FORK_RUNNER, "optimize.py --input=$MODEL/model.onnx --output=$MODEL/model_opt.onnx", ""),
    (FORK_RUNNER, "optimize.py --input=$MODEL/model.onnx --output=$MODEL/model_opt.onnx --replace_gemm=True", ""),
    (
        FORK_RUNNER,
        "calibrate.py --model_path $MODEL/model.onnx --dataset_path $MODEL --output_model_path $MODEL/q.onnx"
        " --static=True --data_preprocess=mxnet --mode=int8",
        "",
    ),
    (
        "systolic_runner/rcnn_runner/README.md",
        "calibrate.py --model_path $MODEL/chw.onnx --dataset_path images --output_model_path $MODEL/q.onnx"
        " --static=True --data_preprocess=rcnn --mode=int",
        "Export the model with batch 1",
    ),
    (
        "systolic_runner/bert_mask_runner/README.md",
        "calibrate.py --model_path $MODEL/model.onnx --dataset_path $MODEL --static=True --data_preprocess=None"
        " --mode=uint8",
        "",
    ),
    (EXAMPLE, "onnxruntime.quantization.preprocess --input model.onnx --output infer.onnx", ""),
    (
        EXAMPLE,
        "onnxruntime.quantization.preprocess --input model.onnx --output infer.onnx --skip_symbolic_shape True",
        "",
    ),
    (EXAMPLE, "onnxruntime.quantization.preprocess --help", ""),
    (EXAMPLE, "run.py --input_model model.onnx --output_model quant.onnx --calibrate_dataset ./images/", ""),
    (EXAMPLE, "run_qdq_debug.py --float_model model.onnx --qdq_model qdq.onnx --calibrate_dataset ./images/", ""),
    (GPT2, "run_qdq.py --input_model model.onnx --output_model quant.onnx --calibrate_dataset ./tensors.pb", ""),
    (
        "execution-providers/TensorRT",
        "symbolic_shape_infer.py --input model.onnx --output o.onnx --auto_merge",
        "",
    ),
    (README_2020, "run_local.sh onnxruntime resnet50 --accuracy --count 5000", ""),
    (MLPERF, "run_local.sh onnxruntime mobilenet cpu --accuracy", ""),
    (MLPERF, "run_local.sh onnxruntime resnet50 gpu --accuracy", "onnxruntime resnet50 cpu"),
    (MLPERF, "run_local.sh onnxruntime resnet50 --scenario SingleStream,Offline", "--scenario SingleStream"),
    (MLPERF, "run_local.sh onnxruntime resnet50 --scenario Server --max-latency 0.01,0.05,0.1", "--max-latency 0.01"),
    (
        MLPERF,
        "run_local.sh tf resnet50 gpu --count 100 --time 60 --scenario Server --qps 200 --max-latency 0.1",
        "onnxruntime resnet50 cpu",
    ),
    (
        MLPERF,
        "run_local.sh onnxruntime retinanet gpu --accuracy --time 60 --scenario Server --qps 100 --max-latency 0.2",
        "onnxruntime retinanet cpu",
    ),
    (
        f"{MLPERF}: what that says to type",
        "run_local.sh onnxruntime retinanet cpu --accuracy --time 60",
        "--preprocess (`edgeq preprocess list`), --decoder",
    ),
    (MLPERF, "run_and_time.sh tf resnet50 gpu", "onnxruntime resnet50 cpu"),
    (
        f"{MLPERF}: as its automation calls it",
        "run_local.sh onnxruntime resnet50 cpu --scenario SingleStream --threads 1 --mlperf_conf mlperf.conf"
        " --user_conf user.conf --time 0 --count 1",
        "",
    ),
    (
        MLPERF,
        "main.py --profile resnet50-onnxruntime --model model.onnx --dataset-path imagenet --accuracy --count 2"
        " --dataset imagenet --backend onnxruntime --output output",
        "",
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what the documents' lines name: models, images with labels, tensors, and a user's own preprocessing."""
    folder = tmp_path_factory.mktemp("documents")
    random = np.random.default_rng(0)
    body = """g (float[{0}3, {1}, {1}] x) => (float[N, {2}] y) <int64[1] lead = {{0}}, int64[2] flat = {{-1, 4}}> {{
        {3}
        [conv] c = Conv <kernel_shape = [8, 8], strides = [8, 8]> ({4}, w)
        [relu] r = Relu (c)
        [pool] p = GlobalAveragePool (r)
        [flatten] f = Reshape (p, flat)
        [fc] y = MatMul (f, v)
    }}"""
    weights = {"w": random.normal(0, 0.1, (4, 3, 8, 8)), "v": random.normal(0, 1, (4, CLASSES))}

    def save(path: Path, lead: str, expand: str, read: str) -> None:
        model = proto(body.format(lead, SIDE, CLASSES, expand, read), opset=13, ir_version=7)
        model.graph.initializer.extend(numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items())
        onnx.save(model, path)

    zoo = folder / "zoo"
    zoo.mkdir()
    for name in ("model.onnx", "resnet50_v1.onnx", "mobilenet_v1_1.0_224.onnx", "resnext50_32x4d_fpn.onnx"):
        save(zoo / name, "N, ", "", "x")
    save(folder / "model.onnx", "N, ", "", "x")
    save(zoo / "chw.onnx", "", "b = Unsqueeze (x, lead)", "b")
    stack = random.uniform(0, 255, (2, 3, SIDE, SIDE)).astype(np.float32)
    (folder / "tensors.pb").write_bytes(numpy_helper.from_array(stack).SerializeToString())
    case = zoo / "test_data_set_0"
    case.mkdir()
    (case / "input_0.pb").write_bytes(numpy_helper.from_array(stack[:1]).SerializeToString())
    images = folder / "images"
    images.mkdir()
    for index in range(IMAGES):
        Image.fromarray(random.integers(0, 256, (60, 80, 3)).astype(np.uint8)).save(images / f"{index}.jpg")
    labelled = folder / "imagenet"
    shutil.copytree(images, labelled)
    (labelled / "val_map.txt").write_text("".join(f"{index}.jpg {index}\n" for index in range(IMAGES)))
    (folder / "data_preprocess.py").write_text(
        "import numpy as np\nfrom PIL import Image\n\n\n"
        "def my_method(image_filepath, height, width):\n"
        "    image = Image.open(image_filepath).resize((width, height))\n"
        "    return np.float32(image).transpose(2, 0, 1)[None]\n"
    )
    return folder


@pytest.fixture
def workdir(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(files)
    monkeypatch.setenv("MODEL_DIR", str(files / "zoo"))
    monkeypatch.setenv("DATA_DIR", str(files / "imagenet"))
    return files


def typed(line: str) -> Result:
    program, *arguments = shlex.split(line.replace("$MODEL", "zoo"))
    module = importlib.import_module(f"edgeq.compat.{MODULES[program]}")
    return CliRunner().invoke(module.command, arguments)


@pytest.mark.parametrize(("document", "line", "refused"), CASES, ids=[f"{d}: {line}" for d, line, _ in CASES])
def test_runs_as_written_or_says_what_to_type(workdir: Path, document: str, line: str, refused: str) -> None:
    if "run_qdq_debug" in line:
        assert not typed("run.py --input_model model.onnx --output_model qdq.onnx --calibrate_dataset images").exit_code
    result = typed(line)
    if not refused:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code in (2, 3)
    assert refused in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("edgeq: ")


def test_reports_assumed_options(workdir: Path) -> None:
    result = typed("calibrate.py --model_path=model.onnx --dataset_path=images --calib_mode='naive'")
    assert "--data_preprocess=preprocess_method2" in result.stdout
    assert "--static=True --mode=int8" in result.stdout
    made = onnx.load("calibrated_quantized_model.onnx")
    assert {"QLinearConv", "QLinearMatMul"} <= {node.op_type for node in made.graph.node}
    zero_points = {t.data_type for t in made.graph.initializer if t.name.endswith("zero_point")}
    assert zero_points == {onnx.TensorProto.UINT8}


def test_a_function_of_the_older_form_gets_the_model_s_size(workdir: Path) -> None:
    """A function gets height and width by the names of its arguments. The documents have both orders."""
    lines = (
        "def {0}(path, {1}, {2}):",
        "    import numpy as np",
        "    assert (height, width) == (6, 4), (height, width)",
    )
    done = "    return np.ones((1, 3, height, width), np.float32)"
    orders = {"high": ("height", "width"), "wide": ("width", "height")}
    (workdir / "own.py").write_text(
        "".join("\n".join([*lines, done, ""]).format(name, *sizes) for name, sizes in orders.items())
    )
    model = proto("g (float[1, 3, 6, 4] x) => (float[1, 2, 6, 4] y) { [conv] y = Conv (x, w) }", opset=13)
    kernel = np.ones((2, 3, 1, 1), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(kernel, "w"))
    onnx.save(model, "oblong.onnx")
    for name in orders:
        line = f"calibrate.py --model_path oblong.onnx --dataset_path images --data_preprocess own.py:{name}"
        result = typed(line)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("module", sorted({*MODULES.values(), "detector", "optimizer"}))
def test_a_wrong_option_ends_in_one_line(module: str) -> None:
    command = importlib.import_module(f"edgeq.compat.{module}").command
    result = CliRunner().invoke(command, ["--nonsense=1"] if module != "optimizer" else [])
    assert result.exit_code == 2
    assert result.stderr.startswith("edgeq: ")
    assert result.stderr.count("\n") == 1


def test_the_runner_s_wrong_options_end_in_one_line(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["runner", "-i", "model.onnx"])
    with pytest.raises(SystemExit) as ended:
        static_quantize_runner.main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "-o" in printed


def test_the_folders_of_run_local_are_named_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL_DIR", raising=False)
    result = typed("run_local.sh onnxruntime resnet50 --accuracy")
    assert result.exit_code == 2
    assert "export MODEL_DIR=FOLDER" in result.stderr


def test_no_module_of_a_command_line_loads_onnxruntime_before_its_process_forks() -> None:
    folder = Path(static_quantize_runner.__file__).parent
    modules = [file.stem for file in folder.glob("*.py") if "run_program(" in file.read_text("utf-8")]
    modules.remove("_command")
    lines = [f"import edgeq.compat.{name}; assert 'onnxruntime' not in sys.modules, '{name}'" for name in modules]
    subprocess.run(
        [sys.executable, "-P", "-c", "\n".join(["import sys", *lines])], check=True, env=process.environment()
    )
    started = [file.stem for file in folder.glob("*.py") if "__main__" in file.read_text("utf-8")]
    assert sorted(started) == sorted(modules)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="commands work under limits where there is fork")
def test_a_command_line_works_under_limits(tmp_path: Path) -> None:
    doubled = " ".join(f"s{i + 1} = Concat<axis = 0>(s{i}, s{i})" for i in range(34))
    onnx.save(
        proto(f"g (float[1] x) => (float[] y) <int64[1] s0 = {{1}}> {{ {doubled} y = Expand(x, s34) }}"),
        tmp_path / "m.onnx",
    )
    for budget, code, says in (("memory=much", 2, "EDGEQ_BUDGET"), ("", 3, "tensor 's26' has the shape")):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "edgeq.compat.symbolic_shape_infer", "--input", "m.onnx"],
            cwd=tmp_path,
            env=process.environment(EDGEQ_BUDGET=budget),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert says in done.stderr
