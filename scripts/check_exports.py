"""Quantize exports of torchvision, timm and transformers at one size, and run the files at other sizes.

The script needs PyTorch and the three libraries, which edgeq itself does not need:

    pip install torch torchvision timm transformers onnxscript
    python scripts/check_exports.py            # all ten, for this machine
    python scripts/check_exports.py swin -t nvidia-t4

Weights are random, and nothing is downloaded. Both exporters of torch.onnx export each model with a free batch. If the
model has no table of positions, the height and width (or the length) are also free. The exit code is 1 if, at a size
that its source accepts, a file fails or gives a different shape. A model that edgeq refuses does not count as a
failure.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
import transformers
from torch import nn

import edgeq
from edgeq.errors import EdgeqError
from edgeq.run.session import open_session

Sizes = tuple[int, ...]
TOKENS = 200
EXPORTED = 2
"""The batch of the example inputs. Exporters would turn a size of one into a constant."""


class First(nn.Module):
    """Wrap a model of transformers. The wrapper takes inputs by position and returns the model's first output."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, one: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        """Run the model, with its inputs passed by name."""
        given = {name: value for name, value in zip(self.names, (one, other), strict=False) if value is not None}
        return self.model(**given, return_dict=False)[0]


def swin() -> nn.Module:
    """Make a Swin model. It uses windows of size 7 on images of any size, and pads, shifts and cuts these images."""
    return torchvision.models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [7, 7], num_classes=10)


def segformer() -> nn.Module:
    """Make a SegFormer model. It has attention over fewer keys than queries, and a decoder that resizes."""
    sizes = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16, "num_labels": 5}
    return First(transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes)), "pixel_values")


def text(kind: str, **sizes: int) -> nn.Module:
    """Make a language model of 32 channels."""
    config = getattr(transformers, f"{kind}Config")(vocab_size=TOKENS, attn_implementation="eager", **sizes)
    return First(getattr(transformers, f"{kind}Model")(config), "input_ids", "attention_mask")


IMAGES: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), 64, True),
    "mobilenet_v3_small": (lambda: torchvision.models.mobilenet_v3_small(num_classes=10), 64, True),
    "swin": (swin, 112, True),
    "vit": (lambda: torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=10), 64, False),
    "convnext_atto": (lambda: timm.create_model("convnext_atto", num_classes=10), 64, True),
    "poolformer_s12": (lambda: timm.create_model("poolformer_s12", num_classes=10), 64, True),
    "segformer": (segformer, 64, True),
}
"""Name → (function that makes the model, side length of its images, whether other sizes are allowed)."""
TEXTS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: text("Bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64),
    "distilbert": lambda: text("DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "gpt2": lambda: text("GPT2", n_embd=32, n_layer=2, n_head=2, n_positions=64),
}


def inputs(name: str, batch: int, sizes: Sizes, seed: int = 0) -> dict[str, Any]:
    """Return random inputs for a model, keyed by name."""
    random = np.random.default_rng(seed)
    if name in TEXTS:
        tokens = random.integers(0, TOKENS, (batch, *sizes))
        return {"ids": tokens, "mask": np.ones_like(tokens)}
    return {"x": random.normal(size=(batch, 3, *sizes)).astype(np.float32)}


def export(name: str, path: Path, sizes: Sizes, *, dynamo: bool) -> None:
    """Export a model in evaluation mode, with its free sizes."""
    torch.manual_seed(0)
    made, _, free = IMAGES[name] if name in IMAGES else (TEXTS[name], 0, True)
    model = made().eval()
    for weight in model.parameters():
        if not weight.any():
            nn.init.normal_(weight, std=0.1)
    example = {key: torch.from_numpy(value) for key, value in inputs(name, EXPORTED, sizes).items()}
    axes = (0, *range(4 - len(sizes), 4)) if name in IMAGES else (0, 1)
    kept = {axis: f"d{axis}" for axis in (axes if free else (0,))}
    settings: dict[str, Any] = {"input_names": list(example), "output_names": ["y"], "dynamo": dynamo}
    if dynamo:
        dims = tuple(dict.fromkeys(kept, torch.export.Dim.DYNAMIC) for _ in example)
        settings |= {"dynamic_shapes": dims, "verbose": False}
    else:
        settings |= {"dynamic_axes": dict.fromkeys(example, kept), "opset_version": 17}
    torch.onnx.export(model, tuple(example.values()), str(path), **settings)


def results(name: str, folder: Path, target: str, *, dynamo: bool) -> Iterator[str]:
    """Yield one text for each size, which contains the SQNR in decibels or the failure."""
    side = IMAGES[name][1] if name in IMAGES else 0
    sizes: Sizes = (side, side) if side else (16,)
    source, output = folder / "model.onnx", folder / "int8.onnx"
    export(name, source, sizes, dynamo=dynamo)
    try:
        edgeq.quantize(
            source, [inputs(name, 1, sizes, seed) for seed in range(8)], output, target=target, timed=False,
            emulate=False, force=True,
        )  # fmt: skip
    except EdgeqError as error:
        yield f"refused: {error}" + (" FAILED: written" if output.exists() else "")
        return
    before, after = open_session(source), open_session(output)
    for batch, others in (
        (1, sizes),
        (2, sizes),
        (1, tuple(s * 3 // 2 for s in sizes)),
        (3, tuple(s - 3 for s in sizes)),
    ):
        given = inputs(name, batch, others, seed=99)
        where = "×".join(map(str, (batch, *others)))
        try:
            wanted = before.run(None, given)[0]
        except Exception:  # onnxruntime raises a dozen unrelated exception types here
            yield f"{where} refused by the source"
            continue
        try:
            found = after.run(None, given)[0]
        except Exception as error:
            yield f"{where} FAILED: {' '.join(str(error).split())[:200]}"
            continue
        noise = float(np.square(wanted - found).sum()) if wanted.shape == found.shape else -1.0
        yield (
            f"{where} FAILED: {found.shape}"
            if noise < 0
            else f"{where} {10 * np.log10(np.square(wanted).sum() / noise):.1f} dB"
        )


def main() -> int:
    """Print one line for each export, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [*IMAGES, *TEXTS]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"models to check, of {', '.join(known)} (default: all)"
    )
    parser.add_argument("-t", "--target", default="auto", help="target of the quantization")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    failed = False
    for name in given.names or known:
        for dynamo in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                line = "; ".join(results(name, Path(folder), given.target, dynamo=dynamo))
            failed |= "FAILED" in line
            sys.stdout.write(f"{name}, {'torch.export' if dynamo else 'legacy'}: {line}\n")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
