"""Make hostile and damaged .edgeq files, each from a good bundle directory."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

Attack = Callable[[dict[str, bytes]], bytes]
ATTACKS: dict[str, tuple[Attack, str]] = {}

MODEL = "models/model/plain/model.onnx"


def attack(says: str) -> Callable[[Attack], Attack]:
    def register(function: Attack) -> Attack:
        ATTACKS[function.__name__] = (function, says)
        return function

    return register


def pack(files: dict[str, bytes], *extra: tuple[zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
        for info, data in extra:
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def entry(name: str, mode: int = 0o100644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


@attack("not a plain path")
def name_outside(files: dict[str, bytes]) -> bytes:
    return pack(files, (entry("../escaped.txt"), b"x"))


@attack("is absolute")
def name_absolute(files: dict[str, bytes]) -> bytes:
    return pack(files, (entry("/tmp/escaped.txt"), b"x"))


@attack("not allowed")
def name_with_backslash(files: dict[str, bytes]) -> bytes:
    return pack(files, (entry("..\\escaped.txt"), b"x"))


@attack("not allowed")
def name_with_nul(files: dict[str, bytes]) -> bytes:
    data = pack(files, (entry("manifest.jsonXevil"), b"x"))
    return data.replace(b"manifest.jsonXevil", b"manifest.json\0evil")


@attack("occurs twice")
def name_twice(files: dict[str, bytes]) -> bytes:
    # The zip module warns of a repeated name, so this renames one of two entries afterwards.
    twin = MODEL[:-1] + "Z"
    return pack(files, (entry(twin), b"evil")).replace(twin.encode(), MODEL.encode())


@attack("is a link")
def link(files: dict[str, bytes]) -> bytes:
    rest = {name: data for name, data in files.items() if name != MODEL}
    return pack(rest, (entry(MODEL, 0o120777), b"/etc/passwd"))


@attack("not a plain path")
def directory_entry(files: dict[str, bytes]) -> bytes:
    return pack(files, (entry("empty/", 0o040755), b""))


@attack("not in the manifest")
def extra_file(files: dict[str, bytes]) -> bytes:
    return pack(files, (entry("sitecustomize.py"), b"raise SystemExit"))


@attack("is missing")
def missing_file(files: dict[str, bytes]) -> bytes:
    return pack({name: data for name, data in files.items() if name != MODEL})


@attack("the manifest states")
def longer_file(files: dict[str, bytes]) -> bytes:
    return pack({**files, MODEL: files[MODEL] + b"\0"})


@attack("was changed")
def changed_file(files: dict[str, bytes]) -> bytes:
    return pack({**files, MODEL: files[MODEL][:-1] + b"\0"})


@attack("it has no manifest.json")
def no_manifest(files: dict[str, bytes]) -> bytes:
    return pack({name: data for name, data in files.items() if name != "manifest.json"})


@attack("it has no manifest.json")
def empty(files: dict[str, bytes]) -> bytes:
    return pack({})


@attack("out of all proportion")
def bomb(files: dict[str, bytes]) -> bytes:
    return pack({**files, MODEL: bytes(100 * 1024 * 1024)})


@attack("cannot be unpacked")
def understated_size(files: dict[str, bytes]) -> bytes:
    # The zip's directory declares the manifest's size, but the data is longer. The size check must not be fooled.
    grown = {**files, MODEL: files[MODEL] + bytes(1 << 20)}
    true, stated = (struct.pack("<L", len(data[MODEL])) for data in (grown, files))
    return pack(grown).replace(true, stated)


@attack("compressed by a method")
def other_compression(files: dict[str, bytes]) -> bytes:
    return pack(files, method=zipfile.ZIP_LZMA)


@attack("is encrypted")
def encrypted(files: dict[str, bytes]) -> bytes:
    data = bytearray(pack(files))
    at = data.index(b"PK\x01\x02")
    data[at + 8] |= 1
    return bytes(data)


@attack("is not a bundle: it is a zip archive that is damaged or cut off")
def truncated(files: dict[str, bytes]) -> bytes:
    data = pack(files)
    return data[: len(data) // 2]


@attack("is not a bundle: it looks like an ONNX model")
def not_a_zip(files: dict[str, bytes]) -> bytes:
    return b"\x08\x08this is not a zip"


@attack("is not a bundle: it is empty")
def no_bytes(files: dict[str, bytes]) -> bytes:
    return b""


@attack("is larger than")
def huge_manifest(files: dict[str, bytes]) -> bytes:
    return pack({**files, "manifest.json": b" " * (16 * 1024 * 1024 + 1)})
