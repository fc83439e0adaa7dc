"""The Head frame: a capture's origin, as model.Session."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from replayfmt.errors import InvalidCapture

from .container import flatbuffer_tables
from .container.building import build
from .container.layouts import HEAD
from .model import Session

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TEXTS = ("torch_version", "python_version", "platform", "host", "cpu", "cpu_capability", "working_directory")
_PAIRS = ("libraries", "settings", "policies")


def encode_session(session: Session) -> memoryview:
    """The Head body. Raises ValueError if the session cannot be stored."""
    if not _UUID.fullmatch(session.session_id):
        raise ValueError(f"session_id {session.session_id!r} is not a lower-case UUID with dashes")

    def text(value: str) -> bytes:
        return value.encode(errors="backslashreplace")

    def pair(key: str, value: Any) -> tuple[bytes, bytes]:
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise ValueError(f"session value {key!r} is {value!r}; only JSON scalars can be stored")
        return text(key), text(json.dumps(value))

    return build(
        HEAD,
        {
            "session_id": text(session.session_id),
            "producer": text(session.producer),
            "producer_version": text(session.producer_version),
            "created_unix_ns": session.created_unix_ns,
            **{name: text(getattr(session, name)) for name in _TEXTS if getattr(session, name) is not None},
            **{name: [pair(*each) for each in getattr(session, name).items()] for name in _PAIRS},
            "argv": [text(argument) for argument in session.argv],
            "rank": session.rank,
            "world_size": session.world_size,
        },
    )


def decode_session(body: bytes, where: str) -> Session:
    """The session of a Head body. Raises InvalidCapture."""
    table = flatbuffer_tables.root(body, HEAD, where)
    session_id = table.string("session_id") or ""
    if not _UUID.fullmatch(session_id):
        raise InvalidCapture(f"{where}: session_id {session_id[:80]!r} is not a lower-case UUID with dashes")
    return Session(
        session_id=session_id,
        producer=table.string("producer") or "",
        producer_version=table.string("producer_version") or "",
        created_unix_ns=table.scalar("created_unix_ns"),
        argv=tuple(table.strings("argv")),
        rank=table.scalar("rank"),
        world_size=table.scalar("world_size"),
        **{name: table.string(name) for name in _TEXTS},  # type: ignore[arg-type]
        **{name: _decode_pairs(table.pairs(name), f"{where}: {name}") for name in _PAIRS},  # type: ignore[arg-type]
    )


def _decode_pairs(pairs: list[tuple[str, str]], where: str) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    for key, text in pairs:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidCapture(f"{where}: {key!r} is {text[:80]!r}, which is not JSON") from None
        if isinstance(value, list | dict) or key in decoded:
            raise InvalidCapture(f"{where}: {key!r} is not one scalar")
        if isinstance(value, float) and math.isinf(value) and "Infinity" not in text:
            raise InvalidCapture(f"{where}: {key!r} is {text[:80]!r}, beyond the range of a double")
        decoded[key] = value
    return decoded
