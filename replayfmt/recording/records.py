"""The records that are not ops: their signatures, made once each, and their rows.

Every method appends one record (or a run of releases) to the buffer, stamped with the calling thread's context and the
time. Ids are the capture's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch

from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.digest import TensorDigest
from replayfmt.format.model import Device, Node, Signature
from replayfmt.pytorch.environment import describe_device

from .buffer import RecordBuffer, packer

_DISTINCT_DETAILS = 4096   # beyond that many different unsupported records, details are left out: the tables must not grow


def constant_node(name: str, value: bool | int | float | str | None) -> Node:
    """A node for a scalar; ints and floats take a slot."""
    if value is None:
        return Node(ValueKind.none, name)
    if isinstance(value, bool):
        return Node(ValueKind.bool, name, int(value))
    if isinstance(value, int):
        return Node(ValueKind.int, name)
    if isinstance(value, float):
        return Node(ValueKind.float, name)
    return Node(ValueKind.string, name, value)


class Unrepresentable(Exception):
    """A value that a capture cannot hold. `reason` is that of the unsupported record."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Records:
    """Writes the records around the ops. `context` gives the calling thread's context id."""

    def __init__(self, buffer: RecordBuffer, context: Callable[[], int], started: int) -> None:
        self._buffer = buffer
        self._writer = buffer.writer
        self._lock = buffer.lock
        self.context = context
        self.started = started              # perf_counter_ns of the session's start
        self._signatures: dict[Any, int] = {}
        self._devices: dict[torch.device, int] = {}
        self._details: set[tuple[str, str, str]] = set()

    def signature(self, key: Any, make: Callable[[], Signature]) -> int:
        """The id of the signature known by `key`, made at first use."""
        number = self._signatures.get(key)
        if number is None:
            with self._lock:
                signature = make()
                number = self._writer.signature(signature)
                self._buffer.note_signature(number, *signature.slots)
                self._signatures[key] = number
        return number

    def device(self, device: torch.device) -> int:
        number = self._devices.get(device)
        if number is None:
            with self._lock:
                number = self._devices[device] = self._writer.device(describe_device(device))
        return number

    def plain_device(self, device: Device) -> int:
        with self._lock:
            return self._writer.device(device)

    def now(self) -> int:
        return time.perf_counter_ns() - self.started

    def _add(self, signature: int, words: Sequence[int] = (), floats: Sequence[float] = ()) -> None:
        pack = packer(len(words), len(floats))
        self._buffer.rows.append(pack(signature, self.context(), self.now(), 0, *words, *floats))

    def _constant(self, kind: RecordKind, *nodes: Node, words: Sequence[int] = (), floats: Sequence[float] = ()) -> None:
        self._add(self.signature((kind, nodes), lambda: Signature(kind, nodes)), words, floats)

    # ------------------------------------------------------------------------------------------------------- storages

    def storage_import(self, storage: int, payload: int, version: int, reason: str) -> None:
        """Content enters. `payload` 0: not captured."""
        self._constant(
            RecordKind.storage_import,
            Node(ValueKind.storage, "storage"),
            Node(ValueKind.payload if payload else ValueKind.none, "payload"),
            Node(ValueKind.int, "version"),
            Node(ValueKind.string, "reason", reason),
            words=(storage, payload, version) if payload else (storage, version),
        )

    def storage_resize(self, storage: int, length: int) -> None:
        nodes = (Node(ValueKind.storage, "storage"), Node(ValueKind.int, "bytes"))
        self._constant(RecordKind.storage_resize, *nodes, words=(storage, length))

    def storage_releases(self, storages: Iterable[int]) -> None:
        """One release record for each storage, in one go."""
        key = RecordKind.storage_release
        number = self.signature(key, lambda: Signature(key, (Node(ValueKind.storage, "storage"),)))
        self._buffer.rows.extend(
            map(packer(1, 0), repeat(number), repeat(self.context()), repeat(self.now()), repeat(0), storages)
        )

    # ---------------------------------------------------------------------------------------------------------- state

    def generator_state(self, generator: int, payload: int) -> None:
        nodes = (Node(ValueKind.generator, "generator"), Node(ValueKind.payload, "payload"))
        self._constant(RecordKind.generator_state, *nodes, words=(generator, payload))

    def global_state(self, changes: dict[str, bool | int | float | str | None]) -> None:
        nodes = tuple(constant_node(name, value) for name, value in changes.items())
        words = [v for v in changes.values() if isinstance(v, int) and not isinstance(v, bool)]
        floats = [v for v in changes.values() if isinstance(v, float)]
        self._constant(RecordKind.global_state, *nodes, words=words, floats=floats)

    # ------------------------------------------------------------------------------------------------ scopes and notes

    def scope_begin(self, name: str) -> None:
        self._constant(RecordKind.scope_begin, Node(ValueKind.string, "name", name))

    def scope_end(self, name: str) -> None:
        self._constant(RecordKind.scope_end, Node(ValueKind.string, "name", name))

    def unsupported(self, reason: str, op: str, detail: str) -> None:
        if (reason, op, detail) not in self._details:
            if len(self._details) >= _DISTINCT_DETAILS:
                op, detail = "", "too many different ones to describe each"
            self._details.add((reason, op, detail))
        texts = (("reason", reason), ("op", op), ("detail", detail))
        self._constant(RecordKind.unsupported, *(Node(ValueKind.string, name, text) for name, text in texts))

    # -------------------------------------------------------------------------------------------------------- digests

    def digest(self, tensor: int, of: int, result: int, digest: TensorDigest) -> None:
        """What verification compares; `of` is the ordinal of the op whose result it is, -1 for a live tensor."""
        nodes = (Node(ValueKind.tensor, "tensor"), Node(ValueKind.int, "of"), Node(ValueKind.int, "result"), *digest.nodes())
        ints, floats = digest.slots()
        self._constant(RecordKind.digest, *nodes, words=(tensor, of, result, *ints), floats=floats)

    def host_read(self, method: str, tensor: int, digest: TensorDigest | None) -> None:
        """A value left the device for the host. No digest: its value is not recorded."""
        nodes: tuple[Node, ...] = (Node(ValueKind.string, "method", method), Node(ValueKind.tensor, "tensor"))
        ints: list[int] = []
        floats: list[float] = []
        if digest is not None:
            nodes += digest.nodes()
            ints, floats = digest.slots()
        self._constant(RecordKind.host_read, *nodes, words=(tensor, *ints), floats=floats)
