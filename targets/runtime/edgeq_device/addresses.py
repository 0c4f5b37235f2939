"""Addresses to which a registry may lead, parsed strictly: what two parsers could read differently is refused."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Tuple
from urllib.parse import urldefrag, urljoin

AWAY = "it leads away from https"
PORTS = {"https": 443, "http": 80}
_NO_ADDRESS = "an address that is none"
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][\x21\x22\x24-\x7e]*)?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class Address:
    """An absolute http or https URL."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def origin(self) -> Tuple[str, str, int]:
        """Return what a login belongs to."""
        return self.scheme, self.host, self.port

    @property
    def place(self) -> str:
        """Return HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Tell whether the host is this machine, by its name or a loopback address."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def join(self, reference: str) -> Address:
        """Return the address to which `reference`, absolute or relative, leads from here.

        Raises:
            ValueError: it is not an address that edgeq follows; the message does not repeat it, as it may hold a token.
        """
        try:
            joined = urldefrag(urljoin(f"{self.scheme}://{self.place}{self.target}", reference)).url
        except ValueError:
            raise ValueError(_NO_ADDRESS) from None
        return parse_address(joined)


def parse_address(text: str) -> Address:
    """Return the address that `text` writes: plain ASCII, no user, no password, no fragment.

    Raises:
        ValueError: see `Address.join`.
    """
    match = _URL.fullmatch(text)
    if match is None:
        raise ValueError(_NO_ADDRESS if re.match("https?:", text, re.IGNORECASE) else AWAY)
    scheme, target = match["scheme"].lower(), match["target"] or ""
    port = int(match["port"] or PORTS[scheme])
    if not 0 < port < 65536:
        raise ValueError(_NO_ADDRESS)
    return Address(scheme, match["host"].lower().strip("[]"), port, target if target[:1] == "/" else f"/{target}")
