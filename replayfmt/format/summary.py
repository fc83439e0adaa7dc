"""The Head and the Summary frame: a capture's origin, totals over all of it, and how those are counted."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Protocol

import numpy as np

from replayfmt.errors import InvalidCapture

from . import flatbuffer_tables
from .codes import RecordKind, StorageOrigin
from .flatbuffer_tables import HEAD, SUMMARY, build
from .model import CaptureInfo, Summary
from .record_frames import RecordFrame

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TEXTS = ("torch_version", "python_version", "platform", "host", "cpu", "cpu_capability", "working_directory")
_PAIRS = ("libraries", "settings", "policies")


def encode_session(session: CaptureInfo) -> memoryview:
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


def decode_session(body: bytes, where: str) -> CaptureInfo:
    """The session of a Head body. Raises InvalidCapture."""
    table = flatbuffer_tables.root(body, HEAD, where)
    session_id = table.string("session_id") or ""
    if not _UUID.fullmatch(session_id):
        raise InvalidCapture(f"{where}: session_id {session_id[:80]!r} is not a lower-case UUID with dashes")
    return CaptureInfo(
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


_ORIGINS = max(StorageOrigin) + 1


class Counted(Protocol):
    """The definitions that a tally is turned into totals with: the writer's or a reader's."""

    def column(self, name: str) -> np.ndarray: ...

    def unsupported_reasons(self) -> dict[int, str]: ...


class Tally:
    """Counts that grow frame by frame: how often each signature occurred, and what storages were allocated."""

    def __init__(self) -> None:
        self._signatures = np.zeros(64, np.int64)
        self.records = 0
        self.storages = 0
        self.annotated = 0
        self._origins = np.zeros(_ORIGINS, np.int64)
        self._origin_bytes = np.zeros(_ORIGINS, np.uint64)

    def add(
        self,
        signature: np.ndarray,
        storage_origin: np.ndarray,
        storage_bytes: np.ndarray,
        annotation: np.ndarray | None,
    ) -> None:
        """Count one frame, given columns of it."""
        counts = np.bincount(signature)
        if len(counts) > len(self._signatures):
            grown = np.zeros(2 * len(counts), np.int64)
            grown[: len(self._signatures)] = self._signatures
            self._signatures = grown
        self._signatures[: len(counts)] += counts
        self.records += len(signature)
        self.storages += len(storage_origin)
        if len(storage_origin):
            self._origins += np.bincount(storage_origin, minlength=_ORIGINS)
            np.add.at(self._origin_bytes, storage_origin, storage_bytes)
        if annotation is not None:
            self.annotated += int(np.count_nonzero(annotation))

    def add_frame(self, frame: RecordFrame) -> None:
        """Count one decoded frame."""
        self.add(frame.signature, frame.storage_origin, frame.storage_bytes, frame.annotation)

    def summary(
        self, definitions: Counted, payload_bytes: int, ended_ns: int | None = None, recovered: bool = False
    ) -> Summary:
        """The totals, with `payload_bytes` of content in all payloads."""
        kinds, kernels = definitions.column("signature_kind"), definitions.column("signature_kernel")
        counts = np.zeros(len(kinds), np.int64)
        seen = self._signatures[1 : len(kinds) + 1]
        counts[: len(seen)] = seen
        by_kind = np.bincount(kinds, weights=counts, minlength=max(RecordKind) + 1)
        calls = np.bincount(kernels, weights=np.where(kinds == RecordKind.op, counts, 0), minlength=1)
        reasons: dict[str, int] = {}
        for signature, reason in definitions.unsupported_reasons().items():
            count = int(counts[signature - 1])
            if count:
                reasons[reason] = reasons.get(reason, 0) + count
        return Summary(
            ended_ns=ended_ns or None,
            recovered=recovered,
            records={kind: int(by_kind[kind]) for kind in RecordKind if by_kind[kind]},
            kernel_calls={kernel: int(calls[kernel]) for kernel in np.flatnonzero(calls).tolist()},
            storages=self.storages,
            storage_payload_bytes=payload_bytes,
            absent_storages=int(self._origins[StorageOrigin.absent]),
            unsupported=dict(sorted(reasons.items())),
            origins=_by_origin(self._origins.tolist()),
            annotated=self.annotated,
            origin_bytes=_by_origin(self._origin_bytes.tolist()),
        )


def _by_origin(counts: list[int]) -> dict[StorageOrigin, int]:
    return {StorageOrigin(origin): count for origin, count in enumerate(counts) if count}


def encode_summary(summary: Summary) -> memoryview:
    """The Summary body."""
    kinds = np.zeros(max(RecordKind) + 1, np.uint64)
    calls = np.zeros(max(summary.kernel_calls, default=0) + 1, np.uint64)
    for kind, count in summary.records.items():
        kinds[kind] = count
    for kernel, count in summary.kernel_calls.items():
        calls[kernel] = count
    by_origin = {
        name: np.array([counts.get(StorageOrigin(origin), 0) for origin in range(_ORIGINS)], np.uint64)
        for name, counts in (("storage_origins", summary.origins), ("storage_origin_bytes", summary.origin_bytes))
    }
    return build(
        SUMMARY,
        {
            "record_counts": kinds,
            "kernel_calls": calls,
            "unsupported_reason": [reason.encode() for reason in summary.unsupported],
            "unsupported_count": np.array(list(summary.unsupported.values()), np.uint64),
            **by_origin,
            "ended_ns": summary.ended_ns or 0,
            "recovered": summary.recovered,
            "storages": summary.storages,
            "storage_payload_bytes": summary.storage_payload_bytes,
            "absent_storages": summary.absent_storages,
            "annotated_records": summary.annotated,
        },
    )


def decode_summary(body: bytes, kernel_count: int, records: int, where: str) -> Summary:
    """The summary of a Summary body. Raises InvalidCapture if it cannot be one of this capture."""
    table = flatbuffer_tables.root(body, SUMMARY, where)
    empty = np.zeros(0, np.uint64)

    def column(name: str) -> list[int]:
        values = table.column(name)
        return (empty if values is None else values).tolist()

    kinds, calls = column("record_counts"), column("kernel_calls")
    reasons, counts = table.strings("unsupported_reason"), column("unsupported_count")
    if len(reasons) != len(counts) or len(set(reasons)) != len(reasons):
        raise InvalidCapture(f"{where}: {len(reasons)} reasons with {len(counts)} counts, or a reason twice")
    if any(kinds[max(RecordKind) + 1 :]) or any(calls[kernel_count + 1 :]) or any(kinds[:1]) or any(calls[:1]):
        raise InvalidCapture(f"{where}: counts of record kinds or kernels that the capture does not have")
    if sum(kinds) != records or sum(calls) != (kinds[RecordKind.op] if len(kinds) > RecordKind.op else 0):
        raise InvalidCapture(
            f"{where}: counts {sum(kinds)} records and {sum(calls)} kernel calls; the capture has {records} records"
        )
    annotated = table.scalar("annotated_records")
    if annotated > records:
        raise InvalidCapture(f"{where}: counts {annotated} annotated records; the capture has {records} records")
    return Summary(
        ended_ns=table.scalar("ended_ns") or None,
        recovered=bool(table.scalar("recovered")),
        records={RecordKind(kind): count for kind, count in enumerate(kinds) if count},
        kernel_calls={kernel: count for kernel, count in enumerate(calls) if count},
        storages=table.scalar("storages"),
        storage_payload_bytes=table.scalar("storage_payload_bytes"),
        absent_storages=table.scalar("absent_storages"),
        unsupported=dict(zip(reasons, counts, strict=True)),
        origins=_decode_origins(column("storage_origins"), where),
        origin_bytes=_decode_origins(column("storage_origin_bytes"), where),
        annotated=annotated,
    )


def _decode_origins(counts: list[int], where: str) -> dict[StorageOrigin, int]:
    if any(counts[_ORIGINS:]):
        raise InvalidCapture(f"{where}: counts of storage origins that the capture does not have")
    return _by_origin(counts[:_ORIGINS])
