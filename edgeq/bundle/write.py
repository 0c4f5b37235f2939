"""Write a bundle as a directory or a zip: completely or not at all, and with the same bytes every time.

If several models have a large tensor in common, this module also moves that tensor into a file named after its content,
so that a bundle contains the tensor only once.

Models built for different targets from one source differ in their graphs and small tensors, but many of their weights
have the same bytes. Each tensor that several models have becomes an external data file, whose name is its shortened
sha256. Equal tensors get the same name, and the plan of the bundle (`edgeq.bundle.plan`) puts all of them into one
shared asset.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import onnx
from edgeq_device.bundle.manifest import MANIFEST, FileRecord, parse_manifest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.errors import DeviceError
from edgeq_device.prepare.arrays import plain_entry
from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.plainjson import MAX_BYTES, parse_json
from edgeq_device.trust.signature import (
    BUNDLE_TYPE,
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    SIGNATURE,
    STATEMENT_TYPE,
    BundleSignature,
    PublicKey,
    parse_signature,
    read_public_key,
    root_digest,
)
from onnx import TensorProto, numpy_helper

from edgeq.bundle.plan import BundleSpec, Content, plan_bundle
from edgeq.bundle.verify import check_cryptography, contents, opened, verified_key
from edgeq.errors import BundleError, DataError, EdgeqError, OutputError, UsageError
from edgeq.model.clean import is_named_bundle
from edgeq.model.load import load_model, model_files, path_of
from edgeq.util.display import Displayed
from edgeq.util.marker import as_listed, is_plain
from edgeq.util.outputs import output_directory, output_file
from edgeq.util.ownership import Judge, Ownership, printable_path
from edgeq.util.registry import device_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Python writes compiled files next to the runner's modules when it imports them.
_COMPILED = re.compile(r"(?P<folder>(?:.*/)?)__pycache__/(?P<module>[^/.]+)\.[^/]+\.pyc")


def _judge(folder: Path) -> Judge | None:
    records = _records(folder / MANIFEST)
    if records is None:
        return None
    digests = {name: record.sha256 for name, record in records.items()}

    def judge(name: str) -> bool:
        """Return whether the manifest lists `name` with the file's hash, or lists the Python module from which `name`
        was compiled.
        """
        compiled = _COMPILED.fullmatch(name)
        if compiled is not None:
            return f"{compiled['folder']}{compiled['module']}.py" in digests
        return (
            name == MANIFEST or as_listed(folder, digests, name) or (name == SIGNATURE and is_signature(folder / name))
        )

    return judge


def is_signature(path: Path) -> bool:
    """Return whether the file is a signature, made by `edgeq sign` or another tool. edgeq may remove a signature,
    because it can be made again.
    """
    if not is_plain(path) or path.stat().st_size > MAX_BYTES:
        return False
    try:
        parse_signature(read_file(path), str(path))
    except DeviceError:
        return False
    return True


def _records(manifest: Path) -> dict[str, FileRecord] | None:
    if not is_plain(manifest) or manifest.stat().st_size > MAX_BYTES:
        return None
    try:
        return dict(parse_manifest(parse_json(read_file(manifest), str(manifest)), str(manifest)).files)
    except (DeviceError, RecursionError):
        return None


def check_archive(path: Path) -> None:
    """Refuse an existing path that is not a bundle in one file.

    Raises:
        OutputError: the path is not such a bundle.
    """
    if not path.exists() and not path.is_symlink():
        return
    try:
        with opened(path):
            whole = is_plain(path)
    except EdgeqError:
        whole = False
    if not whole:
        raise OutputError(
            f"{printable_path(path)} is not a bundle that edgeq wrote", "Move it, or choose another output"
        )


BUNDLE = Ownership("bundle", _judge)
"""Recognise a bundle by edgeq's manifest. Every file must have the hash that the manifest lists."""


_LARGE = 1 << 31


def write_bundle(spec: BundleSpec, destination: Path, *, force: bool = False) -> None:
    """Write `spec` to `destination` as an ONNX Runtime model package that a device can check, run and time by itself.

    If `destination` ends in ".edgeq", the package becomes a deterministic zip. Before the result replaces
    `destination`, the device's own reader opens it with all its checks.

    Raises:
        OutputError: `destination` exists (without `force`), contains files that edgeq did not write, or cannot be
            written.
        ModelError, DataError, CalibrationError, BundleError: something cannot go into a bundle.
    """
    files = plan_bundle(spec)
    if is_named_bundle(destination):
        with output_file(destination, force=force) as draft:
            write_archive(files, draft)
            with device_errors(), open_bundle(draft):
                pass
    else:
        with output_directory(destination, force=force, check=BUNDLE.check) as folder:
            _write_directory(files, folder)
            with device_errors(), open_bundle(folder):
                pass


def _write_directory(files: Mapping[str, Content], folder: Path) -> None:
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)


def write_archive(files: Mapping[str, Content], path: Path) -> None:
    """Write `files` as a zip. The same content always gives the same bytes.

    Args:
        files: contents, keyed by path inside the bundle.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            entry = plain_entry(name)
            if isinstance(content, bytes):
                archive.writestr(entry, content)
            else:
                entry.file_size = content.stat().st_size
                with (
                    open_file(content) as source,
                    archive.open(entry, "w", force_zip64=entry.file_size >= _LARGE) as sink,
                ):
                    shutil.copyfileobj(source, sink, 1 << 20)


# A separate file costs a line in the manifest and a header in a zip. For smaller tensors, this cost exceeds the
# savings.
_SMALLEST = 1024
_NAME_DIGITS = 32


def share_weights(models: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Rewrite `models` so that a bundle can store their common large tensors once. Models without such tensors stay
    unchanged.

    Args:
        models: models by variant; several variants may name the same file.
        folder: a private folder for the rewritten models.

    Returns:
        The model to deploy for each variant.
    """
    files = sorted(set(models.values()))
    if len(files) < 2 or any(len(model_files(file)) > 1 for file in files):
        return dict(models)
    loaded = {file: load_model(file, external_data="all") for file in files}
    users: dict[str, int] = {}
    for model in loaded.values():
        for digest in {_digest(tensor) for tensor in _large(model)}:
            users[digest] = users.get(digest, 0) + 1
    placed: dict[Path, Path] = {}
    for number, (file, model) in enumerate(loaded.items()):
        common = {digest: tensor for tensor in _large(model) if users[digest := _digest(tensor)] > 1}
        placed[file] = file
        if common:
            placed[file] = folder / str(number) / "model.onnx"
            placed[file].parent.mkdir(parents=True)
            _write(model, common, placed[file])
    return {name: placed[file] for name, file in models.items()}


def _large(model: onnx.ModelProto) -> list[TensorProto]:
    return [t for t in model.graph.initializer if t.data_type != TensorProto.STRING and len(_raw(t)) >= _SMALLEST]


def _raw(tensor: TensorProto) -> bytes:
    """Return the tensor's bytes as external data stores them, in little-endian order."""
    return bytes(tensor.raw_data) if tensor.HasField("raw_data") else numpy_helper.to_array(tensor).tobytes()


def _digest(tensor: TensorProto) -> str:
    return hashlib.sha256(_raw(tensor)).hexdigest()


def _write(model: onnx.ModelProto, common: Mapping[str, TensorProto], path: Path) -> None:
    for digest, tensor in common.items():
        (path.parent / f"{digest[:_NAME_DIGITS]}.bin").write_bytes(_raw(tensor))
    for tensor in _large(model):
        digest = _digest(tensor)
        if digest in common:
            length = len(_raw(tensor))
            del tensor.external_data[:]
            for field in ("raw_data", "int32_data", "int64_data", "float_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", f"{digest[:_NAME_DIGITS]}.bin"), ("offset", "0"), ("length", str(length))):
                tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString(deterministic=True))


PASSWORD = "EDGEQ_KEY_PASSWORD"


@dataclass(frozen=True)
class SigningKey:
    """Hold a private key, its public key, and its certificate chain, if it has one.

    Attributes:
        chain: certificates in DER, the key's own certificate first; empty if there are none.
    """

    private: EllipticCurvePrivateKey
    public: PublicKey
    chain: tuple[bytes, ...] = ()


def read_signing_key(path: Path, certificates: Sequence[Path] = ()) -> SigningKey:
    """Return the private key in a PEM file. $EDGEQ_KEY_PASSWORD decrypts an encrypted key.

    Args:
        certificates: PEM files: the key's own certificate first, then those of its issuers. The root may be left out.

    Raises:
        DataError: a file cannot be read, the password is wrong, or the key is not an elliptic-curve key on P-256, P-384
            or P-521.
        UsageError: the password is missing, the first certificate is for another key, or the certificates are not
            valid.
        RuntimeUnavailableError: cryptography is not installed.
    """
    check_cryptography()
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    password = os.environ.get(PASSWORD)
    try:
        data = read_file(path)
        private = load_pem_private_key(data, password.encode() if password and b"ENCRYPTED" in data else None)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "Name a private key") from error
    except TypeError as error:
        raise UsageError(f"{path} is encrypted", f"Set {PASSWORD}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is not a private key in PEM, or the password is wrong", _how()) from error
    if not isinstance(private, EllipticCurvePrivateKey):
        raise DataError(f"{path} is not an elliptic-curve key", _how())
    with device_errors():
        spki = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        public = read_public_key(spki, str(path))
    chain: list[bytes] = []
    for file in certificates:
        try:
            found = x509.load_pem_x509_certificates(read_file(file))
        except (OSError, ValueError) as error:
            raise DataError(f"{file} has no readable certificate in PEM") from error
        if not chain and found[0].public_key() != private.public_key():
            raise UsageError(f"{file} is not the certificate of {path}", "Name the key's own certificate first")
        chain += [certificate.public_bytes(Encoding.DER) for certificate in found]
    if chain:
        # Refuse a certificate that has expired or is not for signing. Otherwise, everyone who verifies the bundle would
        # refuse it later.
        try:
            verified_key(chain, chain[-1:])
        except BundleError as error:
            raise UsageError(f"{certificates[0]}: {error.problem}", "Name a valid certificate") from error
    return SigningKey(private, public, tuple(chain))


def sign_files(files: Mapping[str, str], name: str, key: SigningKey) -> bytes:
    """Return a signature file for the files of the model called `name`.

    Args:
        files: sha256 of each file in hex, by relative path.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    ordered = {path: files[path] for path in sorted(files, key=lambda path: PurePosixPath(path).parts)}
    payload = _json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": root_digest(ordered)}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "serialization": {
                    "method": "files",
                    "hash_type": "sha256",
                    "allow_symlinks": False,
                    "ignore_paths": [SIGNATURE],
                },
                "resources": [{"name": n, "algorithm": "sha256", "digest": d} for n, d in ordered.items()],
            },
        }
    )
    digest = getattr(hashes, key.public.curve.digest.upper())()
    value = key.private.sign(BundleSignature(payload, b"", "", ()).message, ECDSA(digest, deterministic_signing=True))
    material: dict[str, Any] = (
        {"x509CertificateChain": {"certificates": [{"rawBytes": _base64(der)} for der in key.chain]}}
        if key.chain
        else {"publicKey": {"hint": key.public.id}}
    )
    return _json(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {**material, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": _base64(payload),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": _base64(value), "keyid": ""}],
            },
        }
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _how() -> str:
    return "Make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"


@dataclass(frozen=True)
class Signed(Displayed):
    """Report the result of `sign_bundle`: the number of signed files, and the id of the key (docs/signing.md)."""

    bundle: Path
    files: int
    key: str
    curve: str
    certificates: int


def sign_bundle(
    path: str | Path, key: str | Path, *, certificates: Sequence[str | Path] = (), force: bool = False
) -> Signed:
    """Sign the bundle at `path`, which is a directory or an .edgeq file. The signature `model.sig` goes next to its
    manifest.

    Args:
        key: path of the private key, a PEM file.
        certificates: see `read_signing_key`.
        force: whether to replace an existing signature.

    Raises:
        BundleError: `path` is not a bundle, or the bundle is damaged.
        OutputError: the bundle is already signed, or cannot be written.
        DataError, UsageError, RuntimeUnavailableError: see `read_signing_key`.
    """
    path = path_of(path, "bundle")
    signing = read_signing_key(Path(key), [Path(certificate) for certificate in certificates])
    with opened(path) as bundle:
        if bundle.signature is not None and not force:
            raise OutputError(f"{path} is already signed", "Pass --force to replace its signature")
        digests = {name: record.sha256 for name, record in bundle.files.items()}
        digests[MANIFEST] = bundle.manifest_sha256
        signature = sign_files(digests, bundle.name or path.stem, signing)
        if path.is_dir():
            place = path / SIGNATURE
            if place.exists() and not is_signature(place):
                raise OutputError(f"{place} is not a signature", "Move it")
            with output_file(place, force=force) as draft:
                draft.write_bytes(signature)
        else:
            with output_file(path, force=True) as draft:
                write_archive(contents(replace(bundle, signature=signature)), draft)
    return Signed(path, len(digests), signing.public.id, signing.public.curve.name, len(signing.chain))
