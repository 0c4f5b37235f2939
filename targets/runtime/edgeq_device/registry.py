"""Requests to one repository of an OCI registry, with the login that Docker keeps for it.

A login goes to the registry that was named and to the realm that this registry names itself, over TLS or on this
machine; the token that it brings goes to the registry. No other host gets either, wherever redirects and upload
locations lead.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, TypeVar, Union
from urllib.parse import urlencode

from edgeq_device.addresses import AWAY, Address, parse_address
from edgeq_device.connection import LIMITS, Deadline, Limits
from edgeq_device.errors import RuntimeUnavailableError, UsageError
from edgeq_device.exchange import Answer, Request, connected, exchange
from edgeq_device.login import challenges, credentials
from edgeq_device.plainjson import parse_json

AT_ONCE = 8
"""Blobs that are sent or fetched at the same time."""
MAX_REDIRECTS = 5
_MAX_TOKEN = 256 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-f:]+\](?::[0-9]{1,5})?)"
    r"/(?P<repository>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_TOKEN = re.compile(r"[\x21-\x7e]{1,65536}")
_LOG_IN = "Log in with docker login or oras login"
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Reference:
    """A place in a registry: HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        tag, digest = (f":{self.tag}" if self.tag else ""), (f"@{self.digest}" if self.digest else "")
        return f"{self.host}/{self.repository}{tag}{digest}"


def parse_reference(text: str) -> Reference:
    """The reference that `text` writes.

    Raises:
        UsageError: it is none.
    """
    match = _REFERENCE.fullmatch(text) if len(text) < 500 else None
    if match is None:
        login, at, place = re.sub(r"^\w+:/+|@sha256:[^@]*$", "", text).rpartition("@")
        if at and ("/" in place or "/" not in login):
            raise UsageError(
                f"{place[:100]!a} with a login in front of it is no place in a registry",
                "Leave it out: logins are those of docker login and oras login",
            )
        raise UsageError(
            f"{text[:100]!a} is no place in a registry", "Write HOST/REPOSITORY, :TAG or @sha256:… after it"
        )
    return Reference(**{name: value or "" for name, value in match.groupdict().items()})


class Registry:
    """HTTP to the repository of a reference; https always, but for this very machine."""

    def __init__(self, reference: Reference, limits: Limits = LIMITS) -> None:
        self.reference = reference
        self.deadline = Deadline(limits)
        with connected(str(reference)):
            home = parse_address(f"https://{reference.host}/v2/{reference.repository}/")
            self._home = parse_address(f"http://{reference.host}{home.target}") if home.local else home
        self._authorization = ""

    def send(self, request: Request, place: Union[str, Address]) -> Answer:
        """Return the answer to `request` at `place`, an address or one relative to the repository.

        Raises:
            RuntimeUnavailableError: no answer in time, or a refusal.
        """
        answer = self._answer(request, place)
        if not 200 <= answer.status < 300:
            raise self._refused(answer)
        return answer

    def has(self, place: str) -> bool:
        """Tell whether there is something at `place`."""
        answer = self._answer(Request("HEAD"), place)
        if answer.status != 404 and not 200 <= answer.status < 300:
            raise self._refused(answer)
        answer.body.close()
        return answer.status != 404

    def each(self, work: Callable[[_T], _R], items: Iterable[_T]) -> List[_R]:
        """Return what `work` returns for each item, in any order, `AT_ONCE` at a time; the first failure ends all."""
        with ThreadPoolExecutor(AT_ONCE) as workers:
            futures = [workers.submit(work, item) for item in items]
            try:
                return [future.result() for future in as_completed(futures)]
            except BaseException:
                self.deadline.stop()
                for future in futures:
                    future.cancel()
                raise

    def _refused(self, answer: Answer) -> RuntimeUnavailableError:
        answer.body.close()
        why = {401: "its login was refused", 403: "access is denied", 404: "it is not there"}
        reason = why.get(answer.status, "the registry refuses")
        return RuntimeUnavailableError(f"{self.reference}: {reason} (HTTP {answer.status})", "Look at name and login")

    def _answer(self, request: Request, place: Union[str, Address]) -> Answer:
        with connected(str(self.reference)):
            address = place if isinstance(place, Address) else self._home.join(place)
            answer = self._follow(request, address, self._home, self._authorization)
            if answer.status == 401:
                self._authorization = self._login(answer.headers.get_all("WWW-Authenticate", []))
                answer = self._follow(request, address, self._home, self._authorization)
        return answer

    def _follow(self, request: Request, address: Address, owner: Address, authorization: str) -> Answer:
        """Send `request` and follow redirects of GET and HEAD; `authorization` goes to the origin of `owner` alone.

        Raises:
            RuntimeUnavailableError: another origin had a part in an answer that asks for a login.
        """
        own = True
        for _ in range(MAX_REDIRECTS + 1):
            if address.scheme != "https" and not (self._home.local and address.local):
                raise ValueError(AWAY)
            own = own and address.origin == owner.origin
            login = {"Authorization": authorization} if own and authorization else {}
            sent = replace(request, headers={**request.headers, **login})
            answer = exchange(sent, address, self.deadline, str(self.reference))
            if answer.status == 401:
                answer.body.close()
                if not own:
                    raise RuntimeUnavailableError(
                        f"{self.reference}: {address.place}, to which it leads, asks for a login",
                        "Look at the registry: logins are for its own host alone",
                    )
            if answer.status not in _REDIRECTS or request.method not in ("GET", "HEAD"):
                return answer
            answer.body.close()
            try:
                address = answer.leads_to()
            except ValueError as error:
                raise ValueError(f"HTTP {answer.status}: {error}") from None
        raise ValueError(f"over {MAX_REDIRECTS} redirects")

    def _login(self, asked: Iterable[str]) -> str:
        """Return the Authorization header for the first of the registry's challenges that can be met."""
        login = credentials(self.reference.host)
        for kind, values in challenges(asked):
            if kind == "basic" and login:
                return f"Basic {login}"
            if kind == "bearer":
                try:
                    realm = parse_address(values.get("realm", ""))
                except ValueError:
                    continue
                if realm.scheme == self._home.scheme and (realm.scheme == "https" or realm.local):
                    return f"Bearer {self._token(realm, values, login)}"
        raise RuntimeUnavailableError(f"{self.reference} needs a login", _LOG_IN)

    def _token(self, realm: Address, values: Mapping[str, str], login: str) -> str:
        """Return the token that `realm` gives for what the registry asks."""
        query = urlencode({name: values[name] for name in ("service", "scope") if name in values})
        address = replace(realm, target=f"{realm.target}{'&' if '?' in realm.target else '?'}{query}")
        asked = Request("GET", most=_MAX_TOKEN)
        answer = self._follow(asked, address, realm, f"Basic {login}" if login else "")
        if not 200 <= answer.status < 300:
            raise self._refused(answer)
        with answer:
            data = answer.body.read(_MAX_TOKEN + 1)
        found: Dict[str, Any] = {}
        if len(data) <= _MAX_TOKEN:
            found = parse_json(data, f"{self.reference.host}: token")
        value = found.get("token") or found.get("access_token")
        if not isinstance(value, str) or _TOKEN.fullmatch(value) is None:
            raise RuntimeUnavailableError(f"{self.reference}: what gives tokens sent none", "Look at the registry")
        return value
