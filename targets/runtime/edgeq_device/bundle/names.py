"""Check the names of files, components and variants, which come from an untrusted bundle."""

from __future__ import annotations

import re
from typing import Dict, Iterable, Set

from edgeq_device.errors import AGAIN, BundleError

MAX_NAME = 512
MAX_FOLDERS = 20_000
"""Maximum number of folders in all file names together. Unpacking a bundle creates each of them."""
# Control characters, line breaks, bidirectional-text marks, lone surrogates, and characters that Windows reserves.
_CONTROL_OR_RESERVED = re.compile('[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\\\:*?"<>|]')
# Windows treats these names as devices, in every folder and with every suffix.
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


def check_file_name(name: str, context: str) -> str:
    """Return `name` if it is a relative POSIX path that stays inside the bundle on every operating system.

    Raises:
        BundleError: the name is absolute or too long, or contains `..`, a backslash, a drive, a device name or a
            control character.
    """
    if not name or len(name) > MAX_NAME:
        raise BundleError(f"{context}: file name {name[:60]!r} is empty or longer than {MAX_NAME} characters", AGAIN)
    if _CONTROL_OR_RESERVED.search(name):
        raise BundleError(f"{context}: file name {name!r} has a character that is not allowed", AGAIN)
    if name.startswith("/"):
        raise BundleError(f"{context}: file name {name!r} is absolute", AGAIN)
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise BundleError(f"{context}: file name {name!r} is not a plain path inside the bundle", AGAIN)
        if part[-1] in ". ":
            raise BundleError(f"{context}: file name {name!r} ends in a dot or a space, which Windows drops", AGAIN)
        if _RESERVED.fullmatch(part.partition(".")[0].rstrip()):
            raise BundleError(f"{context}: file name {name!r} is the name of a device on Windows", AGAIN)
    return name


def check_file_names(names: Iterable[str], context: str) -> None:
    """Refuse a set of names if two of them mean the same file, or if one is both a file and a directory.

    The comparison ignores case, because Windows and macOS do.
    """
    names_by_folded: Dict[str, str] = {}
    for name in names:
        folded = check_file_name(name, context).casefold()
        if folded in names_by_folded:
            raise BundleError(f"{context}: {name!r} occurs twice (the other is {names_by_folded[folded]!r})")
        names_by_folded[folded] = name
    folders: Set[str] = set()
    # A folder exists only by the names of its files.
    for name in names_by_folded:
        parent = name.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
        if len(folders) > MAX_FOLDERS:
            raise BundleError(f"{context}: the files are in more than {MAX_FOLDERS} folders")
    for name in sorted(folders & names_by_folded.keys()):
        # Name one file inside, so that the sender can find the clash.
        inside = next(
            names_by_folded[name_below] for name_below in names_by_folded if name_below.startswith(f"{name}/")
        )
        raise BundleError(f"{context}: {names_by_folded[name]!r} is both a file and the directory of {inside!r}")


def is_plain_name(name: object) -> bool:
    """Return whether `name` can name a component or a variant. It may contain letters, digits and `._+-`, and has at
    most 100 characters.
    """
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None
