"""Train the demo model and write the content of `edgeq/demo/`: the model, two sets of samples, provenance.json.

The script needs torch and scikit-learn, which edgeq itself does not need:

    pip install torch scikit-learn onnx numpy
    python scripts/train_demo.py

The data are the UCI "Optical Recognition of Handwritten Digits" images that come with scikit-learn: 1797 digits of 8×8
pixels with values 0 to 16. They are enlarged to 16×16 by bilinear interpolation and divided by 16, so the model takes
float32 [N, 1, 16, 16] with values between 0 and 1.

The network has the two structures on which quantization schemes differ most: a residual addition (an activation with
two consumers) and depthwise convolutions (weight ranges that differ by channel). BatchNormalization stays unfolded in
the exported file, as with most exporters.

The seed and the thread count are fixed, so the same torch on the same CPU gives the same weights. Another CPU may round
differently. The shipped files are therefore the reference, and `provenance.json` records their measured accuracy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import sklearn
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional

DEMO = Path(__file__).resolve().parent.parent / "edgeq" / "demo"
SEED = 0
SIZE = 16
VALIDATION = 540
CALIBRATION = 128
EPOCHS = 40
BATCH = 64

# name: (input channels, output channels, kernel, stride, groups, Relu after BatchNormalization)
CONVOLUTIONS = {
    "stem": (1, 64, 3, 1, 1, True),
    "residual1": (64, 64, 3, 1, 1, True),
    "residual2": (64, 64, 3, 1, 1, False),
    "depthwise1": (64, 64, 3, 1, 64, True),
    "pointwise1": (64, 128, 1, 1, 1, True),
    "depthwise2": (128, 128, 3, 2, 128, True),
    "pointwise2": (128, 128, 1, 1, 1, True),
}
CLASSES = 10


class Network(nn.Module):
    """Define the network: stem → x + residual2(residual1(x)) → two depthwise-separable blocks → global average →
    linear.
    """

    def __init__(self) -> None:
        super().__init__()
        for name, (inputs, outputs, kernel, stride, groups, _) in CONVOLUTIONS.items():
            self.add_module(name, nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False))
            self.add_module(f"{name}_norm", nn.BatchNorm2d(outputs))
        self.classifier = nn.Linear(CONVOLUTIONS["pointwise2"][1], CLASSES)

    def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = self.get_submodule(f"{name}_norm")(self.get_submodule(name)(x))
        return functional.relu(x) if CONVOLUTIONS[name][5] else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block("stem", x)
        x = functional.relu(x + self.block("residual2", self.block("residual1", x)))
        for name in ("depthwise1", "pointwise1", "depthwise2", "pointwise2"):
            x = self.block(name, x)
        return self.classifier(x.mean(dim=(2, 3)))


def digits() -> dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Return the images [N, 1, 16, 16] and labels [N] of "train", "calibration" (a part of train) and "validation"."""
    bunch = load_digits()
    small = torch.from_numpy(bunch.images.astype(np.float32)[:, None])
    x = (functional.interpolate(small, (SIZE, SIZE), mode="bilinear", align_corners=False) / 16).numpy()
    y = bunch.target.astype(np.int64)
    train, validation = train_test_split(np.arange(len(y)), test_size=VALIDATION, random_state=SEED, stratify=y)
    _, calibration = train_test_split(train, test_size=CALIBRATION, random_state=SEED, stratify=y[train])
    parts = {"train": train, "calibration": calibration, "validation": validation}
    return {name: (x[np.sort(rows)], y[np.sort(rows)]) for name, rows in parts.items()}


def jitter(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Apply a small random rotation, scaling and shift to each image, because there are only 1257 digits."""
    n = len(x)
    angle = (torch.rand(n, generator=generator) - 0.5) * 0.4
    zoom = 1 + (torch.rand(n, generator=generator) - 0.5) * 0.2
    shift = (torch.rand(n, 2, generator=generator) - 0.5) * 0.25
    matrix = torch.stack(
        [
            torch.stack([zoom * angle.cos(), -zoom * angle.sin(), shift[:, 0]], dim=1),
            torch.stack([zoom * angle.sin(), zoom * angle.cos(), shift[:, 1]], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(matrix, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def train(x: NDArray[np.float32], y: NDArray[np.int64]) -> Network:
    """Return the trained network for images `x` [N, 1, 16, 16] and labels `y` [N]."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(SEED)
    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    steps = EPOCHS * math.ceil(len(y) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        network.train()
        total = 0.0
        for rows in torch.randperm(len(y), generator=generator).split(BATCH):
            optimizer.zero_grad()
            logits = network(jitter(images[rows], generator))
            loss = functional.cross_entropy(logits, labels[rows], label_smoothing=0.05)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(rows)
        print(f"epoch {epoch + 1}/{EPOCHS}: loss {total / len(y):.4f}")
    return network.eval()


def to_onnx(weights: Mapping[str, NDArray[np.float32]]) -> onnx.ModelProto:
    """Return the network as an ONNX model of opset 17. The graph is written by hand, because seven convolutions need no
    exporter.
    """
    nodes: list[onnx.NodeProto] = []
    used: list[str] = []

    def node(op_type: str, name: str, inputs: list[str], output: str, **attributes: object) -> str:
        used.extend(i for i in inputs if i in weights)
        nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        return output

    def block(name: str, x: str) -> str:
        _, _, kernel, stride, groups, relu = CONVOLUTIONS[name]
        x = node(
            "Conv",
            name,
            [x, f"{name}.weight"],
            f"{name}_conv",
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=groups,
        )
        norm = f"{name}_norm"
        parameters = [f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        x = node("BatchNormalization", norm, [x, *parameters], f"{norm}_out", epsilon=1e-5)
        return node("Relu", f"{name}_relu", [x], f"{name}_out") if relu else x

    x = block("stem", "image")
    branch = block("residual2", block("residual1", x))
    x = node("Relu", "residual_relu", [node("Add", "residual_add", [x, branch], "residual_sum")], "residual_out")
    for name in ("depthwise1", "pointwise1", "depthwise2", "pointwise2"):
        x = block(name, x)
    x = node("Flatten", "flatten", [node("GlobalAveragePool", "pool", [x], "pool_out")], "features")
    node("Gemm", "classifier", [x, "classifier.weight", "classifier.bias"], "logits", transB=1)
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, SIZE, SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(weights[name], name) for name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="edgeq train_demo")
    model.ir_version = 8  # the IR version that came with opset 17; older runtimes also read it
    onnx.checker.check_model(model, full_check=True)
    return model


def accuracy(network: Network, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    """Return the share of images that the network classifies correctly."""
    with torch.no_grad():
        return float((network(torch.from_numpy(x)).numpy().argmax(axis=1) == y).mean())


def main() -> None:
    """Train the network and write its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=DEMO, help="folder for the files (default: edgeq/demo)")
    output: Path = parser.parse_args().output
    data = digits()
    network = train(*data["train"])
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    output.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx(weights), output / "model.onnx")
    for name in ("calibration", "validation"):
        x, y = data[name]
        np.savez_compressed(output / f"{name}.npz", image=x, label=y.astype(np.uint8))
    provenance = {
        "data": {
            "name": "Optical Recognition of Handwritten Digits (UCI), as distributed with scikit-learn",
            "authors": "E. Alpaydin, C. Kaynak",
            "doi": "10.24432/C50P49",
            "licence": "CC BY 4.0",
            "images": sum(len(data[name][1]) for name in ("train", "validation")),
        },
        "preprocessing": "8×8 values 0..16, bilinear (half-pixel centres) to 16×16, divided by 16; stored already done",
        "split": {
            "seed": SEED,
            "stratified": True,
            **{name: len(y) for name, (_, y) in data.items()},
            "note": "calibration is a part of train; validation is held out; writers are not separated",
        },
        "training": {
            "script": "scripts/train_demo.py",
            "seed": SEED,
            "epochs": EPOCHS,
            "torch": torch.__version__,
            "scikit-learn": sklearn.__version__,
        },
        "float32": {"metric": "top1", "validation": round(accuracy(network, *data["validation"]), 6)},
        "sha256": {
            name: hashlib.sha256((output / name).read_bytes()).hexdigest()
            for name in ("calibration.npz", "model.onnx", "validation.npz")
        },
    }
    (output / "provenance.json").write_text(json.dumps(provenance, indent=2, ensure_ascii=False) + "\n", "utf-8")
    print(f"train {accuracy(network, *data['train']):.4f}, validation {provenance['float32']['validation']:.4f}")


if __name__ == "__main__":
    main()
