"""A bundle pulled from an OCI registry by its digest: every byte is held against that digest, so that the registry need
not be trusted. In the layout of CNCF ModelPack: each file is a layer, its path an annotation."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple, Union
from urllib.parse import urlencode, urljoin, urlsplit

from edgeq_device.contents import check_content
from edgeq_device.errors import BundleError, OutputError, RuntimeUnavailableError, UsageError
from edgeq_device.manifest import MAX_FILES, MAX_SIZE, FileRecord
from edgeq_device.names import check_file_names
from edgeq_device.package import open_bundle
from edgeq_device.plainjson import parse_json
from edgeq_device.trust import Trust, check_signature

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
FILE_PATH = "org.cncf.model.filepath"
# What registries accept at least, by the distribution specification.
_MAX_MANIFEST = 4 * 1024 * 1024
_TIMEOUT_S = 60
AT_ONCE = 8
"""Blobs that are sent or fetched at the same time."""
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-f:]+\](?::[0-9]{1,5})?)"
    r"/(?P<repository>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_CHALLENGE = re.compile(r'([a-z]+)="([^"]*)"', re.IGNORECASE)


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


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Follow to https only, but where the registry itself is spoken to without."""
        if urlsplit(newurl).scheme not in {"https", urlsplit(req.full_url).scheme}:
            raise urllib.error.HTTPError(newurl, code, "it leads away from https", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Registry:
    """HTTP to the repository of a reference, with the credentials that Docker keeps for its host, if any.

    https always, but for this very machine.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        host = urlsplit(f"//{reference.host}").hostname or ""
        local = host in ("localhost", "::1") or re.fullmatch(r"127\.\d+\.\d+\.\d+", host) is not None
        self._base = f"{'http' if local else 'https'}://{reference.host}/v2/{reference.repository}/"
        self._authorization = ""

    def send(
        self, method: str, place: str, headers: Mapping[str, str], body: Union[bytes, Path, None] = None
    ) -> HTTPResponse:
        """The answer to one request at `place`, relative to the repository or absolute; `body` may name a file.

        Raises:
            RuntimeUnavailableError: no answer, or a refusal.
        """
        with connected(self.reference):
            return self._answer(method, place, headers, body)

    def has(self, place: str) -> bool:
        """Whether there is something at `place`."""
        with connected(self.reference):
            try:
                self._answer("HEAD", place, {}, None).close()
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
                error.close()
                return False
        return True

    def _answer(
        self, method: str, place: str, headers: Mapping[str, str], body: Union[bytes, Path, None]
    ) -> HTTPResponse:
        url = urljoin(self._base, place)
        try:
            return self._send(method, url, headers, body)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            error.close()
            self._authorization = self._login(error.headers.get("WWW-Authenticate", ""))
        return self._send(method, url, headers, body)

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: Union[bytes, Path, None]) -> HTTPResponse:
        if urlsplit(url).scheme not in ("https", urlsplit(self._base).scheme):
            raise ValueError("it leads away from https")
        request = urllib.request.Request(url, method=method, headers=dict(headers))
        if urlsplit(url).netloc == self.reference.host:
            _authorize(request, self._authorization)
        if not isinstance(body, Path):
            request.data = body
            return _open(request)
        with body.open("rb") as stream:
            request.data = stream
            request.add_header("Content-Length", str(body.stat().st_size))
            return _open(request)

    def _login(self, challenge: str) -> str:
        """The Authorization header that satisfies a WWW-Authenticate header."""
        kind, _, rest = challenge.partition(" ")
        login = _credentials(self.reference.host)
        if kind.lower() == "basic" and login:
            return f"Basic {login}"
        asked = {name.lower(): value for name, value in _CHALLENGE.findall(rest)}
        realm = asked.get("realm", "")
        if kind.lower() != "bearer" or urlsplit(realm).scheme != urlsplit(self._base).scheme:
            raise RuntimeUnavailableError(f"{self.reference} needs a login", "Log in with docker login or oras login")
        query = urlencode({name: asked[name] for name in ("service", "scope") if name in asked})
        request = urllib.request.Request(f"{realm}?{query}")
        _authorize(request, f"Basic {login}" if login else "")
        with _open(request) as found:
            token = parse_json(found.read(_MAX_MANIFEST), f"{self.reference.host}: token")
        value = str(token.get("token") or token.get("access_token"))
        if _TOKEN.fullmatch(value) is None:
            # http.client would refuse it with a message that holds it.
            raise RuntimeUnavailableError(f"{self.reference}: what gives tokens sent none", "Look at the registry")
        return f"Bearer {value}"


def _authorize(request: urllib.request.Request, value: str) -> None:
    if value:
        # Not sent along to where the registry redirects.
        request.add_unredirected_header("Authorization", value)


def _open(request: urllib.request.Request) -> HTTPResponse:
    found = urllib.request.build_opener(_Redirects).open(request, timeout=_TIMEOUT_S)
    assert isinstance(found, HTTPResponse)
    return found


@contextmanager
def connected(reference: Reference) -> Iterator[None]:
    """Turn what goes wrong with a connection into RuntimeUnavailableError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        why = {401: "its login was refused", 403: "access is denied", 404: "it is not there"}
        raise RuntimeUnavailableError(
            f"{reference}: {why.get(error.code, 'the registry refuses')} (HTTP {error.code})", "Look at name and login"
        ) from error
    except (urllib.error.URLError, ConnectionError, socket.timeout, ssl.SSLError, HTTPException, ValueError) as error:
        # Its message holds the address, which may hold a token.
        text = "an address that is none" if isinstance(error, InvalidURL) else getattr(error, "reason", None) or error
        raise RuntimeUnavailableError(f"{reference}: the connection failed ({text})", "Look at the network") from error


def pull(reference: Reference, output: Path, trust: Optional[Trust] = None) -> str:
    """Write the bundle at `reference` as the directory `output`, after every check that opening it makes.

    Returns:
        what the checks of it found: its manifest's sha256.

    Raises:
        UsageError: the reference has no digest.
        OutputError: there is something at `output`, or it cannot be written.
        RuntimeUnavailableError: the registry does not answer, or does not have it.
        BundleError: what came is not what the digest says, no bundle, or not signed as `trust` wants it.
    """
    if output.exists() or output.is_symlink():
        raise OutputError(f"{output} exists already", "Choose another output")
    try:
        folder = Path(
            tempfile.mkdtemp(prefix=f".{output.name[:100]}.", suffix=".partial", dir=output.absolute().parent)
        )
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error.strerror})") from error
    try:
        fetch(reference, folder)
        with open_bundle(folder) as bundle:
            check_signature(bundle, trust)
            digest = bundle.manifest_sha256
        folder.chmod(0o755)
        folder.rename(output)
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return digest


def fetch(reference: Reference, folder: Path) -> None:
    """Write the files of the artifact at `reference` into `folder`, each of the size and hash that its manifest states.

    What they hold is for `open_bundle` to judge.
    """
    if not reference.digest:
        raise UsageError(f"{reference} has no digest", "Name it by @sha256:…, which `edgeq push` prints")
    registry = Registry(reference)
    asked = registry.send("GET", f"manifests/{reference.digest}", {"Accept": MANIFEST_TYPE})
    with connected(reference), asked as stream:
        data = stream.read(_MAX_MANIFEST + 1)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != reference.digest:
        raise BundleError(f"{reference}: what the registry sent does not have that digest", "Do not use this registry")
    layers = layers_of(parse_json(data, str(reference)), str(reference))
    needed = sum(record.size for record in layers.values())
    if needed > shutil.disk_usage(folder).free:
        raise OutputError(f"{reference} takes {needed} bytes, more than is free in {folder.parent}", "Free some space")

    def one(item: Tuple[str, FileRecord]) -> None:
        """Fetch one file of the bundle, checked while it is written."""
        name, record = item
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        sent = registry.send("GET", f"blobs/sha256:{record.sha256}", {})
        with connected(reference), sent as stream, (folder / name).open("xb") as sink:
            check_content(stream, record, f"{reference}: {name}", sink)

    with ThreadPoolExecutor(AT_ONCE) as workers:
        futures = [workers.submit(one, item) for item in layers.items()]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def layers_of(manifest: Mapping[str, Any], where: str) -> Dict[str, FileRecord]:
    """Path inside the bundle → size and hash of each layer."""
    layers = manifest.get("layers")
    if manifest.get("artifactType") != ARTIFACT_TYPE or not isinstance(layers, list) or len(layers) > MAX_FILES:
        raise BundleError(f"{where} is no model in the layout of ModelPack", "Push it with edgeq push")
    found: Dict[str, FileRecord] = {}
    names = []
    for layer in layers:
        layer = layer if isinstance(layer, dict) else {}
        annotations, size = layer.get("annotations"), layer.get("size")
        name = annotations.get(FILE_PATH) if isinstance(annotations, dict) else None
        match = _DIGEST.fullmatch(str(layer.get("digest")))
        if not isinstance(name, str) or match is None or type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise BundleError(f"{where}: a layer has no path, size or sha256", "Push it with edgeq push")
        if not str(layer.get("mediaType")).endswith(".raw"):
            raise BundleError(f"{where}: {name!a} is an archive", "edgeq takes layers that are files")
        names.append(name)
        found[name] = FileRecord(match.group(1), size)
    check_file_names(names, where)
    return found


def _credentials(host: str) -> str:
    """base64 of USER:PASSWORD as `docker login` and `oras login` keep it for `host`; "" where they do not."""
    try:
        folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
        known = json.loads((folder / "config.json").read_bytes()).get("auths", {})
        login = known.get(host, {}).get("auth", "")
        return base64.b64encode(base64.b64decode(login)).decode("ascii")
    except (OSError, ValueError, AttributeError, RuntimeError):
        return ""
