"""The content that a capture itself holds of an op's arguments and results, without running anything.

This is content that entered from outside and that no op has written since. Everything else was computed, and the
capture has at most digests of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayfmt.errors import ContentNotCaptured, ExternalFileProblem, InvalidCapture
from replayfmt.format.codes import RecordKind, StorageOrigin, TensorFlag, ValueKind
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.bounds import view_inside
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE
from replayfmt.pytorch.tensors.memory import host_view, new_storage

from .op_values import tensors_of
from .planning.allowed_imports import AllowedImports
from .planning.effects import Effects, effects_of_missing
from .planning.external_files import ExternalFiles
from .planning.kernels import ResolvedKernel
from .planning.overview import describe, unseen_before
from .planning.resolve import resolve
from .planning.slices import Slicer
from .planning.sources import NOTHING, ContentSource, source_of

_BORN_WITH = {
    StorageOrigin.payload: ValueKind.payload,
    StorageOrigin.external_file: ValueKind.range,
    StorageOrigin.initializer: ValueKind.recipe,
}


class HeldContent:
    """The content around one op. Use it as a context manager: it keeps files open."""

    def __init__(self, reader: CaptureReader, file_remaps: Sequence[str] = ()) -> None:
        """Raises UsageError if a remap is wrong."""
        self._reader = reader
        self._files = ExternalFiles(reader, file_remaps)
        self._sources: dict[int, ContentSource | str] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def look(self, record: Record, *, results: bool) -> None:
        """Find out where the content of an op's arguments comes from; with `results`, as the op left it."""
        wanted = {value.storage for value in tensors_of(record.results if results else record.args)} - {0}
        slicer = Slicer(self._reader, self._effects, lambda number: False)
        self._sources = {}
        missing = set(wanted)
        unseen = next(unseen_before(self._reader, record.ordinal), -1)
        for row in slicer.rows(record.ordinal + results, backwards=True):
            if not missing:
                return
            if row.ordinal < unseen:
                break
            if row.kind is RecordKind.op:
                for storage in missing & row.written:
                    self._sources[storage] = self._computed(row.ordinal, record.ordinal)
            elif row.kind is RecordKind.storage_import:
                for storage in missing & row.touched:
                    self._sources[storage] = source_of(self._reader.record(row.ordinal).argument("payload"))
            elif row.kind is RecordKind.storage_resize:
                for storage in missing & row.touched:
                    self._sources[storage] = f"its memory was resized at ordinal {row.ordinal}"
            missing -= set(self._sources)
        for storage in missing:
            if unseen >= 0:
                self._sources[storage] = (
                    f"the work of the {self._reader.record(unseen).kind.name} record at ordinal "
                    f"{unseen} may have written it"
                )
                continue
            born = self._reader.storage(storage)
            if born.origin in (StorageOrigin.uninitialized, StorageOrigin.op):
                self._sources[storage] = "nothing that was captured wrote its memory"
            else:
                held = ContentSource(_BORN_WITH[born.origin], born.payload) if born.payload else NOTHING
                self._sources[storage] = held

    def tensor(self, value: TensorValue, name: str) -> torch.Tensor:
        """A strided tensor of that op, on the CPU; tensors of one storage share new memory. `name` is what errors call
        it.

        Raises ContentNotCaptured if the capture does not hold its content, InvalidCapture if it lies outside of
        it.
        """
        meta = value.meta
        if meta.dtype not in TORCH_DTYPE:
            raise ContentNotCaptured(f"{self._reader.path}: {name}: this torch has no dtype {meta.dtype.name}")
        dtype = TORCH_DTYPE[meta.dtype]
        device = self._reader.devices[meta.device]
        try:
            if meta.flags & TensorFlag.zero:
                return torch.zeros(meta.sizes, dtype=dtype)
            if device is not None and device.kind == "meta":
                return torch.empty_strided(meta.sizes, meta.strides, dtype=dtype, device="meta")
        except RuntimeError as error:
            raise InvalidCapture(f"{self._reader.path}: {name}: {str(error).partition(chr(10))[0]}") from None
        storage = self._storage(value.storage, name)
        try:
            return view_inside(storage, dtype, meta.sizes, meta.strides, value.offset, meta.flags)
        except RuntimeError as error:
            raise InvalidCapture(f"{self._reader.path}: {name}: {error}") from None

    def _storage(self, number: int, name: str) -> torch.UntypedStorage:
        if not number:
            return torch.UntypedStorage(0)
        known = self._storages.get(number)
        if known is None:
            known = self._storages[number] = self._load(self._sources[number], name)
        return known

    def _load(self, source: ContentSource | str, name: str) -> torch.UntypedStorage:
        path = self._reader.path
        if isinstance(source, str):
            raise ContentNotCaptured(
                f"{path}: {name}: the capture does not hold its content: {source}; replay=True computes it"
            )
        if source.kind is ValueKind.payload:
            storage = new_storage(self._reader.payload_info(source.id).raw_bytes, torch.device("cpu"))
            self._reader.read_payload_into(source.id, host_view(storage))
            return storage
        if source.kind is ValueKind.range:
            captured = self._reader.file_ranges[source.id]
            assert captured is not None
            findings = self._files.validate(ranges=(source.id,))
            if findings:
                raise ExternalFileProblem(f"{path}: {name}: {findings[0]}")
            storage = new_storage(captured.bytes, torch.device("cpu"))
            self._files.read_into(source.id, host_view(storage), 0)
            return storage
        policy = self._reader.session.policies.get("payload", "unknown")
        raise ContentNotCaptured(
            f"{path}: {name}: its content was left out of the capture (payload={policy}); "
            "replay=True makes it up as a replay does"
        )

    def _computed(self, giver: int, asked: int) -> str:
        if giver == asked:
            return "this op computed it"
        return f"ordinal {giver} ({describe(self._reader, giver)[0]}) wrote it, or may have"

    def _effects(self, signature_id: int) -> Effects:
        layout = self._reader.layouts[signature_id]
        kernel = self._reader.kernels[layout.signature.kernel]
        resolved = resolve(kernel, self._reader.session.torch_version, AllowedImports())
        return (
            resolved.effects(layout)
            if isinstance(resolved, ResolvedKernel)
            else effects_of_missing(layout, kernel.schema)
        )

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> HeldContent:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
