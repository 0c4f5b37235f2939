"""Test the mapping of jobs over items: order, errors, dead workers, and refused requests."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edgeq.distributed import workers
from edgeq.distributed.workers import Workers, check_versions, open_workers, read_versions, share_files
from edgeq.errors import DataError, EdgeqError, GoalNotMetError, RuntimeUnavailableError, UsageError
from tests.distributed.jobs import Squares, ignores_interrupts

REPOSITORY = Path(__file__).resolve().parents[2]


def test_results_come_in_the_order_of_the_items(pool: Workers) -> None:
    assert list(pool.map(Squares(), range(40))) == [n * n for n in range(40)]
    assert list(pool.map(Squares(), ())) == []


def test_an_error_is_the_same_error(pool: Workers) -> None:
    with pytest.raises(DataError, match="number 3 is wrong") as raised:
        list(pool.map(Squares(wrong=3), range(9)))
    assert raised.value.fix == "Give another"
    assert list(pool.map(Squares(), range(3))) == [0, 1, 4]  # the workers still work


def test_a_worker_that_dies_costs_the_item_that_it_was_at(pool: Workers, tmp_path: Path) -> None:
    """If a worker dies, only its current item is run again. Its finished results, which wait for item 0, stay."""
    job = Squares(deadly=5, once=tmp_path / "died", waits=0, log=tmp_path / "log")
    assert list(pool.map(job, range(12))) == [n * n for n in range(12)]
    runs = sorted(map(int, (tmp_path / "log").read_text().split()))
    assert runs == sorted([*range(12), 5])


def test_one_worker_that_dies_is_waited_for(tmp_path: Path) -> None:
    """If the only worker dies, the map waits some seconds for its successor and then continues."""
    pytest.importorskip("distributed", reason="the extra `distributed` is not installed")
    with open_workers(1) as alone:
        assert alone is not None
        job = Squares(deadly=1, once=tmp_path / "died", log=tmp_path / "log")
        assert list(alone.map(job, range(3))) == [0, 1, 4]
    assert (tmp_path / "log").read_text().split() == ["0", "1", "1", "2"]


def test_a_worker_gets_the_next_item_when_its_result_is_fetched() -> None:
    """A worker gets its next item only after its last result was fetched.

    Dask alone gives items to any idle worker. If that worker dies, its last result is lost.
    """
    given: list[str] = []

    class Future:
        status = "pending"

        def __init__(self, item: int) -> None:
            self.item = item

        def done(self) -> bool:
            return self.status == "finished"

        def result(self, timeout: float) -> int:
            return self.item**2

        def release(self) -> None:
            assert self.done()

    futures: list[Future] = []

    class Client:
        def nthreads(self) -> dict[str, int]:
            return {"a": 1, "b": 1}

        def submit(self, function: object, name: str, item: int, *, pure: bool, workers: str) -> Future:
            given.append(workers)
            futures.append(Future(item))
            return futures[-1]

        def as_current(self) -> ExitStack:
            for future in futures[1:] if len(futures) < 4 else futures:  # the first item takes longest
                future.status = "finished"
            return ExitStack()

        def nothing(self, *given: object, **named: object) -> None: ...

        register_plugin = unregister_worker_plugin = cancel = nothing

    pytest.importorskip("distributed", reason="the extra `distributed` is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distributed.wait", lambda futures, **how: None)
        assert list(Workers(Client).map(Squares(), range(4))) == [0, 1, 4, 9]
    assert given == ["a", "b", "b", "b"]


def test_an_item_that_kills_workers_is_named(pool: Workers) -> None:
    with pytest.raises(DataError, match=r"^7: two workers ended"):
        list(pool.map(Squares(deadly=7), range(9)))


def test_an_interrupt_is_left_to_the_main_process(pool: Workers) -> None:
    assert pool.everywhere(ignores_interrupts)


def test_other_users_of_the_machine_are_refused(pool: Workers) -> None:
    """Other users cannot connect to Dask's processes, where they could run code."""
    from distributed import Client

    for address in (pool.address, pool.address.replace("tls://", "tcp://")):
        with pytest.raises((OSError, TypeError)), Client(address, timeout=2):
            pass


def test_a_worker_that_has_just_started_has_nothing_to_forget() -> None:
    """An unknown plug-in is not an error at the end. Such an error would hide the one that ended the work."""

    class Client:
        def unregister_worker_plugin(self, name: str) -> None:
            raise KeyError(name)

    Workers(Client)._forget("edgeq-1")


def test_files_are_named_where_workers_see_them_and_sent_where_they_do_not(tmp_path: Path, pool: Workers) -> None:
    (tmp_path / "bundle" / "inner").mkdir(parents=True)
    (tmp_path / "bundle" / "inner" / "a").write_bytes(b"1")
    (tmp_path / "m.onnx").write_bytes(b"2")
    (tmp_path / "m.onnx.data").write_bytes(b"3")
    seen = share_files(pool, tmp_path / "bundle")
    assert seen.contents is None
    assert seen.names == ("bundle/inner/a",)
    model = share_files(pool, tmp_path / "m.onnx", [tmp_path / "m.onnx.data"])
    assert model.is_visible()
    sent = replace(model, contents={name: (tmp_path / name).read_bytes() for name in model.names})
    (tmp_path / "m.onnx").write_bytes(b"changed")
    assert not model.is_visible()
    with ExitStack() as stack:
        place = sent.place(stack)
        assert place.parent != tmp_path
        assert place.read_bytes() == b"2"
        assert place.with_name("m.onnx.data").read_bytes() == b"3"
    assert not place.exists()


@pytest.mark.parametrize("given", ["0", "-1", "many", "http://host:1", "tcp://", 0])
def test_refuses_malformed_workers(given: str | int) -> None:
    with pytest.raises(UsageError, match="is neither a number of workers"), open_workers(given):
        pass


def test_nobody_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the extra `distributed` is not installed")
    monkeypatch.setattr(workers, "_CONNECT_S", 0.1)
    with pytest.raises(RuntimeUnavailableError, match="no Dask workers at tcp"), open_workers("tcp://127.0.0.1:9"):
        pass


@pytest.mark.parametrize("missing", ["distributed", "cryptography"])
def test_without_dask(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install distributed"), open_workers(2):
        pass


def test_a_script_that_workers_import_anew_is_refused_with_the_line_that_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="the extra `distributed` is not installed")
    script = tmp_path / "script.py"
    work = "with open_workers(1) as opened:\n    print(opened.address)\n"
    script.write_text(f"from edgeq.distributed.workers import open_workers\n{work}", "utf-8")
    failed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert failed.stderr.count("Traceback") == failed.stderr.count("direct cause") + 1
    assert failed.stderr.splitlines()[-1].startswith("edgeq.errors.RuntimeUnavailableError: workers did not start")
    assert 'under `if __name__ == "__main__":`' in failed.stderr
    guarded = textwrap.indent(work, "    ")
    script.write_text(
        f"from edgeq.distributed.workers import open_workers\nif __name__ == '__main__':\n{guarded}", "utf-8"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "tls://" in done.stdout


def test_a_worker_with_other_versions_is_refused() -> None:
    check_versions(read_versions())
    with pytest.raises(RuntimeUnavailableError, match="a worker has numpy"):
        check_versions({**read_versions(), "numpy": "1.0"})


@pytest.mark.parametrize("kind", [DataError, GoalNotMetError, EdgeqError])
def test_errors_survive_the_way_to_another_process(kind: type[EdgeqError]) -> None:
    error = pickle.loads(pickle.dumps(kind("a is wrong", "Do b")))
    assert (type(error), error.problem, error.fix) == (kind, "a is wrong", "Do b")


def test_without_the_option_nothing_of_dask_is_imported() -> None:
    """Dask is imported only inside functions, and at the top of one module that only such a function imports."""
    early = re.compile(r"^(?:import|from) (?:dask|distributed|edgeq\.distributed\.plugin)\b", re.MULTILINE)
    found = [p for p in (REPOSITORY / "edgeq").rglob("*.py") if early.search(p.read_text("utf-8"))]
    assert [path.relative_to(REPOSITORY).as_posix() for path in found] == ["edgeq/distributed/plugin.py"]
    code = "import sys; from edgeq.jobs import package, quantize; assert not {'dask', 'distributed'} & {*sys.modules}"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
