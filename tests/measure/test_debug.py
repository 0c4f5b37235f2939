"""`edgeq.debug` is the command as a function."""

from __future__ import annotations

import edgeq
from edgeq.measure.diagnosis import DebugRequest, diagnose
from edgeq.measure.layers import LayerComparison
from edgeq.progress import SILENT
from edgeq.records import plain
from tests.measure.quantized_models import Quantized


def test_it_answers_as_the_command_does(quantized: Quantized) -> None:
    model = next(iter(quantized.models.values()))
    found = edgeq.debug(str(quantized.source), model, quantized.data, count=4, worst=2)
    assert isinstance(found.comparison, LayerComparison)
    assert found.comparison.count == 4
    request = DebugRequest(quantized.source, model, quantized.data, count=4, worst=2)
    assert plain(found) == plain(diagnose(request, progress=SILENT))


def test_options_reach_the_sessions(quantized: Quantized) -> None:
    model = next(iter(quantized.models.values()))
    options = {"session.disable_prepacking": "1"}
    found = edgeq.debug(quantized.source, model, quantized.data, count=1, session_options=options, threads=1)
    assert dict(found.request.settings.config) == options
    assert found.request.settings.intra_op_threads == 1
