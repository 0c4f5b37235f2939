from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeq.calibration import collect as collecting
from edgeq.calibration.collect import Checkpoints, FloatPass, PassLimits
from edgeq.calibration.observer import SPREAD, spread_stride
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import derive_ranges
from edgeq.calibration.statistics import Nonfinite, Statistics, histogram_of
from edgeq.errors import CalibrationError, DataError
from edgeq.model.convert import from_proto
from edgeq.model.digests import model_digest
from edgeq.model.load import read_model
from edgeq.util.display import Advance, Silent

from .models import ListSamples, images, small_cnn, write


def collect(path: Path, samples: ListSamples, tensors: Sequence[str] | None = None, **options: Any) -> Statistics:
    digest = options.pop("model_digest", model_digest(path))
    return collecting.collect(read_model(path), samples, tensors, model_digest=digest, **options)


def brute_force(path: Path, items: list[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """Return every tensor of every sample, from a session that has all tensors as outputs."""
    model = onnx.load(path)
    names = quantizable_tensors(from_proto(model))
    inputs = {i.name for i in model.graph.input}
    outputs = {o.name for o in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in inputs | outputs)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    fetched = [n for n in names if n not in inputs]
    values: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for item in items:
        for name, array in [*zip(fetched, session.run(fetched, item), strict=True), *item.items()]:
            if name in values:
                values[name].append(array)
    return values


@pytest.mark.parametrize("channels", [32, 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_statistics_equal_brute_force_to_the_last_bit(tmp_path: Path, channels: int, threads: int) -> None:
    path = small_cnn(tmp_path / "m.onnx", channels)
    items = images(5)
    statistics = collect(path, ListSamples(items), limits=PassLimits(threads=threads))
    truth = brute_force(path, items)
    assert set(statistics.tensors) == set(truth)
    assert statistics.complete
    for name, arrays in truth.items():
        tensor, values = statistics.tensors[name], np.concatenate([a.ravel() for a in arrays])
        assert (tensor.minimum, tensor.maximum, tensor.count) == (values.min(), values.max(), values.size), name
        assert tensor.histogram == histogram_of(values), name
        assert (tensor.samples, tensor.nonempty) == (5, 5)


def test_the_number_of_threads_does_not_change_a_bit(tmp_path: Path) -> None:
    path = small_cnn(tmp_path / "m.onnx")
    one, four = (collect(path, ListSamples(images(9)), limits=PassLimits(threads=n)) for n in (1, 4))
    assert one == four


def test_one_thread_counts_while_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread counts while the others run. Besides the samples that run, at most one sample is in memory."""
    held, counting, most = set[int](), set[int](), [0, 0]
    arrays, count = FloatPass._arrays, FloatPass._count

    def fetched(self: FloatPass, sample: Any, place: int) -> Any:
        held.add(place)
        most[0] = max(most[0], len(held))
        return arrays(self, sample, place)

    def counted(self: FloatPass, sample: Any, place: int, values: Any) -> None:
        counting.add(place)
        most[1] = max(most[1], len(counting))
        time.sleep(0.02)
        count(self, sample, place, values)
        counting.remove(place)
        held.remove(place)

    monkeypatch.setattr(FloatPass, "_arrays", fetched)
    monkeypatch.setattr(FloatPass, "_count", counted)
    path = small_cnn(tmp_path / "m.onnx")
    statistics = collect(path, ListSamples(images(12)), limits=PassLimits(threads=3))
    assert statistics.complete
    assert not held
    assert most[0] <= 4
    assert most[1] == 1


def test_shards_merge_to_the_whole(tmp_path: Path) -> None:
    path, items = small_cnn(tmp_path / "m.onnx"), images(7)
    whole = collect(path, ListSamples(items))
    parts = [collect(path, ListSamples(items[i::3])) for i in range(3)]
    assert parts[2].merge(parts[0]).merge(parts[1]).tensors == whole.tensors


def test_dynamic_shapes_and_ragged_batches(tmp_path: Path) -> None:
    path = small_cnn(tmp_path / "m.onnx", size="S")
    items = [images(1, size)[0] for size in (5, 9, 16)]
    items.append({"x": np.concatenate([i["x"] for i in images(3, 7)])})
    statistics = collect(path, ListSamples(items))
    truth = brute_force(path, items)
    for name, arrays in truth.items():
        assert statistics.tensors[name].histogram == histogram_of(np.concatenate([a.ravel() for a in arrays]))


def test_waves_give_the_same_statistics_but_for_what_the_optimiser_fuses(tmp_path: Path) -> None:
    path, samples = small_cnn(tmp_path / "m.onnx"), ListSamples(images(4))
    whole = collect(path, samples)
    for memory in (1, 40_000, 10**9):
        partitions = collect(path, samples, limits=PassLimits(memory=memory))
        assert partitions.complete
        for name, tensor in whole.tensors.items():
            assert partitions.tensors[name].count == tensor.count
            assert partitions.tensors[name].maximum == pytest.approx(tensor.maximum, rel=1e-5)
    assert collect(path, samples, limits=PassLimits(memory=10**9)) == whole


def test_chosen_tensors_only(tmp_path: Path) -> None:
    statistics = collect(small_cnn(tmp_path / "m.onnx"), ListSamples(images(2)), ["relu", "x"])
    assert list(statistics.tensors) == ["relu", "x"]
    with pytest.raises(CalibrationError, match="no tensor 'nowhere'"):
        collect(tmp_path / "m.onnx", ListSamples(images(2)), ["nowhere"])


def test_channel_extrema(tmp_path: Path) -> None:
    path, items = small_cnn(tmp_path / "m.onnx"), images(3)
    statistics = collect(path, ListSamples(items), channels={"conv1": 1, "relu": 1, "x": 1})
    truth = brute_force(path, items)
    for name in ("conv1", "relu", "x"):
        channels = statistics.tensors[name].channels
        stacked = np.concatenate(truth[name])
        assert channels is not None
        assert np.array_equal(channels.minimum, stacked.min(axis=(0, 2, 3)))
        assert np.array_equal(channels.maximum, stacked.max(axis=(0, 2, 3)))
    assert statistics.tensors["conv2"].channels is None


def identity_model(path: Path, kind: str = "float") -> Path:
    return write(path, f"g ({kind}[N] a, {kind}[N] b) => ({kind}[N] y) {{ [add] y = Add(a, b) }}")


def test_several_inputs_and_all_negative_constant_and_empty_tensors(tmp_path: Path) -> None:
    path = identity_model(tmp_path / "m.onnx")
    items = [
        {"a": np.float32([-27.8, -0.1]), "b": np.float32([0, 0])},
        {"a": np.zeros(0, np.float32), "b": np.zeros(0, np.float32)},
    ]
    tensors = collect(path, ListSamples(items)).tensors
    assert (tensors["a"].minimum, tensors["a"].maximum) == (np.float32(-27.8), np.float32(-0.1))
    assert (tensors["b"].minimum, tensors["b"].maximum, tensors["b"].histogram.keys.size) == (0, 0, 1)
    assert (tensors["y"].count, tensors["y"].samples, tensors["y"].nonempty) == (2, 2, 1)


def test_float16_tensors(tmp_path: Path) -> None:
    path = identity_model(tmp_path / "m.onnx", "float16")
    items = [{"a": np.float16([1.5, -2.25]), "b": np.float16([0.5, 60000])}]
    tensors = collect(path, ListSamples(items)).tensors
    assert tensors["y"].dtype == "float16"
    assert (tensors["y"].minimum, tensors["y"].maximum) == (2.0, 60000.0)


def test_a_tensor_that_is_input_and_output(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", "g (float[2] x) => (float[2] x, float[2] y) { [relu] y = Relu(x) }")
    tensors = collect(path, ListSamples([{"x": np.float32([-1, 3])}])).tensors
    assert (tensors["x"].minimum, tensors["y"].minimum, tensors["y"].maximum) == (-1, 0, 3)


@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_values_that_are_not_finite_name_tensor_and_sample(tmp_path: Path, bad: float, word: str) -> None:
    path = identity_model(tmp_path / "m.onnx")
    items = [{"a": np.float32([1, 2]), "b": np.float32([1, 2])} for _ in range(4)]
    items[2]["b"][1] = bad
    with pytest.raises(CalibrationError, match=rf"'b' in sample sample-2: it contains (an )?{word}"):
        collect(path, ListSamples(items))


def test_counts_nonfinite_values_of_inner_tensors_separately(tmp_path: Path) -> None:
    body = """g (float[4] x) => (float[4] y) {
        [log] log = Log(x) [relu] relu = Relu(log) [nan] nan = IsNaN(relu) [y] y = Where(nan, one, relu)
    }"""
    path = write(tmp_path / "m.onnx", body, {"one": np.float32(1)})
    tensors = collect(path, ListSamples([{"x": np.float32([1, 2, 4, 1])}, {"x": np.float32([0, -1, 2, 0.5])}])).tensors
    assert tensors["log"].nonfinite == Nonfinite(nan=1, below=1)
    assert (tensors["log"].minimum, tensors["log"].count) == (np.log(np.float32(0.5)), 6)
    # The Relu turns minus infinity into zero, and its statistics follow from its input's.
    assert tensors["relu"].nonfinite == Nonfinite(nan=1)
    logs = np.log(np.float32([1, 2, 4, 1, 2]))
    assert tensors["relu"].histogram == histogram_of(np.float32([*logs, 0, 0]))
    assert (tensors["y"].nonfinite, tensors["y"].count) == (Nonfinite(), 8)


@pytest.mark.parametrize(("values", "word"), [([1, -1], "NaN"), ([0, 0], "an infinity")])
def test_an_output_that_is_no_number_names_the_sample(tmp_path: Path, values: list[float], word: str) -> None:
    path = write(tmp_path / "m.onnx", "g (float[2] x) => (float[2] y) { [log] y = Log(x) }")
    with pytest.raises(CalibrationError, match=f"'y' in sample sample-1: it contains {word}"):
        collect(path, ListSamples([{"x": np.float32([1, 2])}, {"x": np.float32(values)}]))


def test_an_output_may_hold_minus_infinity_beside_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", "g (float[2] x) => (float[2] y) { [log] y = Log(x) }")
    found = collect(path, ListSamples([{"x": np.float32([0, 1])}])).tensors["y"]
    assert (found.nonfinite, found.maximum) == (Nonfinite(below=1), 0)


def test_a_weight_that_is_no_number_is_named_instead_of_the_sample(tmp_path: Path) -> None:
    body = "g (float[2] x) => (float[2] y) { [mul] m = Mul(x, scale) [relu] y = Relu(m) }"
    path = write(tmp_path / "m.onnx", body, {"scale": np.float32([1, np.nan])})
    with pytest.raises(CalibrationError, match="it contains NaN, like weight 'scale' of the model") as caught:
        collect(path, ListSamples([{"x": np.float32([1, 2])}]))
    assert "sample" not in caught.value.fix


def test_a_sample_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    path = small_cnn(tmp_path / "m.onnx")
    with pytest.raises(DataError, match="sample-1"):
        collect(path, ListSamples([*images(1), {"x": np.zeros((1, 4, 12, 12), np.float32)}]))


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sample-0 has no input 'b'"):
        collect(identity_model(tmp_path / "m.onnx"), ListSamples([{"a": np.float32([1])}]))


def test_samples_large_tensors_evenly_after_enough_values(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", "g (float[N, C] x) => (float[N, C] y) { [neg] y = Neg(x) }")
    random = np.random.default_rng(0)
    items = [{"x": random.normal(size=(512, 300)).astype(np.float32)} for _ in range(30)]
    spread, every = (collect(path, ListSamples(items), limits=PassLimits(every_element=e)) for e in (False, True))
    values = np.concatenate([i["x"].ravel() for i in items])
    assert every.tensors["x"].histogram == histogram_of(values)
    few = spread.tensors["x"]
    assert (few.minimum, few.maximum, few.count) == (values.min(), values.max(), values.size)
    assert few.histogram != every.tensors["x"].histogram
    # The last counted element represents a whole step, which may extend beyond the end.
    assert few.histogram.total == pytest.approx(values.size, rel=1 / SPREAD)
    assert spread == collect(path, ListSamples(items), limits=PassLimits(threads=1))
    for share in (90.0, 99.0, 99.9):
        a, b = (derive_ranges(s, "percentile", options={"percentile": share})["x"] for s in (spread, every))
        assert a.high == pytest.approx(b.high, rel=0.01)
        assert a.low == pytest.approx(b.low, rel=0.01)


def test_the_stride_walks_through_every_channel() -> None:
    for shape in ((1, 96, 112, 112), (1, 56, 56, 480), (4, 1000, 770), (300_000,)):
        stride = spread_stride(shape)
        assert all(np.gcd(stride, size) == 1 for size in (*shape, 16))
        assert 1 <= np.prod(shape) / stride <= 1 << 15


def test_no_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no samples"):
        collect(small_cnn(tmp_path / "m.onnx"), ListSamples([]))


@pytest.mark.parametrize("memory", [None, 1, 40_000])
@pytest.mark.parametrize("after", [0, 3, 5])
def test_after_an_interruption_the_rest_gives_the_same_statistics(
    tmp_path: Path, memory: int | None, after: int
) -> None:
    path, items = small_cnn(tmp_path / "m.onnx"), images(6)
    whole = collect(path, ListSamples(items), limits=PassLimits(memory=memory))
    kept: list[Statistics] = []
    with pytest.raises(KeyboardInterrupt):
        collect(
            path,
            ListSamples(items, interrupt_after=after),
            checkpoints=Checkpoints(save=kept.append),
            limits=PassLimits(memory=memory),
        )
    if after == 0 and memory is not None:  # the first sample, which gives the sizes, was never read
        assert not kept
        return
    assert max(after - 4, 0) <= max(t.samples for t in kept[-1].tensors.values()) <= after
    assert not kept[-1].complete
    assert (
        collect(path, ListSamples(items), checkpoints=Checkpoints(start=kept[-1]), limits=PassLimits(memory=memory))
        == whole
    )


def test_an_interruption_in_a_later_wave(tmp_path: Path) -> None:
    path, items = small_cnn(tmp_path / "m.onnx"), images(4)
    whole = collect(path, ListSamples(items), limits=PassLimits(memory=1))
    kept: list[Statistics] = []

    class Interrupting(Silent):
        @contextmanager
        def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
            done = 0

            def advance(steps: int) -> None:
                nonlocal done
                done += steps
                if done == 14:
                    raise KeyboardInterrupt

            yield advance

    with pytest.raises(KeyboardInterrupt):
        collect(
            path,
            ListSamples(items),
            limits=PassLimits(memory=1),
            checkpoints=Checkpoints(save=kept.append),
            progress=Interrupting(),
        )
    assert len({t.samples for t in kept[-1].tensors.values()}) > 2
    assert (
        collect(path, ListSamples(items), checkpoints=Checkpoints(start=kept[-1]), limits=PassLimits(memory=1)) == whole
    )
    assert collect(path, ListSamples(items), checkpoints=Checkpoints(start=whole)) == whole


def test_checkpoints_come_while_it_runs(tmp_path: Path) -> None:
    path, kept = small_cnn(tmp_path / "m.onnx"), list[Statistics]()
    whole = collect(path, ListSamples(images(5)), checkpoints=Checkpoints(save=kept.append, seconds=0.0))
    assert kept
    assert all(collect(path, ListSamples(images(5)), checkpoints=Checkpoints(start=part)) == whole for part in kept)


def test_an_unfinished_part_of_other_data_or_tensors_is_refused(tmp_path: Path) -> None:
    path = small_cnn(tmp_path / "m.onnx")
    part = collect(path, ListSamples(images(2)), ["x", "y"])
    with pytest.raises(CalibrationError, match="other data"):
        collect(path, ListSamples(images(2, seed=1)), checkpoints=Checkpoints(start=part))
    with pytest.raises(CalibrationError, match="other tensors"):
        collect(path, ListSamples(images(2)), checkpoints=Checkpoints(start=part))
    other = small_cnn(tmp_path / "other.onnx", channels=16)
    with pytest.raises(CalibrationError, match="another model"):
        collect(other, ListSamples(images(2)), checkpoints=Checkpoints(start=part))


def test_external_data(tmp_path: Path) -> None:
    inline = small_cnn(tmp_path / "inline.onnx")
    (tmp_path / "folder").mkdir()
    outside = tmp_path / "folder" / "m.onnx"
    onnx.save(onnx.load(inline), outside, save_as_external_data=True, location="weights.bin", size_threshold=0)
    a, b = (collect(p, ListSamples(images(2)), model_digest="same") for p in (inline, outside))
    assert a == b
