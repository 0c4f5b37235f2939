from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.errors import EdgeqError, HardwareError, UsageError
from edgeq.remote.devices import Board, find_board, find_boards, find_fleet, load_boards

FLEET = """
[devices.a]
host = "pi@10.0.0.5"
port = 2222
kind = "raspberry-pi-5"
[devices.b]
host = "board-b"
python = ["python3.11", "-X", "utf8"]
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_config_path", lambda app: tmp_path / "config")


def test_an_address() -> None:
    assert find_board("ssh://pi@10.0.0.5:2222") == Board(
        "10.0.0.5", 2222, kind="10.0.0.5", name="ssh://pi@10.0.0.5:2222", user="pi"
    )
    assert find_board("ssh://board").host == "board"


@pytest.mark.parametrize(
    "address",
    [
        "ssh://",
        "ssh://-oProxyCommand=x",
        "ssh://-l@host",
        "ssh://h/path",
        "ssh://h:99999",
        "ssh://h:" + "9" * 5000,
        "ssh://u:secret@h",
    ],
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UsageError):
        find_board(address)


def test_names_and_files(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text(FLEET)
    assert find_board("a") == Board("10.0.0.5", 2222, "raspberry-pi-5", name="a", user="pi")
    assert find_board("b").python == ("python3.11", "-X", "utf8")
    assert find_board("b").kind == "b"
    assert find_boards("raspberry-pi-5") == ()
    assert [board.name for board in find_fleet(["devices.toml", "a"])] == ["a", "b"]
    with pytest.raises(UsageError, match="there is no board 'c'"):
        find_board("c")
    with pytest.raises(UsageError, match="names 2 boards"):
        find_board("devices.toml")


def write_own(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "devices.toml").write_text(text)


def test_the_working_directory_gives_no_other_board_a_name_of_the_users(tmp_path: Path) -> None:
    write_own(tmp_path, FLEET.replace('"pi@10.0.0.5"', '"mine"') + '[devices.z]\nhost = "z"\n')
    (tmp_path / "devices.toml").write_text(FLEET + '[devices.theirs]\nhost = "t"\n')
    with pytest.raises(UsageError, match=r"names a board 'a', which is also a board of yours\..*ssh://"):
        find_board("a")
    assert {name: find_board(name).host for name in ("b", "z", "theirs")} == {"b": "board-b", "z": "z", "theirs": "t"}
    assert load_boards()["a"].host == "mine"


@pytest.mark.parametrize("name", ["all", "auto", "haswell", "raspberry-pi-5"])
def test_the_working_directory_makes_no_board_of_a_target(name: str, tmp_path: Path) -> None:
    assert find_boards(name) == ()
    (tmp_path / "devices.toml").write_text(f'[devices.{name}]\nhost = "theirs"\n')
    with pytest.raises(UsageError, match="which is also a target"):
        find_boards(name)
    write_own(tmp_path, f'[devices.{name}]\nhost = "theirs"\n')
    assert find_board(name).host == "theirs"


def test_an_address_of_a_board_brings_the_users_own_settings(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text(FLEET.replace("port = 2222", 'port = 2222\npython = ["sh", "-c", "evil"]'))
    assert find_board("ssh://pi@10.0.0.5:2222").python == ("python3",)
    write_own(tmp_path, FLEET)
    assert find_board("ssh://pi@10.0.0.5:2222").kind == "raspberry-pi-5"


@pytest.mark.parametrize(
    "text",
    [
        '[devices.a]\nhost = "-oProxyCommand=x"',
        '[devices.a]\nhost = "h"\nhots = 1',
        "[devices.a]\nport = 22",
        '[devices.a]\nhost = "h"\nport = 0',
        "devices = 1",
        "[devices]",
    ],
)
def test_a_file_that_is_not_as_it_should_be(text: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(HardwareError, match=r"fleet\.toml"):
        find_boards("fleet.toml")


def test_a_target_file_is_no_fleet(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('title = "x"\nextends = "auto"\n')
    assert find_boards("mine.toml") == ()


def test_a_file_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "FLEET.TOML").write_text(FLEET)
    assert len(find_boards("FLEET.TOML")) == 2


def test_errors_are_edgeqs() -> None:
    with pytest.raises(EdgeqError):
        find_boards("absent.toml")
