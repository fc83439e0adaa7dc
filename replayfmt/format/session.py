"""The Head frame: what a capture says of its origin, as model.Session."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import flatbuffers

from replayfmt.errors import InvalidCapture

from .container import flat
from .container.layouts import HEAD
from .definitions.tables_output import camel, string_vector
from .generated import Head, KeyValue
from .model import Session

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TEXTS = ("torch_version", "python_version", "platform", "host", "cpu", "cpu_capability", "working_directory")
_PAIRS = ("libraries", "settings", "policies")


def encode_session(session: Session) -> memoryview:
    """The Head body. Raises ValueError where the session cannot be stored."""
    if not _UUID.fullmatch(session.session_id):
        raise ValueError(f"session_id {session.session_id!r} is not a lower-case UUID with dashes")
    builder = flatbuffers.Builder(1024)

    def text(value: str) -> int:
        return builder.CreateString(value.encode(errors="backslashreplace"))

    def vector(places: list[int]) -> int:
        builder.StartVector(4, len(places), 4)
        for place in reversed(places):
            builder.PrependUOffsetTRelative(place)
        return int(builder.EndVector())

    def pair(key: str, value: Any) -> int:
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise ValueError(f"session value {key!r} is {value!r}; only JSON scalars can be stored")
        places = text(key), text(json.dumps(value))
        KeyValue.Start(builder)
        KeyValue.AddKey(builder, places[0])
        KeyValue.AddValue(builder, places[1])
        return int(KeyValue.End(builder))

    pairs = {name: vector([pair(k, v) for k, v in getattr(session, name).items()]) for name in _PAIRS}
    argv = string_vector(builder, [argument.encode(errors="backslashreplace") for argument in session.argv])
    texts = {name: text(getattr(session, name)) for name in _TEXTS if getattr(session, name) is not None}
    identity = text(session.session_id), text(session.producer), text(session.producer_version)
    Head.Start(builder)
    Head.AddSessionId(builder, identity[0])
    Head.AddProducer(builder, identity[1])
    Head.AddProducerVersion(builder, identity[2])
    Head.AddCreatedUnixNs(builder, session.created_unix_ns)
    for name, place in {**texts, **pairs, "argv": argv}.items():
        getattr(Head, f"Add{camel(name)}")(builder, place)
    Head.AddRank(builder, session.rank)
    Head.AddWorldSize(builder, session.world_size)
    builder.Finish(Head.End(builder))
    return memoryview(builder.Bytes)[builder.Head():]


def decode_session(body: bytes, where: str) -> Session:
    """The session of a Head body. Raises InvalidCapture."""
    table = flat.root(body, HEAD, where)
    session_id = table.string("session_id") or ""
    if not _UUID.fullmatch(session_id):
        raise InvalidCapture(f"{where}: session_id {session_id[:80]!r} is not a lower-case UUID with dashes")
    return Session(
        session_id=session_id, producer=table.string("producer") or "",
        producer_version=table.string("producer_version") or "", created_unix_ns=table.scalar("created_unix_ns"),
        argv=tuple(table.strings("argv")), rank=table.scalar("rank"), world_size=table.scalar("world_size"),
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
