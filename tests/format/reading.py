"""Reading all of a capture, so that two readings can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayfmt.errors import InvalidCapture
from replayfmt.format.maintenance import check_capture
from replayfmt.format.reader import open_capture


def read_all(path: Path) -> tuple[bool, list[str], dict[str, str]]:
    """Whether the capture is complete, its records one by one, and everything else of it, as text. Places in the file
    and how payloads are stored are left out: two files with the same content read the same."""
    with open_capture(path) as reader:
        records = [
            repr(
                (
                    r.ordinal,
                    r.signature_id,
                    r.signature,
                    r.scope,
                    r.thread,
                    r.start_ns,
                    r.duration_ns,
                    r.args,
                    r.results,
                    r.annotation,
                )
            )
            for r in reader.records()
        ]
        rest = {
            "session": repr(reader.session),
            "version": repr(reader.version),
            "storages": repr([reader.storage(i) for i in range(1, reader.storage_count + 1)]),
            "payloads": repr([(i.id, i.digest, i.raw_bytes, bytes(reader.payload(i.id))) for i in reader.payloads]),
            **{
                name: repr(list(getattr(reader, name)))
                for name in (
                    "strings",
                    "devices",
                    "kernels",
                    "generators",
                    "scopes",
                    "metas",
                    "signatures",
                    "files",
                    "file_ranges",
                    "recipes",
                )
            },
            "summary": repr(reader.summary),
        }
        return reader.complete, records, rest


def refused(path: Path, match: str) -> None:
    """Reading and checking end in one clear error that names the file."""
    with pytest.raises(InvalidCapture, match=match) as caught:
        read_all(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidCapture):
        check_capture(path)
