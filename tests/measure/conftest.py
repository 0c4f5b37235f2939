"""Define the fixtures of the tests of layers."""

from __future__ import annotations

import pytest

from tests.measure.quantized_models import Quantized, float_model, quantize_all


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return quantize_all(tmp_path_factory.mktemp("quantized"), float_model())
