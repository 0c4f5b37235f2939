"""Logins to registries: how one asks for a login, and the one that Docker keeps for it."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

_MAX_CHALLENGES = 8192
_PART = re.compile(r"""([\w!#$%&'*+.^`|~-]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+)))?""", re.ASCII)
_ESCAPED = re.compile(r"\\(.)")


def challenges(headers: Iterable[str]) -> List[Tuple[str, Dict[str, str]]]:
    """Return the scheme and the parameters of each challenge, their names in lower case.

    Args:
        headers: the values of all WWW-Authenticate headers; each may have several challenges.
    """
    found: List[Tuple[str, Dict[str, str]]] = []
    for name, quoted, plain in _PART.findall(",".join(headers)[:_MAX_CHALLENGES]):
        value = _ESCAPED.sub(r"\1", quoted) or plain
        if not value:
            found.append((name.lower(), {}))
        elif found:
            found[-1][1].setdefault(name.lower(), value)
    return found


def credentials(host: str) -> str:
    """Return base64 of USER:PASSWORD as `docker login` and `oras login` keep it for exactly `host`, or ""."""
    try:
        folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
        known: Any = json.loads((folder / "config.json").read_bytes())
        login = known["auths"][host]["auth"]
        return base64.b64encode(base64.b64decode(login)).decode("ascii")
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return ""
