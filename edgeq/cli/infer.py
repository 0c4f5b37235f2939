"""Implement `edgeq infer`, which prints and draws what a model finds."""

from __future__ import annotations

from typing import Any

import click

from edgeq.cli._checked_text import HEAD, INPUT
from edgeq.cli._common import Printer, command
from edgeq.cli._options import ENGINE, FORCE, OUTPUT, PATH, PREPROCESS, THREADS, VARIANT


@command("infer")
@click.argument("model", type=PATH, metavar="MODEL|BUNDLE")
@click.argument("inputs", type=INPUT, nargs=-1, required=True, metavar="INPUT...")
@click.option("--threshold", type=float, help="Lowest score of an object or a class. [default: the head's]")
@click.option(
    "--draw", type=OUTPUT, metavar="PATH", help="Write a drawing: .png, .svg, or a folder for several images."
)
@click.option("--raw", type=OUTPUT, metavar="FILE", help="Write the outputs themselves to this .npz.")
@PREPROCESS
@click.option(
    "--head",
    type=HEAD,
    metavar="NAME[:KEY=VALUE,…]",
    help="What the outputs of a model mean, such as yolov8 or ctc:blank=last. [default: found]",
)
@click.option("--classes", type=PATH, help="File with the class names in the order of the scores.")
@VARIANT
@ENGINE
@THREADS
@FORCE
def infer_command(printer: Printer, **options: Any) -> None:
    """Print what MODEL or BUNDLE finds in images: objects, masks, keypoints, text, classes or a map.

    INPUT is an image, a folder of images, an .npz or .npy file with the model's inputs, or NAME=X.npy.

    \b
    edgeq infer dist/ photo.jpg --draw found.png
    edgeq infer yolo11n.onnx photos/ --threshold 0.4 --json
    edgeq infer ocr.onnx line.png --head ctc --classes keys.txt
    """
    from edgeq_device.bundle.answering import check_complete

    from edgeq.jobs.infer import InferenceRequest, open_inference
    from edgeq.util.device_errors import device_errors

    request = InferenceRequest(**{**options, "inputs": list(options["inputs"])})
    problems: list[str] = []
    with open_inference(request, printer.progress()) as inference:
        record = {"model": str(request.model), "variant": getattr(inference.predictor, "variant", None)}
        if request.raw is not None:
            outputs = inference.write_outputs()
            lines = [f"{name}: {entry['dtype']}{entry['shape']}" for name, entry in outputs.items()]
            printer.lines({**record, "output": str(request.raw), "outputs": outputs}, lines)
            return
        entries = []
        for item in inference.answer():
            problems += [item.problem] if item.problem else []
            if printer.as_json:
                entries.append(item.record)
            else:
                printer.lines(None, item.list_lines(heading=len(inference.items) > 1))
        if printer.as_json:
            printer.lines({**record, "inputs": entries}, [])
    with device_errors():
        check_complete(problems, len(inference.items))
