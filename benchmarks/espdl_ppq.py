"""Quantize a model with esp-ppq and its defaults, and run it in esp-ppq's own executor. `espdl.py` runs this file with
the Python of an environment that has esp-ppq, because esp-ppq needs PyTorch and an older onnx.

    python espdl_ppq.py MODEL.onnx CHIP CALIBRATION.npy SAMPLES.npy OUTPUTS.npy

The arrays have the shape [samples, ...]. esp-ppq's default format is chosen: 8 bits, calibration by KL divergence, and
no equalization.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from esp_ppq.api import espdl_quantize_onnx
from esp_ppq.executor import TorchExecutor

# esp-ppq's own examples calibrate on 32 batches of one sample.
_MAX_STEPS = 32


def main() -> None:
    """Write the outputs of the quantized model for all samples."""
    model, chip, calibration, samples, outputs = sys.argv[1:]
    rows = [torch.from_numpy(row[None]) for row in np.load(calibration)[:_MAX_STEPS]]
    with tempfile.TemporaryDirectory() as folder:
        graph = espdl_quantize_onnx(
            onnx_import_file=model,
            espdl_export_file=str(Path(folder) / "model.espdl"),
            calib_dataloader=rows,
            calib_steps=len(rows),
            input_shape=list(rows[0].shape),
            target=chip,
            num_of_bits=8,
            device="cpu",
            error_report=False,
            skip_export=True,
        )
    executor = TorchExecutor(graph=graph, device="cpu")
    results = [executor.forward(torch.from_numpy(row[None]))[0].detach().numpy() for row in np.load(samples)]
    np.save(outputs, np.concatenate(results))


if __name__ == "__main__":
    main()
