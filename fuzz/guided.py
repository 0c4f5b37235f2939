"""Fuzz the same layers with atheris, if it is installed. The coverage of edgeq's own code guides the mutations."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random

from fuzz.layers import Layer, expected, make_seeds
from fuzz.run import MEMORY, SECONDS, run_case


def guided(layer: Layer, seed: int, seconds: float, save: Path) -> int:
    """Run a layer for some seconds, and return 0 if nothing was found. Findings are saved under `save`. The first byte
    of a finding is the number of a seed, and the rest is the content of the case's file. The file has the name of that
    seed.
    """
    save.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="edgeq-fuzz-") as name:
        child = os.fork()  # libFuzzer ends its own process
        if not child:
            try:
                _run(layer, seed, seconds, save, Path(name))
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(layer: Layer, seed: int, seconds: float, save: Path, work: Path) -> None:
    try:
        import atheris
    except ImportError:
        print("fuzz: --guided needs atheris: python -m pip install atheris")
        return
    os.chdir(work)
    with atheris.instrument_imports(include=["edgeq", "edgeq_device"]):
        seeds = make_seeds(layer, work / "seeds")
        contents = [file.read_bytes() for file in seeds]
        corpus = work / "corpus"
        corpus.mkdir()
        for number, content in enumerate(contents):
            (corpus / str(number)).write_bytes(bytes([number]) + content)

        def one(data: bytes) -> None:
            if not data:
                return
            error = run_case(layer, seeds[data[0] % len(seeds)].name, data[1:], work)
            if error is not None and not expected(error):
                raise error

        def mutate(data: bytes, most: int, number: int) -> bytes:
            random = Random(number)
            if not data or random.random() < 0.5:
                return bytes(atheris.Mutate(data, most))
            return data[:1] + layer.mutate(random, data[1:], contents)[: most - 1]

        megabytes = (MEMORY >> 20) + 1024
        options = [f"-max_total_time={seconds:.0f}", f"-timeout={SECONDS}", f"-rss_limit_mb={megabytes}"]
        options += [f"-seed={seed + 1}", f"-artifact_prefix={save}/{layer.name}-guided-", "-max_len=65536"]
        atheris.Setup(["fuzz", *options, str(corpus)], one, custom_mutator=mutate)
        atheris.Fuzz()
