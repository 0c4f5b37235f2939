"""Test `edgeq push`, `edgeq pull` and the runner's `pull`. They do not trust what a registry sends."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from edgeq_device.cli import main
from edgeq_device.errors import DeviceError
from edgeq_device.trust.registry import parse_reference

from edgeq.bundle.transfer import pull_bundle, push_bundle
from edgeq.cli import group
from edgeq.errors import BundleError, EdgeqError, OutputError, RuntimeUnavailableError, UsageError
from tests.bundle.samples import tree

from .registry import Answer, Registry, debian, in_process

SHA = "sha256:" + "0" * 64


@pytest.fixture
def registry() -> Iterator[Registry]:
    with in_process() as found:
        yield found


@pytest.fixture(autouse=True)
def _no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.fixture(scope="module")
def filled(good: Path) -> Iterator[tuple[Registry, str]]:
    """Serve a registry that has the good bundle. Yield it and the reference."""
    with in_process() as found:
        yield found, pushed(found, good)


def pushed(registry: Registry, bundle: Path) -> str:
    return push_bundle(bundle, f"{registry.host}/models/net:1.0").reference


def test_there_and_back(registry: Registry, good: Path, good_zip: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(group, ["push", str(good), f"{registry.host}/models/net:1.0", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["files"] == len(tree(good))
    assert found["reference"] == f"{registry.host}/models/net:1.0@{found['digest']}"
    again = push_bundle(good_zip, f"{registry.host}/models/net")
    assert (again.digest, again.uploaded) == (found["digest"], 0)
    back = tmp_path / "back"
    done = CliRunner().invoke(group, ["pull", found["reference"], "-o", str(back)])
    assert done.exit_code == 0, done.output
    assert "all hashes right" in done.stdout
    assert tree(back) == tree(good)
    device = tmp_path / "device"
    assert main(["pull", found["reference"], "-o", str(device)]) == 0
    assert tree(device) == tree(good)
    assert main(["pull", found["reference"], "-o", str(device)]) == 6
    pull_bundle(found["reference"], tmp_path / "back.edgeq")
    assert (tmp_path / "back.edgeq").read_bytes() == good_zip.read_bytes()
    manifest = json.loads(registry.blobs[found["digest"]])
    kinds = {layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"] for layer in manifest["layers"]}
    assert kinds["models/model/plain/model.onnx"] == "application/vnd.cncf.model.weight.v1.raw"
    assert kinds["edgeq_run.py"] == "application/vnd.cncf.model.code.v1.raw"
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"


def test_the_signature_travels(registry: Registry, copy: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from edgeq.bundle.write import sign_bundle
    from tests.bundle.signing.keys import write_key

    key, other = write_key(tmp_path, "key"), write_key(tmp_path, "other")
    unsigned = pushed(registry, copy)
    sign_bundle(copy, key)
    reference = pushed(registry, copy)
    assert reference != unsigned
    pulled = pull_bundle(reference, tmp_path / "a", trust=key.with_suffix(".pub"))
    assert pulled.signer is not None
    assert tree(tmp_path / "a") == tree(copy)
    for name, trust in ((unsigned, key), (reference, other)):
        with pytest.raises(BundleError, match="signed"):
            pull_bundle(name, tmp_path / "b", trust=trust.with_suffix(".pub"))
        assert main(["pull", name, "-o", str(tmp_path / "b"), "--trust", str(trust.with_suffix(".pub"))]) == 7
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob("*.partial"))


def edited(registry: Registry, reference: str, change: Callable[[dict[str, object]], object]) -> str:
    """Change the manifest and return the reference of the same artifact with it."""
    import hashlib

    manifest = json.loads(registry.blobs[reference.rpartition("@")[2]])
    change(manifest)
    data = json.dumps(manifest).encode()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    registry.blobs[digest] = data
    return f"{registry.host}/models/net@{digest}"


def layer(**changes: object) -> Callable[[dict[str, object]], object]:
    return lambda manifest: manifest["layers"][0].update(changes)  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.update(artifactType="x"), "not a model in the layout"),
        (lambda m: m.update(layers={}), "not a model in the layout"),
        (lambda m: m.update(layers=[{}] * 20_001), "not a model in the layout"),
        (lambda m: m.update(layers=[1]), "no path, size or sha256"),
        (lambda m: m["layers"].pop(0), "is missing"),
        (lambda m: m["layers"].append({**m["layers"][0], "annotations": {"org.cncf.model.filepath": "x.so"}}), "x.so"),
        (lambda m: m["layers"].append(m["layers"][0]), "occurs twice"),
        (layer(annotations={"org.cncf.model.filepath": "../../x"}), "not a plain path"),
        (layer(annotations={"org.cncf.model.filepath": "/etc/x"}), "is absolute"),
        (layer(size=-1), "no path, size or sha256"),
        (layer(size=True), "no path, size or sha256"),
        (layer(size=1), "is larger than the 1 bytes"),
        (layer(size=1 << 60), "no path, size or sha256"),
        (layer(size=1 << 43), "more than is free"),
        (layer(digest="sha256:../x"), "no path, size or sha256"),
        (layer(mediaType="application/vnd.cncf.model.code.v1.tar"), "is an archive"),
    ],
)
def test_manifests_that_do_not_hold(
    change: Callable[[dict[str, object]], object], problem: str, filled: tuple[Registry, str], tmp_path: Path
) -> None:
    reference = edited(*filled, change)
    with pytest.raises(EdgeqError, match=problem) as caught:
        pull_bundle(reference, tmp_path / "x" / "out")
    assert caught.value.exit_code in (6, 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == []


def test_refuses_content_that_the_registry_changed(registry: Registry, good: Path, tmp_path: Path) -> None:
    reference = pushed(registry, good)

    def flipped(wanted: str, method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        del headers
        status, found, body = answer
        return status, found, (body[:-1] + b"?" if method == "GET" and wanted in path else body)

    for wanted, problem in (("/blobs/", "was changed"), ("/manifests/", "does not have that digest")):
        registry.change = functools.partial(flipped, wanted)
        with pytest.raises(BundleError, match=problem):
            pull_bundle(reference, tmp_path / "out")
    registry.change = lambda m, p, h, answer: (answer[0], {"Content-Length": "9"}, answer[2][:9])
    with pytest.raises(BundleError, match="does not have that digest"):
        pull_bundle(reference, tmp_path / "out")
    registry.change = lambda m, p, h, answer: (answer[0], {}, answer[2] * (4 << 20 if "manifests" in p else 1))
    registry.blobs[reference.rpartition("@")[2]] = b"xx"
    with pytest.raises(BundleError, match="does not have that digest"):
        pull_bundle(reference, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_connection_no_login_not_there(registry: Registry, good: Path, tmp_path: Path) -> None:
    for name, problem in (
        (f"{registry.host}/models/net@{SHA}", "it was not found"),
        (f"127.0.0.1:1/models/net@{SHA}", "the connection failed"),
    ):
        with pytest.raises(RuntimeUnavailableError, match=problem):
            pull_bundle(name, tmp_path / "out")
    for challenge, problem in (
        ("", "needs a login"),
        ("Basic realm=x", "needs a login"),
        ('Bearer realm="https://example.com/token"', "needs a login"),
        (f'Bearer realm="http://{registry.host}/token"', "its login was refused"),
    ):
        registry.change = lambda m, p, h, answer, c=challenge: (401, {"WWW-Authenticate": c}, b"")  # type: ignore[misc]
        with pytest.raises(RuntimeUnavailableError, match=problem):
            push_bundle(good, f"{registry.host}/models/net")
    registry.change = lambda m, p, h, answer: (302, {"Location": "ftp://127.0.0.1/x"}, b"")
    with pytest.raises(RuntimeUnavailableError, match="302"):
        pull_bundle(f"{registry.host}/models/net@{SHA}", tmp_path / "out")
    registry.change = lambda m, p, h, answer: (202, {"Location": "file:///etc/passwd"}, b"") if m == "POST" else answer
    with pytest.raises(RuntimeUnavailableError, match="leads away from https"):
        push_bundle(good, f"{registry.host}/models/net")
    with pytest.raises(UsageError, match="has no digest"):
        pull_bundle(f"{registry.host}/models/net:1.0", tmp_path / "out")
    with pytest.raises(OutputError, match="exists already"):
        pull_bundle(f"{registry.host}/models/net@{SHA}", tmp_path)


def test_tokens_and_redirects(registry: Registry, good: Path, tmp_path: Path) -> None:
    """The token service gets the login, the registry gets the token, and the target of the registry's redirect gets
    neither.
    """
    (tmp_path / "docker").mkdir()
    login = base64.b64encode(b"me:secret").decode()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": login}}}))
    reference = pushed(registry, good)
    with in_process() as elsewhere:
        elsewhere.blobs = registry.blobs

        def guarded(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
            if path.startswith("/token"):
                assert headers["Authorization"] == f"Basic {login}"
                assert path == "/token?service=s&scope=repository%3Amodels%2Fnet%3Apull"
                return 200, {}, b'{"token": "opened"}'
            if headers.get("Authorization") != "Bearer opened":
                challenge = (
                    f'Bearer realm="http://{registry.host}/token",service="s",scope="repository:models/net:pull"'
                )
                return 401, {"WWW-Authenticate": challenge}, b""
            if "/blobs/" in path:
                return 307, {"Location": f"http://{elsewhere.host}{path}"}, b""
            return answer

        registry.change = guarded
        registry.seen.clear()
        pull_bundle(reference, tmp_path / "out")
        assert tree(tmp_path / "out") == tree(good)
        assert sum(path.startswith("/token") for _, path, _ in registry.seen) == 1
        assert elsewhere.seen
        assert {authorization for _, _, authorization in elsewhere.seen} == {""}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "net",
        "/net@" + SHA,
        "host/Net",
        "host/net:",
        "host/net@sha256:0",
        "host/a//b",
        "host/../b",
        "h ost/a",
        "a" * 600,
    ],
)
def test_refuses_texts_that_are_not_references(text: str) -> None:
    with pytest.raises(DeviceError, match="is not a reference to a registry"):
        parse_reference(text)


SECRET = "s3cr:et"
WITH_LOGIN = (
    f"me:{SECRET}@registry.example.com/net",
    f"me:{SECRET}@registry.example.com/net@{SHA}",
    f"https://me:{SECRET}@registry.example.com/net:1.0",
    f"me:a/{SECRET}@registry.example.com/net",
    f"{SECRET}@registry.example.com/net",
)


@pytest.mark.parametrize("text", WITH_LOGIN)
@pytest.mark.parametrize("options", [[], ["--json"], ["-v"], ["--print-recipe"]])
def test_a_password_in_a_reference_is_refused_and_not_shown(
    text: str, options: list[str], good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["push", str(good), text], ["pull", text, "-o", str(tmp_path / "out")]):
        done = CliRunner().invoke(group, [*command, *options])
        assert done.exit_code == 2
        assert "registry.example.com" in done.output
        assert "docker login" in done.output
        assert "s3cr" not in done.output
    assert main(["pull", text, "-o", str(tmp_path / "out")]) == 2
    assert "s3cr" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull", "-o", "x", f"registry.example.com/net@{SHA}", f"me:{SECRET}@registry.example.com/net"],
        ["verify", f"https://me:{SECRET}@registry.example.com/net"],
        ["verify", f"me:{SECRET}@registry.example.com/net"],
        ["bench", "model.onnx", "--on", f"me:{SECRET}@board"],
        ["bench", "model.onnx", "--on", f"ssh://me:{SECRET}@board", "--print-recipe"],
        ["calibrate", "model.onnx", "--data", "x", "-o", "y", "--workers", f"tcp://me:{SECRET}@scheduler:8786"],
    ],
)
def test_a_password_elsewhere_is_not_shown(arguments: list[str]) -> None:
    done = CliRunner().invoke(group, arguments)
    assert done.exit_code != 0
    assert "s3cr" not in done.output
    assert "edgeq: " in done.output


def test_a_token_that_is_none_is_not_shown(registry: Registry, tmp_path: Path) -> None:
    """An invalid token is not shown. http.client refuses a header with a line break and puts the whole header in its
    message.
    """

    def asks(method: str, path: str, headers: dict[str, str], answer: Answer) -> Answer:
        del method, headers, answer
        if path.startswith("/token"):
            return 200, {}, json.dumps({"token": f"{SECRET}\r\nX: y"}).encode()
        return 401, {"WWW-Authenticate": f'Bearer realm="http://{registry.host}/token"'}, b""

    registry.change = asks
    with pytest.raises(RuntimeUnavailableError, match="token") as caught:
        pull_bundle(f"{registry.host}/models/net@{SHA}", tmp_path / "out")
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize("place", ["/v2/upload/a b?state={}", "http://x:y:z@{}/"])
def test_an_address_that_is_none_is_not_shown(registry: Registry, good: Path, place: str) -> None:
    """An invalid upload location is not shown, because it often contains a token."""
    answer = (202, {"Location": place.format("s3cr3t")}, b"")
    registry.change = lambda method, path, headers, found: answer if method == "POST" else found
    with pytest.raises(RuntimeUnavailableError, match="the connection failed") as caught:
        push_bundle(good, f"{registry.host}/models/net")
    assert "s3cr3t" not in str(caught.value)


def test_references() -> None:
    text = f"registry.example.com:5000/team/my-net_2/int8:v1.0@{SHA}"
    found = parse_reference(text)
    assert str(found) == text
    assert (found.host, found.repository, found.tag) == ("registry.example.com:5000", "team/my-net_2/int8", "v1.0")
    assert str(dataclasses.replace(found, tag="", digest="")) == "registry.example.com:5000/team/my-net_2/int8"


def test_the_registry_of_debian(good: Path, tmp_path: Path) -> None:
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed (apt-get install docker-registry)")
    with debian(program, tmp_path) as host:
        first = push_bundle(good, f"{host}/models/net:1.0")
        assert first.uploaded > 0
        assert push_bundle(good, f"{host}/models/net").uploaded == 0
        assert main(["pull", first.reference, "-o", str(tmp_path / "device")]) == 0
    assert tree(tmp_path / "device") == tree(good)
