"""Find the boards that `on` names: one board by its address or by its name in a devices file, or all boards of a
file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgeq.errors import HardwareError, UsageError, suggest
from edgeq.util.folders import user_folder
from edgeq.util.record_files import is_toml, read_toml, toml_table

DEVICES = "devices.toml"
"""Name of the devices file, in the user's configuration folder and in the working directory."""
SSH = "ssh://"
_FIX = "See docs/boards.md for the contents of a devices file"
# No part may begin with "-", because ssh would interpret it as an option.
_NAME, _V6, _USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]*", r"[0-9A-Fa-f]*:[0-9A-Za-z:.%]+", r"[A-Za-z0-9_][A-Za-z0-9_.@+\\-]*"
_ADDRESS = re.compile(rf"ssh://((?P<user>{_USER})@)?(?P<host>{_NAME}|\[{_V6}\])(:(?P<port>\d{{1,5}}))?/?")
_LARGEST_PORT = 65535

Host = Annotated[str, Meta(pattern=rf"^(({_USER})@)?({_NAME}|{_V6})$", description="[user@]host")]
Port = Annotated[int, Meta(ge=1, le=_LARGEST_PORT)]
Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]+$", description="text")]


@dataclass(frozen=True)
class DeviceEntry:
    """Describe the table [devices.NAME] of a devices file.

    Attributes:
        host: a host in a form that ssh accepts, including aliases from ssh's configuration.
        kind: kind of board. Boards of one kind are compared with each other and share work. The default is the board's
            name.
        python: the board's interpreter, with its arguments.
        folder: the only directory on the board that edgeq writes to. The default is edgeq-device in the user's cache.
    """

    host: Host
    port: Port | None = None
    kind: Text = ""
    python: tuple[Text, ...] = ("python3",)
    folder: Text = ""


@dataclass(frozen=True)
class DevicesFile:
    """Describe the contents of devices.toml and fleet.toml."""

    devices: Mapping[str, DeviceEntry]


@dataclass(frozen=True)
class Board(DeviceEntry):
    """Describe one board. Its `host` does not include the user.

    Attributes:
        name: the name or address that the user wrote.
        user: the login name; "" leaves the choice to ssh.
    """

    name: str = ""
    user: str = ""


def find_boards(text: str) -> tuple[Board, ...]:
    """Return the boards that one value of `on` names. The result is empty if the value names something
    else, such as a target.

    Raises:
        UsageError: an address is not valid, or the devices files of the working directory and of the user give the name
            different meanings.
        HardwareError: a devices file is not valid.
    """
    if text.startswith(SSH):
        return (_parse_address(text),)
    # A .toml file may also be a target or a profile, and only its content tells.
    if is_toml(text):
        path = Path(text)
        content = toml_table(path, HardwareError, _FIX)
        return tuple(_read_devices(path).values()) if "devices" in content else ()
    user_boards, local_boards = _load_folder(user_folder("config")), _load_folder(Path())
    # A file in the working directory may come from somebody else, so it must not silently redefine a name of the user.
    if text in local_boards and (user_boards[text] != local_boards[text] if text in user_boards else _is_target(text)):
        raise UsageError(
            f"{DEVICES} in the working directory names a board {text!r}, which is also "
            f"{'a board of yours' if text in user_boards else 'a target'}",
            "Rename it there, or type the board's ssh:// address",
        )
    return ((user_boards | local_boards)[text],) if text in user_boards | local_boards else ()


def _is_target(name: str) -> bool:
    # Imported here, because most addresses never reach this question and the module is slow to load.
    from edgeq.emulate.check import ALL
    from edgeq.hardware.target import is_known

    return name == ALL or is_known(name)


def find_board(text: str) -> Board:
    """Return the one board that `text` names.

    Raises:
        UsageError: `text` names no board, or several boards.
        HardwareError: a devices file is not valid.
    """
    boards = find_boards(text)
    if not boards:
        hint = suggest(text, load_boards()) if load_boards() else "Write ssh://user@host, or a name in devices.toml"
        raise UsageError(f"there is no board {text!r}", hint)
    if len(boards) > 1:
        raise UsageError(f"{text} names {len(boards)} boards", "Name one of them")
    return boards[0]


def load_boards() -> dict[str, Board]:
    """Return the boards in the devices files of the working directory and of the user, by name. If both files contain
    the same name, the user's file wins.

    Raises:
        HardwareError: a file is not valid.
    """
    return _load_folder(Path()) | _load_folder(user_folder("config"))


def _load_folder(folder: Path | None) -> dict[str, Board]:
    return _read_devices(folder / DEVICES) if folder is not None and (folder / DEVICES).is_file() else {}


def _read_devices(path: Path) -> dict[str, Board]:
    content = read_toml(path, DevicesFile, HardwareError, _FIX)
    if not content.devices:
        raise HardwareError(f"{path} names no board", "Add a table [devices.NAME] with its host")
    boards = {}
    for name, entry in content.devices.items():
        user, _, host = entry.host.rpartition("@")
        boards[name] = Board(host, entry.port, entry.kind or name, entry.python, entry.folder, name, user)
    return boards


def _parse_address(address: str) -> Board:
    fix = "Write it like ssh://user@host:port"
    # A password in a command line is visible to every user of the machine.
    if re.match(r"ssh://[^@/]*:[^@/]*@", address):
        raise UsageError("the address of a board contains a password", "Leave it out: set up a key with ssh-copy-id")
    parts = _ADDRESS.fullmatch(address)
    port = int(parts["port"]) if parts and parts["port"] else None
    if parts is None or (port is not None and not 1 <= port <= _LARGEST_PORT):
        raise UsageError(f"{address!r} is not the address of a board", fix)
    host, user = parts["host"].strip("[]"), parts["user"] or ""
    board = Board(host, port, kind=host, name=address, user=user)
    # only the user's file counts: `python` is a command, so a file in the working directory is not trusted
    user_boards = _load_folder(user_folder("config")).values()
    return next(
        (replace(b, name=address) for b in user_boards if (b.host, b.user, b.port) == (host, user, port)), board
    )


def find_fleet(texts: Sequence[str]) -> tuple[Board, ...]:
    """Return all boards that several values of `on` name, without duplicates.

    Raises:
        UsageError: an option names no board.
    """
    fleet: dict[str, Board] = {}
    for text in texts:
        boards = find_boards(text) or (find_board(text),)
        # The same board may be in a file and on its own, and it must not be measured twice at once.
        fleet.update((board.name, board) for board in boards)
    return tuple(fleet.values())
