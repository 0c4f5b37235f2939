"""Send requests to one repository of an OCI registry, with the login that Docker stores for that registry.

A login goes only to the registry in the reference, and to the realm that this registry itself names, over TLS or on
this machine. The resulting token goes only to the registry. No other host gets the login or the token, wherever
redirects and upload locations lead.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, TypeVar, Union
from urllib.parse import urlencode

from edgeq_device.errors import RuntimeUnavailableError, UsageError
from edgeq_device.system.plainjson import parse_json
from edgeq_device.trust.connection import (
    AWAY,
    LIMITS,
    Address,
    Deadline,
    Limits,
    Reply,
    ServerRequest,
    exchange,
    parse_address,
    parse_challenges,
    read_credentials,
    translate_errors,
)

AT_ONCE = 8
"""Number of blobs that are sent or fetched at the same time."""
# Registries redirect once, to their storage. More is a loop.
MAX_REDIRECTS = 5
_MAX_TOKEN = 256 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-f:]+\](?::[0-9]{1,5})?)"
    r"/(?P<repository>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
# Visible ASCII only, because a line break in a token would add a header.
_TOKEN = re.compile(r"[\x21-\x7e]{1,65536}")
_LOG_IN = "Log in with docker login or oras login"
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class ArtifactReference:
    """Describe an artifact in a registry by its reference, HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        tag, digest = (f":{self.tag}" if self.tag else ""), (f"@{self.digest}" if self.digest else "")
        return f"{self.host}/{self.repository}{tag}{digest}"


def parse_reference(text: str) -> ArtifactReference:
    """Return the reference in `text`.

    Raises:
        UsageError: the text is not a reference.
    """
    # The pattern backtracks, so its input is short.
    match = _REFERENCE.fullmatch(text) if len(text) < 500 else None
    if match is None:
        login, at, place = re.sub(r"^\w+:/+|@sha256:[^@]*$", "", text).rpartition("@")
        if at and ("/" in place or "/" not in login):
            raise UsageError(
                f"{place[:100]!a} has a login in front of it",
                "Leave it out, and log in with docker login or oras login",
            )
        raise UsageError(
            f"{text[:100]!a} is not a reference to a registry", "Write HOST/REPOSITORY, :TAG or @sha256:… after it"
        )
    return ArtifactReference(**{name: value or "" for name, value in match.groupdict().items()})


class OciRepository:
    """Send HTTP requests to the repository of a reference. Use https for every host except this machine."""

    def __init__(self, reference: ArtifactReference, limits: Limits = LIMITS) -> None:
        self.reference = reference
        self.deadline = Deadline(limits)
        with translate_errors(str(reference)):
            home = parse_address(f"https://{reference.host}/v2/{reference.repository}/")
            # A registry on this machine rarely has a certificate, and the text does not leave the machine.
            self._home = parse_address(f"http://{reference.host}{home.target}") if home.local else home
        self._authorization = ""

    def send(self, request: ServerRequest, place: Union[str, Address]) -> Reply:
        """Return the answer to `request` at `place`, which is an address or a path relative to the repository.

        Raises:
            RuntimeUnavailableError: the registry does not answer in time, or refuses.
        """
        answer = self._send_with_login(request, place)
        if not 200 <= answer.status < 300:
            raise self._build_error(answer)
        return answer

    def has(self, place: str) -> bool:
        """Return whether something exists at `place`."""
        answer = self._send_with_login(ServerRequest("HEAD"), place)
        if answer.status != 404 and not 200 <= answer.status < 300:
            raise self._build_error(answer)
        answer.body.close()
        return answer.status != 404

    def map_items(self, work: Callable[[_T], _R], items: Iterable[_T]) -> List[_R]:
        """Return the results of `work` for all items, in any order. `AT_ONCE` items are processed at a time, and the
        first failure stops them all.
        """
        with ThreadPoolExecutor(AT_ONCE) as workers:
            futures = [workers.submit(work, item) for item in items]
            try:
                return [future.result() for future in as_completed(futures)]
            except BaseException:
                # The other transfers end at their next wait, not after minutes.
                self.deadline.stop()
                for future in futures:
                    future.cancel()
                raise

    def _build_error(self, answer: Reply) -> RuntimeUnavailableError:
        answer.body.close()
        why = {401: "its login was refused", 403: "access is denied", 404: "it was not found"}
        reason = why.get(answer.status, "the registry refuses")
        return RuntimeUnavailableError(
            f"{self.reference}: {reason} (HTTP {answer.status})", "Check the name and the login"
        )

    def _send_with_login(self, request: ServerRequest, place: Union[str, Address]) -> Reply:
        with translate_errors(str(self.reference)):
            address = place if isinstance(place, Address) else self._home.join(place)
            # Ask without a token first: the answer says which realm issues one.
            answer = self._follow(request, address, self._home, self._authorization)
            if answer.status == 401:
                self._authorization = self._answer_challenge(answer.headers.get_all("WWW-Authenticate", []))
                answer = self._follow(request, address, self._home, self._authorization)
        return answer

    def _follow(self, request: ServerRequest, address: Address, owner: Address, authorization: str) -> Reply:
        """Send `request` and follow redirects of GET and HEAD. `authorization` goes only to the origin of `owner`.

        Raises:
            RuntimeUnavailableError: a redirect led to another origin, which demands a login.
        """
        at_owner = True
        for _ in range(MAX_REDIRECTS + 1):
            if address.scheme != "https" and not (self._home.local and address.local):
                raise ValueError(AWAY)
            # After one hop elsewhere, a redirect back does not get the login again.
            at_owner = at_owner and address.origin == owner.origin
            login = {"Authorization": authorization} if at_owner and authorization else {}
            sent = replace(request, headers={**request.headers, **login})
            answer = exchange(sent, address, self.deadline, str(self.reference))
            if answer.status == 401:
                answer.body.close()
                if not at_owner:
                    raise RuntimeUnavailableError(
                        f"{self.reference}: it redirects to {address.place}, which demands a login",
                        "Check the registry: edgeq sends a login only to its own host",
                    )
            if answer.status not in _REDIRECTS or request.method not in ("GET", "HEAD"):
                return answer
            answer.body.close()
            try:
                address = answer.find_location()
            except ValueError as error:
                raise ValueError(f"HTTP {answer.status}: {error}") from None
        raise ValueError(f"over {MAX_REDIRECTS} redirects")

    def _answer_challenge(self, headers: Iterable[str]) -> str:
        """Return the Authorization header for the first of the registry's challenges that edgeq can answer."""
        login = read_credentials(self.reference.host)
        for kind, values in parse_challenges(headers):
            # Basic needs no further request.
            if kind == "basic" and login:
                return f"Basic {login}"
            if kind == "bearer":
                try:
                    realm = parse_address(values.get("realm", ""))
                except ValueError:
                    continue
                if realm.scheme == self._home.scheme and (realm.scheme == "https" or realm.local):
                    return f"Bearer {self._fetch_token(realm, values, login)}"
        raise RuntimeUnavailableError(f"{self.reference} needs a login", _LOG_IN)

    def _fetch_token(self, realm: Address, values: Mapping[str, str], login: str) -> str:
        """Return the token that `realm` issues for the service and scope of the challenge."""
        # Only what the registry names: it must not get a token for more.
        query = urlencode({name: values[name] for name in ("service", "scope") if name in values})
        address = replace(realm, target=f"{realm.target}{'&' if '?' in realm.target else '?'}{query}")
        request = ServerRequest("GET", max_bytes=_MAX_TOKEN)
        answer = self._follow(request, address, realm, f"Basic {login}" if login else "")
        if not 200 <= answer.status < 300:
            raise self._build_error(answer)
        with answer:
            data = answer.body.read(_MAX_TOKEN + 1)
        reply: Dict[str, Any] = {}
        if len(data) <= _MAX_TOKEN:
            reply = parse_json(data, f"{self.reference.host}: token")
        value = reply.get("token") or reply.get("access_token")
        if not isinstance(value, str) or _TOKEN.fullmatch(value) is None:
            raise RuntimeUnavailableError(f"{self.reference}: the token service sent no token", "Check the registry")
        return value
