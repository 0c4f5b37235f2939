"""Test the comparison of a page's outputs with those of a run."""

from __future__ import annotations

import pytest

from tests.docs.blocks import Block
from tests.docs.printed import find_difference

OUTPUT = """preprocessing: none named
int8.onnx: static QDQ U8S8 for This machine: x86-64 with AVX2, no VNNI
against float32: SQNR 34.4 dB, same top-1 in 100.0% (540 samples)
int8 runs at 2.05 times float32's speed (1.76 to 2.40; 0.106 → 0.0517 ms)
│ latency p50 │ 0.122 ms │
next: edgeq bench int8.onnx
"""


@pytest.mark.parametrize(
    ("shown", "difference"),
    [
        (OUTPUT, ""),
        ("…\nagainst float32: SQNR 37.0 dB, same top-1 in 100.0% (540 samples)\n…\nnext: edgeq bench int8.onnx", ""),
        ("…\n│ latency p50   │ 75.6 µs  │\n…", ""),
        ("preprocessing: none named\nint8.onnx: static QDQ U8S8 for This machine: x86-64 with AVX-512-VNNI\n…", ""),
        ("…\nagainst float32: SQNR 12.0 dB, same top-1 in 100.0% (540 samples)\n…", "the page shows"),
        ("…\nagainst float32: SNR 34.4 dB, same top-1 in 100.0% (540 samples)\n…", "the page shows"),
        ("…\nnext: edgeq bench int8.onnx\npreprocessing: none named", "the page shows"),
        ("…\n│ latency p50 │ 0.122 ms │", "the page lacks"),
        ("against float32: SQNR 34.4 dB, same top-1 in 100.0% (540 samples)\n…", "the page shows"),
    ],
)
def test_a_page_shows_lines_of_the_output_in_order(shown: str, difference: str) -> None:
    sentence = find_difference(shown.splitlines(), OUTPUT, numbers=True)
    assert sentence.partition("\n")[0] == difference


def test_numbers_of_stand_ins_do_not_count() -> None:
    assert find_difference(["9 samples"], "540 samples", numbers=False) == ""
    assert find_difference(["9 samples"], "540 samples", numbers=True) != ""


def test_commands_have_the_output_below_them() -> None:
    block = Block("page.md", 10, "console", "$ edgeq a \\\n    --b\none\ntwo\n$ edgeq c\n")
    first, second = block.commands()
    assert (first.line, first.text.split(), first.shown) == (10, ["edgeq", "a", "--b"], ("one", "two"))
    assert (second.line, second.text, second.shown) == (14, "edgeq c", ())
