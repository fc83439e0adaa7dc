"""The family of external files: files that the capture refers to by path."""

from __future__ import annotations

import re

from ..codes import FileValidation
from ..container.frames import MAX_LENGTH
from ..model import ExternalFile, FileIdentity
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family, whole

_DIGEST = re.compile(r"[0-9a-f]{32}")
_HALF = 0xFFFFFFFFFFFFFFFF
_VALIDATIONS = int(sum(FileValidation))
_KNOWN_WITH = {
    FileValidation.identity: ("file_device", "file_inode", "file_mtime_ns"),
    FileValidation.digest: ("file_digest_low", "file_digest_high"),
}


class FileFamily(Family[ExternalFile]):
    name = "file"
    fields = """
        file_path:[uint] file_bytes:[ulong] file_validation:[ubyte]
        file_device:[ulong] file_inode:[ulong] file_mtime_ns:[long]
        file_digest_low:[ulong] file_digest_high:[ulong] file_payload:[uint] file_format:[uint]
    """

    def row(self, definition: ExternalFile) -> DefinitionRow:
        _check_path(definition.path)
        whole(definition.bytes, 0, MAX_LENGTH, "the length of an external file")
        identity, validation, digest = definition.identity, FileValidation(0), 0
        if identity is not None:
            validation |= FileValidation.identity
        if definition.digest is not None:
            if not _DIGEST.fullmatch(definition.digest):
                raise ValueError(f"a file digest of 32 hexadecimal digits was expected, got {definition.digest!r}")
            validation |= FileValidation.digest
            digest = int(definition.digest, 16)
        device, inode, mtime_ns = (identity.device, identity.inode, identity.mtime_ns) if identity else (0, 0, 0)
        return DefinitionRow(
            (
                definition.path,
                definition.bytes,
                int(validation),
                whole(device, 0, _HALF, "a file's device"),
                whole(inode, 0, _HALF, "a file's inode"),
                whole(mtime_ns, -(1 << 63), (1 << 63) - 1, "a file's mtime_ns"),
                digest & _HALF,
                digest >> 64,
                definition.payload,
                definition.format or 0,
            )
        )

    def admit(self, definition: ExternalFile, defined: DefinedSoFar) -> None:
        payload = definition.payload
        if payload and defined.payload_bytes(payload) != definition.bytes:
            raise ValueError(
                f"{definition.path} has {definition.bytes} bytes, its payload {defined.payload_bytes(payload)}"
            )

    def at(self, rows: DefinitionColumns, row: int) -> ExternalFile:
        validation = FileValidation(rows.number("file_validation", row))
        identity = digest = None
        if validation & FileValidation.identity:
            identity = FileIdentity(*(rows.number(name, row) for name in _KNOWN_WITH[FileValidation.identity]))
        if validation & FileValidation.digest:
            digest = f"{rows.number('file_digest_high', row):016x}{rows.number('file_digest_low', row):016x}"
        return ExternalFile(
            rows.text("file_path", row),
            rows.number("file_bytes", row),
            identity,
            digest,
            rows.number("file_payload", row),
            rows.text("file_format", row),
        )

    def check(self, body: TablesBody) -> None:
        body.code("file_validation", _VALIDATIONS, 0)
        body.ids("file_path", "string")
        body.ids("file_format", "string", lowest=0)
        body.range("file_bytes", 0, MAX_LENGTH)
        for flag, names in _KNOWN_WITH.items():
            body.zero_where((body.columns["file_validation"] & flag) == 0, names, f"a file without {flag.name}")
        body.payloads("file_payload", "file_bytes", "a file")


def _check_path(path: str) -> None:
    """Raise ValueError where a path cannot be stored so that it is found again."""
    if not path or "\0" in path:
        raise ValueError(f"an external file with the path {path!r}")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"an external file whose path is not UTF-8: {path!r}; embed its content") from None


FILES = FileFamily()
