"""Send requests to one repository of an OCI registry, with the login that Docker stores for that registry.

A login goes only to the registry in the reference, and to the realm that this registry itself names, over TLS or on
this machine. The resulting token goes only to the registry. No other host gets the login or the token, wherever
redirects and upload locations lead.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple, TypeVar, Union
from urllib.parse import urlencode

from edgeq_device.bundle.manifest import MAX_FILES, MAX_SIZE, FileRecord, check_content, check_file_names
from edgeq_device.bundle.package import open_bundle
from edgeq_device.errors import BundleError, OutputError, RuntimeUnavailableError, UsageError
from edgeq_device.system.places import PrivateFolder, name_stage, remove_ended
from edgeq_device.system.plainjson import parse_json
from edgeq_device.trust.connection import (
    AWAY,
    LIMITS,
    Address,
    Answer,
    Deadline,
    Limits,
    ServerRequest,
    exchange,
    parse_address,
    parse_challenges,
    read_credentials,
    translate_errors,
)
from edgeq_device.trust.keys import Trust, check_signature

AT_ONCE = 8
"""Number of blobs that are sent or fetched at the same time."""
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
            self._home = parse_address(f"http://{reference.host}{home.target}") if home.local else home
        self._authorization = ""

    def send(self, request: ServerRequest, place: Union[str, Address]) -> Answer:
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
                self.deadline.stop()
                for future in futures:
                    future.cancel()
                raise

    def _build_error(self, answer: Answer) -> RuntimeUnavailableError:
        answer.body.close()
        why = {401: "its login was refused", 403: "access is denied", 404: "it was not found"}
        reason = why.get(answer.status, "the registry refuses")
        return RuntimeUnavailableError(
            f"{self.reference}: {reason} (HTTP {answer.status})", "Check the name and the login"
        )

    def _send_with_login(self, request: ServerRequest, place: Union[str, Address]) -> Answer:
        with translate_errors(str(self.reference)):
            address = place if isinstance(place, Address) else self._home.join(place)
            answer = self._follow(request, address, self._home, self._authorization)
            if answer.status == 401:
                self._authorization = self._answer_challenge(answer.headers.get_all("WWW-Authenticate", []))
                answer = self._follow(request, address, self._home, self._authorization)
        return answer

    def _follow(self, request: ServerRequest, address: Address, owner: Address, authorization: str) -> Answer:
        """Send `request` and follow redirects of GET and HEAD. `authorization` goes only to the origin of `owner`.

        Raises:
            RuntimeUnavailableError: a redirect led to another origin, which demands a login.
        """
        at_owner = True
        for _ in range(MAX_REDIRECTS + 1):
            if address.scheme != "https" and not (self._home.local and address.local):
                raise ValueError(AWAY)
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


MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
FILE_PATH = "org.cncf.model.filepath"
# The distribution specification requires every registry to accept a manifest of this size.
_MAX_MANIFEST = 4 * 1024 * 1024
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def pull(reference: ArtifactReference, output: Path, trust: Optional[Trust] = None, limits: Limits = LIMITS) -> str:
    """Write the bundle at `reference` to the directory `output`, after all checks of `open_bundle`.

    Returns:
        The sha256 of the bundle's manifest.

    Raises:
        UsageError: the reference has no digest.
        OutputError: `output` exists or cannot be written.
        RuntimeUnavailableError: the registry does not answer, is slower than `limits`, or does not have the bundle.
        BundleError: the received data do not match the digest, are not a bundle, or are not signed as `trust` demands.
    """
    if output.exists() or output.is_symlink():
        raise OutputError(f"{output} exists already", "Choose another output")
    remove_ended(output)
    private = PrivateFolder(output.absolute().with_name(name_stage(output)))
    folder = private.path
    try:
        try:
            private.create()
        except OSError as error:
            raise OutputError(f"{output} cannot be written ({error.strerror})") from error
        fetch(reference, folder, limits)
        with open_bundle(folder) as bundle:
            check_signature(bundle, trust)
            digest = bundle.manifest_sha256
        folder.chmod(0o755)
        folder.rename(output)
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error.strerror})") from error
    finally:
        private.remove()
    return digest


def fetch(reference: ArtifactReference, folder: Path, limits: Limits = LIMITS) -> None:
    """Write the files of the artifact at `reference` into `folder`. Check each file against the size and hash in the
    artifact's manifest.

    `open_bundle` checks the content of the files later.
    """
    if not reference.digest:
        raise UsageError(f"{reference} has no digest", "Add the @sha256:… that `edgeq push` prints")
    registry = OciRepository(reference, limits)
    request = ServerRequest("GET", {"Accept": MANIFEST_TYPE}, max_bytes=_MAX_MANIFEST)
    with registry.send(request, f"manifests/{reference.digest}") as answer:
        data = answer.body.read(_MAX_MANIFEST + 1)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != reference.digest:
        raise BundleError(
            f"{reference}: the manifest that the registry sent does not have that digest", "Do not use this registry"
        )
    layers = read_layers(parse_json(data, str(reference)), str(reference))
    total = sum(record.size for record in layers.values())
    if total > shutil.disk_usage(folder).free:
        raise OutputError(f"{reference} takes {total} bytes, more than is free in {folder.parent}", "Free some space")
    registry.deadline.add_time(len(layers), total)

    def fetch_file(item: Tuple[str, FileRecord]) -> None:
        """Fetch one file of the bundle, and check it while writing it."""
        name, record = item
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        answer = registry.send(ServerRequest("GET", max_bytes=record.size), f"blobs/sha256:{record.sha256}")
        with answer, (folder / name).open("xb") as sink:
            check_content(answer.body, record, f"{reference}: {name}", sink)

    registry.map_items(fetch_file, layers.items())


def read_layers(manifest: Mapping[str, Any], title: str) -> Dict[str, FileRecord]:
    """Return the size and hash of each layer, keyed by its path inside the bundle."""
    layers = manifest.get("layers")
    if manifest.get("artifactType") != ARTIFACT_TYPE or not isinstance(layers, list) or len(layers) > MAX_FILES:
        raise BundleError(f"{title} is not a model in the layout of ModelPack", "Push it with edgeq push")
    records: Dict[str, FileRecord] = {}
    names = []
    for layer in layers:
        layer = layer if isinstance(layer, dict) else {}
        annotations, size = layer.get("annotations"), layer.get("size")
        name = annotations.get(FILE_PATH) if isinstance(annotations, dict) else None
        match = _DIGEST.fullmatch(str(layer.get("digest")))
        if not isinstance(name, str) or match is None or type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise BundleError(f"{title}: a layer has no path, size or sha256", "Push it with edgeq push")
        if not str(layer.get("mediaType")).endswith(".raw"):
            raise BundleError(f"{title}: {name!a} is an archive", "edgeq accepts only layers that are files")
        names.append(name)
        records[name] = FileRecord(match.group(1), size)
    check_file_names(names, title)
    return records
