from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.systolic.emit_c.text import array, designated, float_literal, harmless, int_literal, wrapped
from tests.backends.systolic.emit_c.compilers import done, need


def test_names_become_harmless_comments() -> None:
    assert harmless("block_1/conv:0") == "block_1_conv:0"
    assert harmless('*/ system("rm") /*\n#define\\') == "___system__rm_______define_"
    assert harmless("naïve ??/") == "na_ve____"
    long = harmless("x" * 500)
    assert len(long) == 60
    assert long.endswith("...")


def test_constants_read_back_to_the_same_bits(tmp_path: Path) -> None:
    """A compiler reads floats of every size and the smallest int32 back to the same bits."""
    need("gcc")
    bits = np.random.default_rng(0).integers(0, 2**32, 500, np.uint32)
    floats = [v for v in bits.view(np.float32) if np.isfinite(v)]
    floats += [np.float32(v) for v in (0.0, 1.0, 1e-45, 3.4028235e38, 0.33333331, 2.0**-126)]
    integers = np.array([-(2**31), 2**31 - 1, 0, -1], np.int32)
    listed = ",".join(float_literal(v) for v in floats)
    source = f"#include <stdint.h>\n#include <stdio.h>\nfloat f[] = {{{listed}}};\n{array('int32_t', 'i', integers)}"
    source += "int main(void) { fwrite(f, 1, sizeof f, stdout); fwrite(i, 1, sizeof i, stdout); return 0; }\n"
    (tmp_path / "c.c").write_text(source)
    done("gcc", "-Wall", "-Werror", "c.c", "-o", "c", folder=tmp_path)
    done("sh", "-c", "./c > out", folder=tmp_path)
    assert (tmp_path / "out").read_bytes() == np.array(floats, np.float32).tobytes() + integers.tobytes()


def test_only_finite_numbers_are_constants() -> None:
    for value in (float("inf"), float("nan"), 1e39):
        with pytest.raises(ValueError, match="not finite"), np.errstate(over="ignore"):
            float_literal(value)


def test_layout_of_initialisers() -> None:
    assert int_literal(-(2**31)) == "(-2147483647 - 1)"
    assert designated({"a": 1, "b": True, "c": "2.5f"}) == "{.a = 1, .b = true, .c = 2.5f}"
    assert array("elem_t", "w", np.int8([[1, -2], [3, 4]])) == "static const elem_t w[2][2] = {\n{1,-2},\n{3,4}\n};\n"
    lines = list(wrapped(str(n) for n in range(100)))
    assert all(len(line) <= 112 for line in lines)
    assert "".join(lines) == ",".join(map(str, range(100)))
