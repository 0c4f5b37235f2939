"""Decide whose signatures count on this machine. The keys are in a file or folder of the machine's owner, never in a
bundle.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple

from edgeq_device.errors import BundleError, UsageError
from edgeq_device.system.files import open_file
from edgeq_device.trust.signature import (
    SHA256,
    BundleSignature,
    PublicKey,
    check_files,
    decode_base64,
    parse_signature,
    read_public_key,
    read_signed_files,
)

PLACE = "/etc/edgeq/trust"
VARIABLE = "EDGEQ_TRUST"
REVOKED = "revoked.txt"
_SUFFIXES = (".pem", ".pub", ".crt", ".cer", ".der")
# Keys take kilobytes; a larger file is the wrong one.
_MAX_BYTES = 1 << 20
_BEGIN = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")
_NOT_AFTER = re.compile(r"not-after:[ \t]*([0-9]{4}-[0-9]{2}-[0-9]{2})", re.IGNORECASE)
# Lines that certtool and `openssl ec -text` write before a public key.
_KEY_TEXT = re.compile(
    r"(Public[- ]Key( Info| Information| ID| PIN)?|X|Y|pub):|[0-9a-f]{2}(:[0-9a-f]{2})*:?|sha(1|256):[0-9a-f]+"
    r"|pin-sha256:[A-Za-z0-9+/=]+|Public-Key: \([0-9]+ bit\)|(NIST CURVE|ASN1 OID|Curve):[ \t]*[A-Za-z0-9-]+"
    r"|(Public Key )?Algorithm( Security Level)?: [A-Za-z/]+( \([0-9]+ bits\))?"
)
# A remark must not match this pattern: a last day after # would look set, but would not count.
_A_LAST_DAY = re.compile(r"not[-_ \t]*after", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")

Chain = Callable[[Sequence[bytes], Sequence[bytes]], PublicKey]
"""Function that takes a chain and the trusted certificates (all in DER). If the chain leads to a trusted certificate,
the function returns the key of the chain's first certificate."""


@dataclass(frozen=True)
class TrustedKey:
    """Hold a key whose signatures count. If `not_after` is given, they count only until the end of that day (UTC)."""

    key: PublicKey
    name: str
    not_after: Optional[date] = None


@dataclass(frozen=True)
class Trust:
    """Hold trusted keys and certificates (DER), and the ids of revoked keys. A revoked key does not count, even if it
    has a trusted certificate.
    """

    source: str
    keys: Tuple[TrustedKey, ...]
    certificates: Tuple[bytes, ...]
    revoked: FrozenSet[str] = frozenset()


@dataclass(frozen=True)
class Signer:
    """Name the signer of a bundle by the id of the key and by the name of the file that made the key trusted."""

    key: str
    name: str

    def to_dict(self) -> Dict[str, Any]:
        """Return plain JSON values."""
        return {"key": self.key, "trusted_by": self.name}


def find_trust(path: Optional[Path], *, required: bool) -> Optional[Trust]:
    """Return the trusted keys in `path`, else in $EDGEQ_TRUST, else in /etc/edgeq/trust. Return None if there are
    none.

    Raises:
        UsageError: the path cannot be read, or `required` is set and there are no trusted keys.
    """
    named = os.environ.get(VARIABLE)
    if path is not None or named or _may_exist(PLACE):
        return read_trust(path if path is not None else Path(named or PLACE))
    if required:
        raise UsageError("no key is trusted here", f"Name one with --trust, or put one into {PLACE}")
    return None


def _may_exist(place: str) -> bool:
    """Return whether `place` exists or may exist. A path that cannot be checked must not count as absent."""
    try:
        Path(place).stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


def read_trust(path: Path) -> Trust:
    """Return the trusted keys in `path`. It is a file of keys or certificates (PEM or DER), or a folder of such files
    and a `revoked.txt`.

    Raises:
        UsageError: something in the file or folder cannot be parsed. Skipping it could mean trusting a revoked key.
    """
    try:
        folder = path.is_dir()
        # Editors and file systems leave hidden files.
        files = sorted(p for p in path.iterdir() if not p.name.startswith(".")) if folder else [path]
        contents = {file: _read_limited(file) for file in files}
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}), so nothing is trusted") from error
    keys: List[TrustedKey] = []
    certificates: List[bytes] = []
    revoked: FrozenSet[str] = frozenset()
    for file, data in contents.items():
        if folder and file.name == REVOKED:
            revoked = _read_revoked(data, str(file))
            continue
        if folder and file.suffix not in _SUFFIXES:
            raise UsageError(
                f"{file} is not {REVOKED} and has none of the suffixes {', '.join(_SUFFIXES)}", "Remove or rename it"
            )
        for label, der, not_after in _read_blocks(data, str(file)):
            if label == "CERTIFICATE":
                certificates.append(der)
            else:
                keys.append(TrustedKey(read_public_key(der, str(file)), file.name, not_after))
    # An empty folder must not look like a machine that trusts nobody yet.
    if not keys and not certificates:
        raise UsageError(f"{path} contains no key", "Put a public key or a certificate there")
    return Trust(str(path), tuple(keys), tuple(certificates), revoked)


def verify_signature(
    data: Optional[bytes], digests: Mapping[str, str], trust: Trust, context: str, chain: Optional[Chain] = None
) -> Signer:
    """Return the signer of the files `digests` (sha256 in hex by relative path).

    Args:
        data: content of the signature file; None if it is missing.
        chain: function that verifies certificates; None on a device, which cannot verify certificates.

    Raises:
        BundleError: there is no signature, the key is not trusted (any more), or other files were signed.
    """
    if data is None:
        raise BundleError(f"{context} is not signed", f"It needs a signature by a key of {trust.source}")
    signature = parse_signature(data, f"{context}: signature")
    signer = _find_signer(signature, trust, context, chain)
    check_files(read_signed_files(signature.payload, context), digests, context)
    return signer


def _find_signer(signature: BundleSignature, trust: Trust, context: str, chain: Optional[Chain]) -> Signer:
    fix = f"Do not use it, unless the key belongs in {trust.source}"
    today = datetime.now(timezone.utc).date()
    for trusted in trust.keys:
        # The hint only saves work. The signature itself decides.
        if signature.hint not in ("", trusted.key.id) or not signature.is_by(trusted.key):
            continue
        # The day matters only for the key that did sign.
        if trusted.not_after is not None and today > trusted.not_after:
            raise BundleError(f"{context} is signed by {trusted.name}, which is trusted until {trusted.not_after}", fix)
        return _check_unrevoked(Signer(trusted.key.id, trusted.name), trust, context)
    if not signature.chain or not trust.certificates:
        by = f" ({signature.hint})" if signature.hint else " (a certificate's)" if signature.chain else ""
        raise BundleError(f"{context} is not signed by a key of {trust.source}{by}", fix)
    if chain is None:
        raise BundleError(
            f"{context} is signed with a certificate, which edgeq verifies on a workstation only",
            "Trust the public key of the certificate on this device",
        )
    # The chain says whose key it is, not whether it signed this bundle.
    key = chain(signature.chain, trust.certificates)
    if not signature.is_by(key):
        raise BundleError(f"{context}: its certificate did not make the signature", fix)
    return _check_unrevoked(Signer(key.id, Path(trust.source).name), trust, context)


def _check_unrevoked(signer: Signer, trust: Trust, context: str) -> Signer:
    if signer.key in trust.revoked:
        raise BundleError(
            f"{context} is signed by {signer.key}, a key that was revoked", "Have it signed by another key"
        )
    return signer


def _read_limited(file: Path) -> bytes:
    with open_file(file) as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{file} is larger than {_MAX_BYTES} bytes", "Name a file of keys")
    return data


def _read_lines(data: bytes, context: str) -> List[Tuple[str, str]]:
    """Return the place (`where:number`) and the text of each line. Refuse characters that an editor would show
    differently from what is read here.
    """
    try:
        lines = [line[:-1] if line.endswith("\r") else line for line in data.decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise UsageError(f"{context} is neither DER nor text in UTF-8", "Write the file again") from error
    for number, line in enumerate(lines, 1):
        if _CONTROL.search(line):
            raise UsageError(f"{context}:{number}: {line[:80]!a} contains a control character", "Remove it")
    return [(f"{context}:{number}", line.strip(" \t")) for number, line in enumerate(lines, 1)]


def _read_revoked(data: bytes, context: str) -> FrozenSet[str]:
    """Return the ids of revoked keys. The file has one id a line, and remarks begin with #."""
    keys = set()
    for place, line in _read_lines(data, context):
        key = line.partition("#")[0].strip(" \t")
        if key and not SHA256.fullmatch(key):
            raise UsageError(
                f"{place}: {key[:80]!a} is not the id of a key", "Write the 64 hex digits that `verify` prints"
            )
        keys.add(key)
    return frozenset(keys - {""})


def _read_blocks(data: bytes, context: str) -> List[Tuple[str, bytes, Optional[date]]]:
    """Return the label, content and last day of each key and certificate. DER data contain only one of them; PEM text
    may contain several.

    Raises:
        UsageError: a line is none of these: part of a block, `not-after: YYYY-MM-DD` before a key, a remark, or a
            tool's description of a key.
    """
    if b"-----BEGIN" not in data:
        # The first element of a certificate is a sequence with a two-byte length. In a key, the length is shorter.
        return [("CERTIFICATE" if data[:2] == b"\x30\x82" else "PUBLIC KEY", data, None)]
    blocks: List[Tuple[str, bytes, Optional[date]]] = []
    last_day: Optional[Tuple[str, date]] = None
    lines = iter(_read_lines(data, context))
    for place, line in lines:
        begin = _BEGIN.fullmatch(line)
        if begin:
            label = begin.group(1)
            if label not in ("PUBLIC KEY", "CERTIFICATE"):
                raise UsageError(
                    f"{place}: {context} contains a {label}", "Only public keys and certificates belong there"
                )
            # A second day would contradict the one in the certificate.
            if last_day is not None and label == "CERTIFICATE":
                raise UsageError(
                    f"{last_day[0]}: a certificate has its own last day", "Remove the line not-after before it"
                )
            blocks.append((label, _read_block(lines, label, place), last_day[1] if last_day is not None else None))
            last_day = None
        elif _KEY_TEXT.fullmatch(line):
            continue
        elif line and (not line.startswith("#") or _A_LAST_DAY.search(line)):
            if last_day is not None:
                raise UsageError(f"{place}: {line[:80]!a} follows a not-after", "Put the key's block right after that")
            last_day = (place, _parse_last_day(line, place))
    if last_day is not None:
        raise UsageError(f"{last_day[0]}: no key follows this not-after", "Write it before the key that it is for")
    return blocks


def _read_block(lines: Iterator[Tuple[str, str]], label: str, begin: str) -> bytes:
    """Read the lines of a block up to its end, and return the decoded bytes."""
    text: List[str] = []
    for _, line in lines:
        if line == f"-----END {label}-----":
            try:
                return decode_base64("".join(text))
            except ValueError as error:
                raise UsageError(f"{begin}: the {label} is not base64", "Write the file again") from error
        text.append(line)
    raise UsageError(f"{begin}: the {label} is cut off", "Write the file again")


def _parse_last_day(line: str, place: str) -> date:
    fault = UsageError(
        f"{place}: {line[:80]!a} is not understood, so nothing is trusted",
        "Between keys, write only `not-after: 2027-06-30` and remarks that begin with #",
    )
    match = _NOT_AFTER.fullmatch(line)
    if not match:
        raise fault
    try:
        return date.fromisoformat(match.group(1))
    except ValueError as error:  # there is no such day
        raise fault from error
