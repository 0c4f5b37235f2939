"""List the lines of the pages that are not run as they are, with the reasons.

The list is exact: a test fails for a line that no page contains. Other tests check the listed lines: `edgeq` lines with
the command's parser, scripts and benchmarks by their existence, extras of `pip install` with pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

CHECKOUT = "makes an environment in the checkout, from a package index; CI runs it"
INDEX = "installs from a package index"
MINUTES = "takes many minutes, and models and data next to the checkout"
REGISTRY = "needs a registry: tests/bundle/oci"
REFERENCE = "needs the reference package: tests/bundle/signing/test_reference.py"
CERTIFICATES = "needs certificates: tests/bundle/signing/test_sign.py"
ENGINE = "needs the package of the engine: tests/run/test_engine.py"
LITERT = "needs the packages of LiteRT: tests/backends/litert"
NCNN = "needs the package ncnn, and its ARM kernels under qemu: tests/backends/ncnn, tests/emulate/test_ncnn_kernels.py"
GPU = "needs an NVIDIA GPU: tests/gpu"
NPU = "needs onnxruntime-qnn, and minutes in its simulator: tests/backends/qnn"
WEB = "needs node and the package onnxruntime-web: tests/backends/web"
RKNN = "needs Rockchip's compiler: tests/backends/rknn"
DASK = "starts processes of Dask: tests/distributed"
BOARD = "needs an ARM64 machine: tests/emulate/test_arm64.py does this where there is one"
SSH = "needs a board: tests/remote does this through a stand-in for ssh, and with sshd where it is installed"

ON_DEVICE = "is typed on a board, in a bundle's folder; other pages run the same in dist/"
FINDS = "needs a model that finds something in a photo: tests/jobs/test_infer.py"
YOLO = "needs a model of ultralytics"
ESP_IDF = "needs ESP-IDF and a chip"

NOT_RUN: Mapping[str, str] = {
    "scripts/quickstart": CHECKOUT,
    "scripts/test": CHECKOUT,
    "pip install .[cpu]": INDEX,
    "pip install .[cpu,openvino]": INDEX,
    "edgeq bench int8.onnx --engine onnxruntime --engine openvino": ENGINE,
    "edgeq eval model.onnx --data val/ --reference model.onnx --engine openvino:bf16": ENGINE,
    "edgeq quantize model.onnx --data calib/ --engine openvino -o int8.onnx": ENGINE,
    "edgeq package model.onnx --data calib/ --engine openvino -o dist/": ENGINE,
    "python -m pip uninstall onnxruntime && python -m pip install onnxruntime-gpu[cuda,cudnn]": INDEX,
    "pip install .[cpu,litert]": INDEX,
    "pip install .[cpu,litert,ethos-u]": INDEX,
    "edgeq bench int8.onnx --engine onnxruntime --engine litert": LITERT,
    "edgeq package model.onnx --data calib/ --engine litert -o dist/": LITERT,
    "edgeq quantize model.onnx --data calib/ -t android-xnnpack -o model.tflite": LITERT,
    "edgeq package model.onnx --data calib/ -t raspberry-pi-5-litert -t cortex-m7 -o dist/": LITERT,
    "edgeq verify dist/ --on all": LITERT,
    "edgeq quantize model.onnx --data calib/ -t stm32mp25 -o model.tflite": LITERT,
    "edgeq inspect model.onnx -t imx95": LITERT,
    "edgeq eval model.tflite --data val/ --task classification": LITERT,
    "edgeq package model.onnx --data calib/ --fix N=1 -t cortex-m7 -o dist/": LITERT,
    "edgeq package model.onnx --data calib/ --fix N=1 -t ethos-u55-128 -o npu/": LITERT,
    "edgeq package model.onnx --data calib/ --fix N=1 -t ethos-u55-128 --json | jq .variants[].estimate": LITERT,
    "pip install .[cpu,ncnn]": INDEX,
    "pip install .[gpu] --extra-index-url NVIDIA_INDEX": INDEX,
    "edgeq tune digits/model.onnx --data digits/calibration.npz --val digits/validation.npz --task classification "
    "-o digits-tuned/": "takes a minute, and shows a busy machine: tests/tuning",
    "edgeq package yolo11n.onnx --data images/ -o dist/": YOLO,
    "edgeq package yolo11n-seg.onnx --data photos/ -o dist/": YOLO,
    "edgeq inspect yolo11n-seg.onnx": YOLO,
    "python dist/edgeq_run.py infer photo.jpg --draw photo.png": FINDS,
    "python dist/edgeq_run.py infer photo.jpg --draw found.svg": FINDS,
    "python dist/edgeq_run.py infer photo.jpg --draw found.png": FINDS,
    "python edgeq_run.py verify": ON_DEVICE,
    "python edgeq_run.py bench": ON_DEVICE,
    "cd dist/files/esp32-s3/esp-idf": ESP_IDF,
    "idf.py set-target esp32s3": ESP_IDF,
    "idf.py flash monitor | tee serial.txt": ESP_IDF,
    "edgeq verify dist/ --log serial.txt": ESP_IDF,
    "edgeq run recipe.toml --allow-code --allow-outputs /srv/bundles": "needs folders outside the recipe's",
    "edgeq quantize digits/model.onnx --data digits/calibration.npz --fix N=1 -t cortex-m7 -o m7.tflite": LITERT,
    "edgeq inspect decoder.onnx -t imx95": LITERT,
    "edgeq quantize digits/model.onnx --data digits/calibration.npz -t genio-700 --per-channel -o g700.tflite": LITERT,
    "edgeq quantize resnet20.onnx --data calib/ -t raspberry-pi-5-ncnn -o resnet20.ncnn": NCNN,
    "edgeq bench model.onnx --engine onnxruntime --engine ncnn": NCNN,
    "edgeq package model.onnx --data calib/ -t raspberry-pi-5-ncnn -o dist/": NCNN,
    "edgeq package model.onnx --data calib/ -t raspberry-pi-5-ncnn --engine ncnn:f16 -o dist/": NCNN,
    "edgeq verify dist/ --on raspberry-pi-5-ncnn": NCNN,
    "edgeq quantize model.onnx --data calib/ -t raspberry-pi-5-ncnn -o model.ncnn": NCNN,
    "edgeq bench model.onnx --engine onnxruntime --engine cuda --engine cuda:tf32": GPU,
    "edgeq eval model.onnx --data val/ --reference model.onnx --engine cuda": GPU,
    "pip install .[cpu,qnn]": INDEX,
    "edgeq quantize model.onnx --data calib/ --fix N=1 -t snapdragon-8-gen-3 -o npu.onnx": NPU,
    "edgeq package model.onnx --data calib/ --fix N=1 -t snapdragon-8-gen-3 -t qcs6490 -o dist/": NPU,
    "edgeq verify dist/ --on snapdragon-8-gen-3 --data val/ --count 50": NPU,
    "edgeq eval npu.onnx --data val/ --reference model.onnx --engine qnn --count 50": NPU,
    "edgeq debug model.onnx npu.onnx --data calib/ --engine qnn": NPU,
    "edgeq tune model.onnx --data calib/ --val val/ --task classification --fix N=1 -t hexagon-v73 -o tuned/": NPU,
    "npm install --prefix ~/.cache/edgeq/npm --ignore-scripts onnxruntime-web@1.30.0": INDEX,
    "edgeq quantize model.onnx --data calib/ --val val/ --task classification -t web-wasm -o web.onnx": WEB,
    "edgeq tune model.onnx --data calib/ --val val/ --task classification -t web-wasm -o tuned/": WEB,
    "edgeq package model.onnx --data calib/ -t web-wasm -o dist/": WEB,
    "cp -r dist/files/web-wasm site && cd site && npm ci --ignore-scripts && npm start": WEB,
    "edgeq toolkit rknn --install": INDEX,
    "edgeq quantize model.onnx --data calib/ --fix N=1 -t rk3588 -o npu.onnx": RKNN,
    "edgeq package model.onnx --data calib/ --fix N=1 -t rk3588 -o dist/": RKNN,
    "edgeq verify dist/ --on rk3588": RKNN,
    "edgeq device setup ssh://rock@10.0.0.5": SSH,
    "edgeq doctor --on ssh://rock@10.0.0.5": SSH,
    "edgeq bench dist/ --on ssh://rock@10.0.0.5": SSH,
    "edgeq verify dist/ --on ssh://rock@10.0.0.5": SSH,
    "edgeq package detector.onnx --data calib/ --val val/ --task detection --decoder yolox --annotations "
    "instances_val.json --preprocess yolox.toml -t rk3588 -o dist/": RKNN,
    "edgeq verify dist/ --on rk3588 --data more/ --task detection --decoder yolox --annotations instances_more.json "
    "--count 64": RKNN,
    "pip install .[cpu,distributed]": INDEX,
    "edgeq calibrate collect model.onnx --data calib/ --preprocess imagenet -o CAL/ --workers 4": DASK,
    "edgeq eval model.onnx --data val/ --preprocess imagenet --task classification --workers tcp://10.0.0.1:8786": DASK,
    "edgeq package model.onnx --data calib/ --preprocess imagenet --val val/ -o dist/ --workers 4": DASK,
    "# collect.py": DASK,
    "scripts/benchmark nvidia": MINUTES,
    "scripts/benchmark tune": MINUTES,
    "scripts/benchmark thorough": MINUTES,
    "scripts/benchmark unlabelled": MINUTES,
    "scripts/benchmark halves": MINUTES,
    "scripts/benchmark engines": MINUTES,
    "scripts/benchmark engines --by-hand": MINUTES,
    "scripts/benchmark quantize": MINUTES,
    "scripts/benchmark tune --grid 0": MINUTES,
    "scripts/benchmark shapes": MINUTES,
    "scripts/benchmark sequence --tune": MINUTES,
    "edgeq push dist/ registry.example.com/models/net:1.2": REGISTRY,
    "edgeq pull registry.example.com/models/net@sha256:0123… -o dist/ --trust build.pub": REGISTRY,
    "python runner/edgeq_run.py pull registry.example.com/models/net@sha256:0123… -o dist/": REGISTRY,
    "model_signing verify key dist/ --signature dist/model.sig --public_key build.pub": REFERENCE,
    "model_signing sign key dist/ --signature dist/model.sig --private_key build.pem": REFERENCE,
    "edgeq sign dist/ --key build.pem --certificate build.crt --certificate issuer.crt": CERTIFICATES,
    "edgeq verify dist/ --trust root.crt": CERTIFICATES,
    "edgeq emulate setup arm64 --onnxruntime 1.26.0": "makes an ARM64 machine: tests/emulate/test_arm64.py",
    "edgeq emulate setup arm64": "makes an ARM64 machine from a distribution's packages: tests/emulate/test_arm64.py",
    "edgeq verify dist/ --on raspberry-pi-5 --data val/ --count 100 --task classification --max-drop 0.5pt": BOARD,
    "edgeq detect --on ssh://pi@10.0.0.5": SSH,
    "edgeq doctor --on ssh://pi@10.0.0.5": SSH,
    "edgeq device setup ssh://pi@10.0.0.5": SSH,
    "edgeq verify dist/ --on ssh://pi@10.0.0.5": SSH,
    "edgeq bench dist/ --on ssh://pi@10.0.0.5": SSH,
    "edgeq eval dist/ --data val/ --task classification --on ssh://pi@10.0.0.5": SSH,
    "edgeq tune model.onnx --data calib/ --on ssh://pi@10.0.0.5 -o for-the-board/": SSH,
    "edgeq gate new.edgeq --baseline old.edgeq --on ssh://pi@10.0.0.5": SSH,
    "edgeq gate new.edgeq --baseline baseline.edgeq --on ssh://pi@10.0.0.5": SSH,
    "edgeq device report ssh://pi@10.0.0.5": SSH,
    "edgeq device report ssh://pi@10.0.0.5 -o raspberry-pi-5.json": SSH,
    "edgeq device clean ssh://pi@10.0.0.5": SSH,
    "edgeq bench dist/ --on fleet.toml": SSH,
    "edgeq bench dist/ --on fleet.toml --json > fleet.json": SSH,
    "edgeq report dist/ --fleet fleet.json": SSH,
    "edgeq doctor --gpu": "needs a GPU: tests/gpu",
    "edgeq doctor --gpu --json": "needs a GPU: tests/gpu",
    "make -C c linux GEMMINI=../gemmini": "needs the headers and the compiler of the array",
    "make -C c qemu": "needs a compiler for riscv64: tests/backends/systolic/emit_c",
    "from edgeq.compat import YoloV3DataReader, YoloV3Evaluator": "needs 5000 images: tests/compat/test_detector.py",
}
"""Line, or first line of a Python block → why it cannot be run here."""

PACKAGES = {LITERT: ("ai_edge_litert", "tflite_micro")}
"""Reason → the packages with which the lines run nevertheless."""


def is_left_out(line: str) -> bool:
    """Return whether a line is not run here."""
    packages = PACKAGES.get(NOT_RUN.get(line, ""), ())
    return line in NOT_RUN and not (packages and all(map(find_spec, packages)))


MOBILENET = "shows MobileNet v1 0.25 on images of ImageNet, which the project does not contain"

NOT_COMPARED: Mapping[str, str] = {
    "edgeq eval model.onnx --data val/ --task classification --count 200 --try-preprocess": MOBILENET,
    "edgeq eval model.onnx --data val/ --preprocess tf-crop --task classification": MOBILENET,
    "edgeq quantize model.onnx --data calib/ --val val/ --preprocess tf-crop --task classification --max-drop 1pt "
    "-o int8.onnx": MOBILENET,
    "edgeq debug model.onnx tensor.onnx --data calib/ --preprocess tf-crop": MOBILENET,
}
"""Line → why the output on the page is not that of a run with a stand-in."""
