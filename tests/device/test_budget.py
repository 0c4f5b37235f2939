"""The budget: what it says, and that a process under it is ended in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from edgeq_device.budget import Budget, read_budget
from edgeq_device.errors import BudgetError, UsageError

RUNTIME = Path(__file__).parents[2] / "targets" / "runtime"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("", Budget()),
        ("memory=2GiB", Budget(memory=2 << 30)),
        ("memory=0,seconds=0", Budget(memory=0, seconds=0)),
        ("sample=1GiB, seconds=9", Budget(sample=1 << 30, seconds=9)),
        ("memory=123", Budget(memory=123)),
        ("off", Budget(confined=False)),
    ],
)
def test_what_the_variable_says(text: str, budget: Budget) -> None:
    assert read_budget({"EDGEQ_BUDGET": text}) == budget


@pytest.mark.parametrize(
    "text", ["x", "memory", "memory=-1", "memory=1GB", "seconds=1.5", "sample=0", "sample=²", "on"]
)
def test_what_it_may_not_say(text: str) -> None:
    with pytest.raises(UsageError, match="EDGEQ_BUDGET"):
        read_budget({"EDGEQ_BUDGET": text})


def start(code: str, budget: str) -> subprocess.Popen[str]:
    """Code behind `confine("this")`; `budget` is what came of it. A shell that started the tests in the background has
    made them deaf to SIGINT; this process is not."""
    whole = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(RUNTIME)!r})\nfrom edgeq_device.budget import confine\n"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-c", f"{whole}budget = confine('this')\n{code}"],
        env={**os.environ, "EDGEQ_BUDGET": budget},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    ("code", "budget", "ends", "says"),
    [
        ("print('done', flush=True); sys.exit(3)", "", 3, ""),
        ("while True: pass", "seconds=1", 12, "after 1 s of processor time"),
        ("import os; os.abort()", "", 12, "ended by signal SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", "", 12, "ended by signal SIGKILL"),
    ],
    ids=["its own exit code", "no end", "crash", "killed"],
)
def test_a_process_under_limits(code: str, budget: str, ends: int, says: str) -> None:
    process = start(code, budget)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ends, err
    assert says in err
    if says:
        assert err.startswith("this: ended ")
        assert err.count("\n") == 1
    else:
        assert (out, err) == ("done\n", "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts all private memory on Linux alone")
def test_memory_is_limited() -> None:
    code = "try: bytearray(400 << 20)\nexcept MemoryError: sys.exit(BudgetError.exit_code)"
    process = start(f"from edgeq_device.errors import BudgetError\n{code}", "memory=256MiB")
    process.communicate(timeout=60)
    assert process.returncode == BudgetError.exit_code


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_progress_gives_the_time_again() -> None:
    code = """
import time
from edgeq_device.budget import renew
while time.process_time() < 3: renew(budget)
"""
    process = start(code, "seconds=1")
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_is_handed_on(number: signal.Signals) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nprint(1, flush=True)\ntime.sleep(60)"
    process = start(code, "")
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -number


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent has ended")
def test_the_child_ends_with_its_parent() -> None:
    process = start("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)", "")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_limits_the_work_is_done_in_the_same_process() -> None:
    process = start("import os; print(budget, os.getpid(), flush=True)", "off")
    out, _ = process.communicate(timeout=30)
    assert out == f"None {process.pid}\n"


def test_a_wrong_variable_ends_the_program_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "edgeq", "detect"],
        env={**os.environ, "PYTHONPATH": f"{RUNTIME}:{RUNTIME.parents[1]}", "EDGEQ_BUDGET": "memory=much"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("edgeq: EDGEQ_BUDGET has 'memory=much'. Set EDGEQ_BUDGET as in ")
