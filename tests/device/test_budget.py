"""Test the budget: its messages, and that a process under it ends with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from edgeq_device.errors import BudgetError, UsageError
from edgeq_device.system.budget import Budget, read_budget

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
def test_reads_budgets_from_the_variable(text: str, budget: Budget) -> None:
    assert read_budget({"EDGEQ_BUDGET": text}) == budget


@pytest.mark.parametrize(
    "text", ["x", "memory", "memory=-1", "memory=1GB", "seconds=1.5", "sample=0", "sample=²", "on"]
)
def test_refuses_malformed_budgets(text: str) -> None:
    with pytest.raises(UsageError, match="EDGEQ_BUDGET"):
        read_budget({"EDGEQ_BUDGET": text})


def start(code: str, budget: str) -> subprocess.Popen[str]:
    """Start a process that runs `code` after `budget = confine("this")`. It restores the default action for SIGINT,
    because a shell that starts the tests in the background makes them ignore it.
    """
    whole = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(RUNTIME)!r})\nfrom edgeq_device.system.budget import confine\n"
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts all private memory on Linux alone")
def test_a_step_has_less_memory_for_a_while() -> None:
    code = """
from edgeq_device.system.budget import allowance
with allowance(200 << 20):
    bytearray(100 << 20)
    try:
        bytearray(400 << 20)
        sys.exit(1)
    except MemoryError:
        pass
bytearray(400 << 20)
"""
    for budget, ends in (("memory=2GiB", 0), ("memory=0", 0), ("off", 1)):
        process = start(code, budget)
        process.communicate(timeout=60)
        assert process.returncode == ends


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_step_has_a_tenth_of_the_time() -> None:
    process = start(
        "from edgeq_device.system.budget import allowance\nwith allowance(1 << 30):\n    while True: pass", "seconds=20"
    )
    before = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == BudgetError.exit_code
    assert "after 20 s of processor time" in err
    assert "or a tenth" in err
    assert time.monotonic() - before < 15


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_progress_gives_the_time_again() -> None:
    code = """
import time
from edgeq_device.system.budget import renew
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


HOSTILE = "x\x1b]0;owned\x07\x1b[2J\nall variants passed\x9b2J"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("budget", ["", "off"])
def test_output_of_libraries_moves_no_cursor(budget: str) -> None:
    """No output of C code, child processes or Python moves the cursor, on either descriptor, even without a final
    newline.
    """
    code = f"""
import os, subprocess, warnings
text = {HOSTILE!r}
print("result", flush=True)
warnings.warn("four " + text)
os.write(1, ("\x1b[1;31mone " + text + "\x1b[m\\n").encode())
subprocess.run([sys.executable, "-c", "import sys; print(sys.argv[1], file=sys.stderr)", "two " + text], check=True)
print("five " + text)
os.write(2, ("three " + text).encode())
sys.exit(5)
"""
    process = start(code, budget)
    out, err = process.communicate(timeout=60)
    shown = "x\\x1b]0;owned\\x07\\x1b[2J"
    assert process.returncode == 5
    assert out == f"result\nfive {shown}\nall variants passed\\x9b2J\n"
    for word in ("one", "two", "three"):
        assert f"| {word} {shown}\n| all variants passed\\x9b2J\n" in err
    assert f"UserWarning: four {shown}\n" in err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("ends", ["sys.exit(3)", "os.abort()"])
def test_all_that_was_printed_arrives_and_a_process_left_behind_is_not_waited_for(ends: str) -> None:
    code = f"""
import os, subprocess
subprocess.Popen(["sleep", "20"])
for number in range(20000): os.write(2, b"%d\\n" % number)
{ends}
"""
    begin = time.monotonic()
    process = start(code, "")
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 15
    assert err.startswith("".join(f"| {number}\n" for number in range(20000)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_nobody_elses(closed: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(RUNTIME)!r})\nfrom edgeq_device.system.budget import confine\n"
        "confine('this')\nprint('x'); print('y', file=sys.stderr); sys.exit(3)"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -I -c "$1" {closed}', sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "" if "1>" in closed else "x\n",
        "" if "2>" in closed else "y\n",
    )


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
