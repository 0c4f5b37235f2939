"""Write an ESP-IDF project that runs an .espdl file on a chip, checks it there and times it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.arena import EspMemory
from edgeq.backends.espdl.chips import EspChip, EspFamily, runtime
from edgeq.backends.espdl.network import EspGraph, EspPort
from edgeq.backends.espdl.preprocessing import preprocessing_lines
from edgeq.util.marker import sha256

FOLDER = "esp-idf"
PROJECT_FILE = f"{FOLDER}/model.espdl"
"""Name of the model in a bundle."""
_TEXTS = Path(__file__).parent / "project_files"
_FLASH_UNIT = 1 << 16
# An application of ESP-IDF with the runtime has about 1 MiB; the partition leaves room for updates of the model.
_APPLICATION = 1 << 21
_RESERVE = 0.1
_TABLE_BYTES = 1 << 16
_FLASH_SIZES = (4, 8, 16, 32)
# The share of a chip's internal RAM that the activations may take. The rest is for the application and the system.
_INTERNAL_SHARE = 0.5
_RUNS = 10
# Longer outputs would make a file that nobody reads.
_MOST_VALUES = 4096


@dataclass(frozen=True)
class EspProject:
    """Describe the project of one model.

    Attributes:
        name: name of the model, for people.
        file: the .espdl file.
        values: the values of the file's sample by the name of the tensor.
        never_run: what was never run, as text.
        preprocess: the preprocessing of the samples; None if they are inputs of the model already.
    """

    name: str
    file: Path
    graph: EspGraph
    chip: EspChip
    family: EspFamily
    memory: EspMemory
    values: Mapping[str, NDArray[Any]]
    never_run: str
    preprocess: Any = None

    def write(self, folder: Path) -> dict[str, Path]:
        """Create `folder`, write the project into it, and return its files, keyed by their names in a bundle."""
        (folder / "main").mkdir(parents=True)
        fields = self._fields()
        texts = {
            "CMakeLists.txt": _template("CMakeLists.txt"),
            "README.md": _filled(_template("README.md"), fields),
            "expected.json": self._expected(),
            "main/CMakeLists.txt": _template("main_CMakeLists.txt"),
            "main/edgeq_model.h": self._header(),
            "main/idf_component.yml": _filled(_template("idf_component.yml"), fields),
            "main/main.cpp": _template("main.cpp"),
            "partitions.csv": self._partitions(),
            "sdkconfig.defaults": _filled(_template("sdkconfig.defaults"), fields),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "model.espdl").write_bytes(self.file.read_bytes())
        return {f"{FOLDER}/{name}": folder / name for name in (*texts, "model.espdl")}

    @property
    def partition_bytes(self) -> int:
        """Return the size of the flash partition: that of the file with a reserve, in units of 64 KiB."""
        return -(-int(self.memory.file * (1 + _RESERVE)) // _FLASH_UNIT) * _FLASH_UNIT

    @property
    def internal_bytes(self) -> int:
        """Return how much internal RAM the activations may use. 0 leaves all of them in PSRAM."""
        limit = int(self.chip.internal_kib * 1024 * _INTERNAL_SHARE)
        return self.memory.arena if self.memory.arena <= limit else 0

    def _fields(self) -> dict[str, str]:
        component = runtime()
        flash = next((x for x in _FLASH_SIZES if x << 20 >= _TABLE_BYTES + _APPLICATION + self.partition_bytes), 32)
        spiram = "CONFIG_SPIRAM=y\n" if self.chip.psram and not self.internal_bytes else ""
        return {
            "CHIP": self.chip.title,
            "COMPONENT": component.component,
            "FAMILY": self.family.name,
            "FLASH": str(flash),
            "IDF": self.chip.idf_target,
            "MEMORY": self.memory.note.removeprefix("forecast: "),
            "NAME": self.name,
            "NEVER": self.never_run,
            "PARTITION": str(self.partition_bytes // 1024),
            "PORTS": _ports(self.graph),
            "ROUNDING": self.family.rounding.replace("-", " ").replace("half even", "half to even"),
            "SPIRAM": spiram,
            "TESTED": component.tested,
            "VERSIONS": component.versions,
        }

    def _partitions(self) -> str:
        rows = (
            "# Name, Type, SubType, Offset, Size",
            "nvs, data, nvs, 0x9000, 0x6000",
            "phy_init, data, phy, 0xf000, 0x1000",
            f"factory, app, factory, 0x10000, 0x{_APPLICATION:x}",
            f"model, data, spiffs, , 0x{self.partition_bytes:x}",
        )
        return "\n".join(rows) + "\n"

    def _header(self) -> str:
        lines = [
            "#pragma once",
            "",
            f'constexpr char kEdgeqFile[] = "{sha256(self.file)}";',
            f'constexpr char kEdgeqChip[] = "{self.chip.name}";',
            "// RAM in the chip that activations may use; 0 leaves them in PSRAM.",
            f"constexpr int kEdgeqInternalBytes = {self.internal_bytes};",
            "// Whether the runtime copies the weights from flash to RAM, where it reads them faster.",
            f"constexpr bool kEdgeqCopyWeights = {'true' if self.chip.psram else 'false'};",
            f"constexpr int kEdgeqRuns = {_RUNS};",
        ]
        for kind, ports in (("Input", self.graph.inputs), ("Output", self.graph.outputs)):
            for number, port in enumerate(ports):
                shape = ", ".join(map(str, port.tensor.shape))
                lines += [
                    "",
                    f"// {port.name}: {port.tensor.type}, in the runtime's order of axes.",
                    f"constexpr int kEdgeq{kind}{number}Exponent = {port.tensor.exponent};",
                    f"constexpr int kEdgeq{kind}{number}Shape[] = {{{shape}}};",
                ]
        return "\n".join([*lines, "", *preprocessing_lines(self.preprocess)]) + "\n"

    def _expected(self) -> str:
        outputs = [
            {
                "name": port.name,
                "exponent": port.tensor.exponent,
                "shape": list(port.tensor.shape),
                "values": np.asarray(self.values[port.tensor.name]).ravel()[:_MOST_VALUES].tolist(),
            }
            for port in self.graph.outputs
        ]
        return json.dumps({"edgeq_expected": 1, "tensors": list(self.values), "outputs": outputs}, indent=1) + "\n"


def _template(name: str) -> str:
    return (_TEXTS / name).read_text("utf-8")


def _filled(text: str, fields: Mapping[str, str]) -> str:
    for name, value in fields.items():
        text = text.replace(f"@{name}@", value)
    return text


def _ports(graph: EspGraph) -> str:
    rows = ["| name | type | shape | order | exponent |", "|---|---|---|---|---|"]
    for port in (*graph.inputs, *graph.outputs):
        rows.append(_row(port))
    return "\n".join(rows)


def _row(port: EspPort) -> str:
    tensor = port.tensor
    name = port.name.replace("|", "\\|")
    return f"| {name} | {tensor.type} | {list(tensor.shape)} | {list(port.order)} | {tensor.exponent} |"
