"""Find the boards that `--on` names: one board by its address or by its name in a devices file, or all boards of a
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
from edgeq.util.record_files import is_toml, read_toml, toml_table
from edgeq.util.registry import user_folder

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


def boards_of(given: str) -> tuple[Board, ...]:
    """Return the boards that the value of an `--on` option names. The result is empty if the value names something
    else, such as a target.

    Raises:
        UsageError: an address is not valid, or the devices files of the working directory and of the user give the name
            different meanings.
        HardwareError: a devices file is not valid.
    """
    if given.startswith(SSH):
        return (_addressed(given),)
    if is_toml(given):
        path = Path(given)
        content = toml_table(path, HardwareError, _FIX)
        return tuple(_read(path).values()) if "devices" in content else ()
    own, here = _boards_in(user_folder("config")), _boards_in(Path())
    if given in here and (own[given] != here[given] if given in own else _is_target(given)):
        raise UsageError(
            f"{DEVICES} in the working directory names a board {given!r}, which is also "
            f"{'a board of yours' if given in own else 'a target'}",
            "Rename it there, or type the board's ssh:// address",
        )
    return ((own | here)[given],) if given in own | here else ()


def _is_target(name: str) -> bool:
    from edgeq.emulate.check import ALL
    from edgeq.hardware.target import is_known

    return name == ALL or is_known(name)


def one_board(given: str) -> Board:
    """Return the one board that `given` names.

    Raises:
        UsageError: `given` names no board, or several boards.
        HardwareError: a devices file is not valid.
    """
    found = boards_of(given)
    if not found:
        hint = suggest(given, known_boards()) if known_boards() else "Write ssh://user@host, or a name in devices.toml"
        raise UsageError(f"there is no board {given!r}", hint)
    if len(found) > 1:
        raise UsageError(f"{given} names {len(found)} boards", "Name one of them")
    return found[0]


def known_boards() -> dict[str, Board]:
    """Return the boards in the devices files of the working directory and of the user, by name. If both files contain
    the same name, the user's file wins.

    Raises:
        HardwareError: a file is not valid.
    """
    return _boards_in(Path()) | _boards_in(user_folder("config"))


def _boards_in(folder: Path | None) -> dict[str, Board]:
    return _read(folder / DEVICES) if folder is not None and (folder / DEVICES).is_file() else {}


def _read(path: Path) -> dict[str, Board]:
    found = read_toml(path, DevicesFile, HardwareError, _FIX)
    if not found.devices:
        raise HardwareError(f"{path} names no board", "Add a table [devices.NAME] with its host")
    boards = {}
    for name, entry in found.devices.items():
        user, _, host = entry.host.rpartition("@")
        boards[name] = Board(host, entry.port, entry.kind or name, entry.python, entry.folder, name, user)
    return boards


def _addressed(address: str) -> Board:
    fix = "Write it like ssh://user@host:port"
    if re.match(r"ssh://[^@/]*:[^@/]*@", address):
        raise UsageError("the address of a board contains a password", "Leave it out: set up a key with ssh-copy-id")
    parts = _ADDRESS.fullmatch(address)
    port = int(parts["port"]) if parts and parts["port"] else None
    if parts is None or (port is not None and not 1 <= port <= _LARGEST_PORT):
        raise UsageError(f"{address!r} is not the address of a board", fix)
    host, user = parts["host"].strip("[]"), parts["user"] or ""
    board = Board(host, port, kind=host, name=address, user=user)
    # only the user's file counts: `python` is a command, so a file in the working directory is not trusted
    own = _boards_in(user_folder("config")).values()
    return next((replace(b, name=address) for b in own if (b.host, b.user, b.port) == (host, user, port)), board)


def fleet_of(given: Sequence[str]) -> tuple[Board, ...]:
    """Return all boards that several `--on` options name, without duplicates.

    Raises:
        UsageError: an option names no board.
    """
    found: dict[str, Board] = {}
    for text in given:
        boards = boards_of(text) or (one_board(text),)
        found.update((board.name, board) for board in boards)
    return tuple(found.values())
