"""Which names a bundle may hold. A name is untrusted until it has been checked here."""

from __future__ import annotations

import re
from typing import Dict, Iterable, Set

from edgeq_device.errors import AGAIN, BundleError

MAX_NAME = 512
MAX_FOLDERS = 20_000
"""Of all names together: each becomes a directory where the bundle is unpacked."""
# Control characters, line breaks, marks of direction, lone surrogates, and what Windows reserves.
_CONTROL_OR_RESERVED = re.compile('[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\\\:*?"<>|]')
# Windows takes these for devices, in every folder and with every suffix.
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


def check_file_name(name: str, where: str) -> str:
    """`name` if it is a relative POSIX path that stays inside the bundle on every operating system.

    Raises:
        BundleError: absolute, `..`, a backslash, a drive or a device name, a control character, or too long.
    """
    if not name or len(name) > MAX_NAME:
        raise BundleError(f"{where}: file name {name[:60]!r} is empty or longer than {MAX_NAME} characters", AGAIN)
    if _CONTROL_OR_RESERVED.search(name):
        raise BundleError(f"{where}: file name {name!r} has a character that is not allowed", AGAIN)
    if name.startswith("/"):
        raise BundleError(f"{where}: file name {name!r} is absolute", AGAIN)
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise BundleError(f"{where}: file name {name!r} is not a plain path inside the bundle", AGAIN)
        if part[-1] in ". ":
            raise BundleError(f"{where}: file name {name!r} ends in a dot or a space, which Windows drops", AGAIN)
        if _DEVICES.fullmatch(part.partition(".")[0].rstrip()):
            raise BundleError(f"{where}: file name {name!r} is that of a device on Windows", AGAIN)
    return name


def check_file_names(names: Iterable[str], where: str) -> None:
    """Refuse a set of names in which two would meet in one file, or one would be a file and a directory at once.

    Names are compared without case, as Windows and macOS compare them.
    """
    seen: Dict[str, str] = {}
    for name in names:
        folded = check_file_name(name, where).casefold()
        if folded in seen:
            raise BundleError(f"{where}: {name!r} is there twice (the other is {seen[folded]!r})")
        seen[folded] = name
    folders: Set[str] = set()
    for name in seen:
        parent = name.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
        if len(folders) > MAX_FOLDERS:
            raise BundleError(f"{where}: the files lie in more than {MAX_FOLDERS} folders")
    for name in sorted(folders & seen.keys()):
        inside = next(seen[other] for other in seen if other.startswith(f"{name}/"))
        raise BundleError(f"{where}: {seen[name]!r} is both a file and the directory of {inside!r}")


def is_plain_name(name: object) -> bool:
    """Whether `name` can name a component or a variant: letters, digits and `._+-`, at most 100 characters."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None
