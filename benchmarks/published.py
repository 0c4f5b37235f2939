"""Write docs/published.md: accuracies that vendors and tools publish, next to edgeq's for the nearest model.

python benchmarks/published.py                      # write the page from the files in benchmarks/published/
python benchmarks/published.py --measure CASE ...   # first measure these cases of cases.toml again
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import required_data

from edgeq.backends.base import file_suffix
from edgeq.errors import DataError
from edgeq.hardware.target import resolve
from edgeq.util.records import parse, plain

BENCHMARKS = Path(__file__).resolve().parent
FILES = BENCHMARKS / "published"
PAGE = BENCHMARKS.parent / "docs" / "published.md"


@dataclass(frozen=True)
class Case:
    """Hold a model that edgeq is measured on.

    Attributes:
        options: model, data and options of `edgeq quantize`, in the folder of the data. SPECS stands for
            benchmarks/specs.
        targets: targets that the model is quantized for, each with the options that only this target needs.
    """

    title: str
    data: str
    metric: str
    options: str
    targets: tuple[str, ...]

    def command(self, target: str) -> str:
        """Return the command that measures this case on a target."""
        return f"edgeq quantize {self.options} -t {target} --no-timing"


@dataclass(frozen=True)
class Measured:
    """Hold edgeq's figures for one case and one target, as shares.

    Attributes:
        interval: 95 % interval of the loss over many other samples, from the same samples in float32 and in int8.
        repaired: whether edgeq tried to repair the first build. It chooses among the builds by the same samples.
        int8_macs: share of the multiply-accumulates that run in int8.
        profile: profile of the hardware; for this-machine, that of the machine that measured.
    """

    case: str
    target: str
    profile: str
    float32: float
    int8: float
    interval: tuple[float, float]
    samples: int
    int8_macs: float
    command: str
    commit: str
    date: str
    repaired: bool = False


@dataclass(frozen=True)
class Published:
    """Hold figures that someone else published.

    Attributes:
        case: the case of cases.toml whose model is nearest.
        float32, int8: the published accuracies; float32 is None if only that of int8 is published.
        differs: differences from edgeq's model and data.
        date: when the document was read.
    """

    case: str
    vendor: str
    model: str
    chip: str
    data: str
    metric: str
    int8: float
    differs: str
    source: str
    url: str
    date: datetime.date
    float32: float | None = None


def read(name: str) -> Any:
    """Return the content of a file in `FILES`."""
    text = (FILES / name).read_text("utf-8")
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)


def cases() -> Mapping[str, Case]:
    """Return the cases of cases.toml by name."""
    return {name: parse(case, Case, f"cases.toml, {name}", DataError) for name, case in read("cases.toml").items()}


def measured() -> list[Measured]:
    """Return edgeq's figures."""
    return [parse(row, Measured, "measured.json", DataError) for row in read("measured.json")]


def published() -> list[Published]:
    """Return the published figures."""
    return [parse(row, Published, "figures.toml", DataError) for row in read("figures.toml")["figure"]]


def measure(name: str, case: Case, target: str) -> Measured:
    """Quantize a case for a target, and return its figures."""
    options = shlex.split(case.command(target).replace("SPECS", str(BENCHMARKS / "specs")))[1:]
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/int8{file_suffix(resolve(target.partition(' ')[0]))}"
        command = [sys.executable, "-P", "-m", "edgeq", *options, "-o", output, "--json"]
        done = subprocess.run(command, cwd=required_data(), stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    models = result["accuracy"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return Measured(
        case=name,
        target=target,
        profile=result["profile"],
        float32=models["float32"]["metrics"][models["float32"]["primary"]],
        int8=models["int8"]["metrics"][models["int8"]["primary"]],
        interval=tuple(result["accuracy_drop_interval"]),
        samples=result["samples"],
        int8_macs=result["coverage"]["int8_mac_share"],
        command=case.command(target),
        commit=commit.stdout.strip(),
        date=datetime.date.today().isoformat(),
        repaired=result["repair"] is not None,
    )


def page() -> str:
    """Return the page: the text of page.md, with a section for each case."""
    tables = "\n\n".join(_section(name, case) for name, case in cases().items())
    return (FILES / "page.md").read_text("utf-8").replace("TABLES", tables)


def _section(name: str, case: Case) -> str:
    """Return edgeq's figures for a case, then the published figures that are nearest to it."""
    own = _table(
        ("edgeq's target", "float32", "int8", "loss", "95 % interval of the loss", "MACs in int8", "measured"),
        (
            (
                f"`{row.target}`, profile `{row.profile}`{', repair tried' if row.repaired else ''}",
                *(f"{100 * value:.2f}" for value in (row.float32, row.int8, row.float32 - row.int8)),
                " to ".join(f"{100 * value:.2f}" for value in row.interval),
                f"{100 * row.int8_macs:.3g} %",
                f"{row.date}, commit {row.commit}, {row.samples} samples",
            )
            for row in measured()
            if row.case == name
        ),
    )
    others = _table(
        ("published by", "model", "chip", "float32", "int8", "loss", "data, metric", "differences", "source"),
        (
            (
                row.vendor,
                row.model,
                row.chip,
                *_figures(row.float32, row.int8),
                f"{row.data}, {row.metric}",
                row.differs,
                f"[{row.source}]({row.url}), read {row.date}",
            )
            for row in published()
            if row.case == name
        ),
    )
    return f"## {case.title}\n\nedgeq's data: {case.data}; {case.metric}.\n\n{own}\n\n{others}"


def _figures(float32: float | None, int8: float) -> tuple[str, str, str]:
    """Return the cells of both accuracies, without digits that were not published, and of the loss."""
    if float32 is None:
        return "", f"{round(int8, 2):g}", ""
    return f"{round(float32, 2):g}", f"{round(int8, 2):g}", f"{float32 - int8:.2f}"


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Measure the chosen cases, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="+", default=[], metavar="CASE[:TARGET]", help="cases to measure again")
    for chosen in parser.parse_args().measure:
        name, _, target = chosen.partition(":")
        case = cases()[name]
        for one in [target] if target else case.targets:
            row = measure(name, case, one)
            rows = {(old.case, old.target): old for old in measured()} | {(name, one): row}
            (FILES / "measured.json").write_text(json.dumps(plain(list(rows.values())), indent=2) + "\n", "utf-8")
            print(row)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
