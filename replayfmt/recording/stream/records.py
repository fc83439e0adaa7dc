"""The records that are not ops, the signatures of all, and the ids of tensor metadata.

Signatures and metadata are made once each. `RedactedWriter` writes a capture that reveals neither the machine nor its
user: texts are rewritten as they are written.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from replayfmt.format.codes import RecordKind, TensorFlag, ValueKind
from replayfmt.format.model import CaptureInfo, Node, Signature, TensorDigest
from replayfmt.format.output import Uninterrupted
from replayfmt.format.redaction import Redaction
from replayfmt.format.signature_layout import SlotLayout, argument_nodes
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.environment import describe_device
from replayfmt.pytorch.tensors.memory import (
    DTYPE_CODE,
    device_of,
    dtype_of,
    is_complex,
    is_conj,
    is_neg,
    shape_of,
    stride_of,
)

from ..content.coverage import ByteRegion
from ..content.first_content import FirstContent
from .buffer import RELEASES, RecordBuffer
from .session import Session


class RedactedWriter(CaptureWriter):
    """A writer whose session, signatures and scopes go through a redaction."""

    def __init__(
        self, path: str | os.PathLike[str], session: CaptureInfo, redaction: Redaction, *, force: bool = False
    ) -> None:
        """As CaptureWriter. `session` is the one that `redaction` was made for; its redacted form is written."""
        super().__init__(path, redaction.session, force=force)
        self._redaction = redaction

    def signature(self, signature: Signature) -> int:
        return super().signature(self._redaction.signature(signature))

    def scope(self, parent: int, name: str) -> int:
        return super().scope(parent, self._redaction.text(name))


def user_names() -> list[str]:
    """The names of this process's user: the login, and the name of the home directory."""
    names = {os.path.basename(os.path.expanduser("~"))}
    with contextlib.suppress(KeyError, OSError):  # a number without a name, as in some containers
        names.add(getpass.getuser())
    return sorted(name for name in names if re.search(r"\w", name))


_DISTINCT_DETAILS = 4096  # beyond this many different unsupported records, details are left out, to bound the tables


class Unrepresentable(Exception):
    """A value that a capture cannot hold. `reason` is that of the unsupported record."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Records:
    """Writes the records around the ops."""

    def __init__(self, buffer: RecordBuffer) -> None:
        self._buffer = buffer
        self._writer = buffer.writer
        self._lock = buffer.lock
        self._signatures: dict[Any, int] = {}
        self._devices: dict[torch.device, int] = {}
        self._details: set[tuple[str, str, str]] = set()
        # What is unsupported for as long as this is recorded: reason, op and detail, until recording begins.
        self.notes: dict[str, None] = {}  # what is said once, at the end of the capture
        self.from_start: list[tuple[str, str, str]] = []
        # Called with each device and its id, until it returns that the device is there.
        self.new_device: Callable[[torch.device, int], bool] | None = None

    def signature(self, key: Any, make: Callable[[], Signature]) -> int:
        """The id of the signature identified by `key`, made at first use."""
        number = self._signatures.get(key)
        if number is None:
            with self._lock, Uninterrupted():
                signature = make()
                number = self._writer.signature(signature)
                self._buffer.note_signature(number, *SlotLayout(signature).slots)
                self._signatures[key] = number
        return number

    def device(self, device: torch.device) -> int:
        number = self._devices.get(device)
        if number is None:
            with self._lock:
                number = self._writer.device(describe_device(device))
                if self.new_device is None or self.new_device(device, number):
                    self._devices[device] = number
        return number

    def _constant(
        self,
        key: tuple[Any, ...],
        nodes: Callable[[], tuple[Node, ...]],
        words: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> int:
        """Add a record whose signature is identified by `key`: a record kind, and the parts of its nodes that vary.
        Returns the signature's id."""
        signature = self._signatures.get(key)
        if signature is None:
            signature = self.signature(key, lambda: Signature(key[0], nodes()))
        self._buffer.append(signature, words, floats)
        return signature

    # ------------------------------------------------------------------------------------------------------- storages

    def storage_import(self, storage: int, content: FirstContent, version: int, reason: str) -> None:
        kind = content.kind
        self._constant(
            (RecordKind.storage_import, kind, reason),
            lambda: argument_nodes(RecordKind.storage_import, payload=kind, reason=reason),
            (storage, version) if kind is ValueKind.none else (storage, content.id, version),
        )

    def storage_resize(self, storage: int, length: int) -> None:
        self._constant(
            (RecordKind.storage_resize,), lambda: argument_nodes(RecordKind.storage_resize), (storage, length)
        )

    def storage_releases(self, storages: Sequence[int]) -> None:
        """One release record for each storage, in one go."""
        self._buffer.append(self.release_head(), storages, records=len(storages))

    def release_head(self) -> int:
        """The first word of such a run."""
        kind = RecordKind.storage_release
        return RELEASES + self.signature((kind,), lambda: Signature(kind, argument_nodes(kind)))

    # ---------------------------------------------------------------------------------------------------------- state

    def generator_state(self, generator: int, payload: int) -> None:
        """`payload` 0: the state is not captured."""
        kind = ValueKind.payload if payload else ValueKind.none
        self._constant(
            (RecordKind.generator_state, kind),
            lambda: argument_nodes(RecordKind.generator_state, payload=kind),
            (generator, payload) if payload else (generator,),
        )

    def global_state(self, changes: dict[str, bool | int | float | str | None]) -> None:
        nodes = tuple(Node.scalar(name, value) for name, value in changes.items())
        words = [v for v in changes.values() if isinstance(v, int) and not isinstance(v, bool)]
        floats = [v for v in changes.values() if isinstance(v, float)]
        self._constant((RecordKind.global_state, nodes), lambda: nodes, words, floats)

    def grad_mode(self, session: Session) -> None:
        """The calling thread's."""
        kind = RecordKind.global_state
        made = [Signature(kind, (Node.scalar("grad_enabled", mode),)) for mode in (False, True)]
        signatures = [self.signature((kind, each.args), partial(Signature, kind, each.args)) for each in made]
        buffer = self._buffer
        buffer.appended += session.state_grad_mode(signatures, buffer.current(), buffer.now())

    # ------------------------------------------------------------------------------------------------ scopes and notes

    def scope_begin(self, name: str) -> None:
        self._constant((RecordKind.scope_begin, name), lambda: argument_nodes(RecordKind.scope_begin, name=name))

    def scope_end(self, name: str) -> None:
        self._constant((RecordKind.scope_end, name), lambda: argument_nodes(RecordKind.scope_end, name=name))

    def unsupported(self, reason: str, op: str, detail: str) -> int:
        """Work that cannot be reproduced. Returns its record's signature."""
        if (reason, op, detail) not in self._details:
            if len(self._details) >= _DISTINCT_DETAILS:
                op, detail = "", "too many different ones to describe each"
            self._details.add((reason, op, detail))
        return self._constant(
            (RecordKind.unsupported, reason, op, detail),
            lambda: argument_nodes(RecordKind.unsupported, reason=reason, op=op, detail=detail),
        )

    def told(self, reason: str) -> bool:
        """Whether there is an unsupported record with this reason."""
        return any(each[0] == reason for each in self._details)

    def begin(self) -> None:
        """Recording begins, or goes on."""
        for each in self.from_start:
            self.unsupported(*each)
        self.from_start.clear()

    # -------------------------------------------------------------------------------------------------------- streams

    def on_device(self, kind: RecordKind, device: torch.device, *words: int) -> None:
        """A record about a device, or a stream or an event of it. `words` fill its slots."""
        number = self.device(device)
        self._constant((kind, number), lambda: nodes_on_device(kind, number), words)

    def event_synchronize(self, event: int) -> None:
        kind = RecordKind.event_synchronize
        self._constant((kind,), lambda: argument_nodes(kind), (event,))

    # -------------------------------------------------------------------------------------------------------- digests

    def digest(self, tensor: int, of: int, result: int, digest: TensorDigest | None) -> None:
        """A digest for verification; `of` is the ordinal of the op whose result it is, -1 for a live tensor. None:
        nothing can be compared with it."""
        self._digested((RecordKind.digest,), (tensor, of, result), digest)

    def host_read(self, method: str, tensor: int, digest: TensorDigest | None) -> None:
        """A value left the device for the host. No digest: its value is not recorded."""
        self._digested((RecordKind.host_read, method), (tensor,), digest, method=method)

    def _digested(
        self, key: tuple[Any, ...], slots: tuple[int, ...], digest: TensorDigest | None, **given: str
    ) -> None:
        ints, floats = ([], []) if digest is None else digest.slots()
        self._constant(
            (*key, *(() if digest is None else _digest_key(digest))),
            lambda: (*argument_nodes(key[0], **given), *(() if digest is None else digest.nodes())),
            (*slots, *ints),
            floats,
        )


def nodes_on_device(kind: RecordKind, device: int) -> tuple[Node, ...]:
    """The nodes of a record about the device with an id."""
    return tuple(
        Node(ValueKind.device, "device", device) if node.kind is ValueKind.device else node
        for node in argument_nodes(kind)
    )


def _digest_key(digest: TensorDigest) -> tuple[Any, ...]:
    """The parts of a digest that determine its nodes."""
    return (*map(type, digest), *map(type, digest.sample))


_REGIONS = 16  # of one metadata that are kept
Key = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device, int]


@dataclass(frozen=True, slots=True)
class MetaParams:
    """The parameters needed to recreate a tensor of a meta id."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    flags: TensorFlag
    item: int  # bytes per element
    elements: int
    _regions: dict[int, ByteRegion] = field(default_factory=dict, compare=False, repr=False)  # by offset

    def region(self, offset: int) -> ByteRegion:
        """The bytes of a view with this metadata, `offset` elements into its storage."""
        region = self._regions.get(offset)
        if region is None:
            if len(self._regions) >= _REGIONS:
                self._regions.clear()
            strides = tuple(stride * self.item for stride in self.strides)
            region = self._regions[offset] = ByteRegion(offset * self.item, self.sizes, strides, self.item)
        return region


class _Params(dict[int, MetaParams]):
    """By meta id."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __missing__(self, number: int) -> MetaParams:
        dtype, sizes, strides, flags = self._session.meta(number)
        params = self[number] = MetaParams(dtype, sizes, strides, TensorFlag(flags), dtype.itemsize, math.prod(sizes))
        return params


class TensorMetas(dict[Key, int]):
    """Meta ids by content. `params` is indexed by meta id."""

    def __init__(self, records: Records, session: Session) -> None:
        """`session` numbers them."""
        self._session = session
        self._records = records
        self.params = _Params(session)

    def of(self, tensor: torch.Tensor, zero: bool = False) -> int:
        """The meta id of a strided tensor as it is now."""
        number = self._session.meta_of(tensor)
        if number:
            return number
        conj = is_complex(tensor) and is_conj(tensor)
        neg = is_neg(tensor)
        flags = (TensorFlag.conj if conj else 0) | (TensorFlag.neg if neg else 0) | (TensorFlag.zero if zero else 0)
        key = (dtype_of(tensor), shape_of(tensor), stride_of(tensor), device_of(tensor), int(flags))
        return self[key]

    def once(self, meta: int, device: torch.device) -> int:
        """The meta id of an expanded view's elements, each once: repeated dimensions have size 1."""
        params = self.params[meta]
        sizes = [size if stride else min(size, 1) for size, stride in zip(params.sizes, params.strides, strict=True)]
        key = (params.dtype, torch.Size(sizes), params.strides, device, int(params.flags))
        return self[key]

    def row(self, dtype: torch.dtype, elements: int, device: torch.device) -> int:
        """The meta id of so many elements side by side."""
        key = (dtype, torch.Size((elements,)), (1,), device, 0)
        return self[key]

    def __missing__(self, key: Key) -> int:
        dtype, sizes, strides, device, bits = key
        code, device_id = DTYPE_CODE[dtype], self._records.device(device)
        number = self[key] = self._session.define_meta(dtype, device, bits, sizes, strides, int(code), device_id)
        return number
