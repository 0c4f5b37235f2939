import pytest

from edgeq.backends.systolic.array import ArrayConfig, array_config, product_tiles
from edgeq.errors import HardwareError


def test_arrays_are_checked() -> None:
    assert array_config({}) == ArrayConfig()
    chip = array_config({"dim": 32, "scratchpad_kib": 64, "accumulator_kib": 32, "scale_type": "shift"})
    assert (chip.dim, chip.scratchpad_rows, chip.accumulator_rows, chip.output_scale) == (32, 2048, 256, "shift")
    for table, message in (
        ({"dim": 12}, "dim is 12"),
        ({"element_type": "float32"}, "element_type"),
        ({"scale_type": "bfloat16"}, "scale_type"),
        ({"dataflow": "XS"}, "dataflow"),
        ({"dim": 32, "scratchpad_kib": 256, "scratchpad_bank_rows": 4096}, "scratchpad_kib = 256 is 8192 rows"),
    ):
        with pytest.raises(HardwareError, match=message):
            array_config(table)


def test_tiles_fit_into_the_memories() -> None:
    array = ArrayConfig()
    for rows, columns, depth in ((64, 64, 64), (10000, 64, 576), (1, 1000, 1024), (5000, 5000, 5000)):
        tiles = product_tiles(rows, columns, depth, array)
        # A tile may use half of each memory: 8192 and 512 rows.
        assert (tiles.i + tiles.j) * tiles.k * 16 <= 8192
        assert tiles.i * tiles.j * 16 <= 512
        assert min(tiles.i, tiles.j, tiles.k) >= 1
        assert tiles.i * 16 < rows + 16


def test_small_products_are_one_piece() -> None:
    tiles = product_tiles(64, 32, 48, ArrayConfig())
    assert (tiles.i, tiles.j, tiles.k) == (4, 2, 3)
