"""Decides where the content of a storage that no captured op produced comes from, by the capture's policies.

Four answers: it is in a file that the capture refers to, it is embedded, a recipe replaces it, or it is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from replayfmt.format.codes import StorageOrigin, ValueKind
from replayfmt.format.model import FileIdentity
from replayfmt.format.writer import CaptureWriter

from ..options import CaptureOptions
from .external_files import FileBackedStorages, FoundRange
from .file_mappings import FileMappings
from .known_files import dtypes_in
from .recipes import is_synthesized, recipe
from .storage_content import embed, is_readable

# The safetensors names of the dtypes whose content is left out if only integers are embedded.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
}


class FirstContent(NamedTuple):
    """A storage's content: its origin, and the kind and id of its holder (0: none)."""

    origin: StorageOrigin
    kind: ValueKind
    id: int
    found: FoundRange | None = None


ABSENT = FirstContent(StorageOrigin.absent, ValueKind.none, 0)
UNREADABLE = ABSENT._replace()  # it should be recorded but cannot be read


class FirstContents:
    """Decides the first content of each storage. Callers hold the recorder's lock."""

    def __init__(self, writer: CaptureWriter, options: CaptureOptions, files: FileBackedStorages | None) -> None:
        self._writer = writer
        self._policy = options.payload
        self._files = files
        self._recipes = 0
        self._mappings = FileMappings()
        self._dtypes: dict[tuple[str, FileIdentity], dict[tuple[int, int], str]] = {}

    @property
    def recorded(self) -> bool:
        """Whether any content is recorded at all."""
        return self._policy != "none"

    @property
    def exact(self) -> bool:
        """Whether a replay has all content as it was."""
        return self._policy == "full"

    def first(
        self, storage: torch.UntypedStorage, dtype: torch.dtype | None, foreign: bool, private: bool
    ) -> FirstContent:
        """The content at the first use, as `dtype` (None: as bytes). `foreign`: memory that torch did not allocate and
        that may be a file's. `private`: see `is_private`.

        Raises CaptureFailed if it cannot be written, or is in a file although the policy forbids that.
        """
        if not self.recorded:
            loaded = self._loaded_as(storage) if foreign and dtype is torch.uint8 else None
            return ABSENT if loaded is None else self._recipe(storage, loaded, statistics=False)
        if self._files is not None:
            found = self._files.find(storage, storage.nbytes(), foreign)
            if found is not None:
                return FirstContent(StorageOrigin.external_file, ValueKind.range, found.range, found)
        if self._policy == "integers" and foreign and dtype is torch.uint8:
            loaded = self._loaded_as(storage)
            if loaded is None and self._is_of_lost_file(storage):
                return ABSENT  # these bytes may be floats, and there is no way left to tell
            dtype = loaded or dtype
        return self.again(storage, dtype, private)

    def again(self, storage: torch.UntypedStorage, dtype: torch.dtype | None, private: bool = False) -> FirstContent:
        """The content after a write from outside. UNREADABLE if its memory cannot be read. Raises CaptureFailed."""
        if not self.recorded:
            return ABSENT
        if not private and not is_readable(storage):
            return UNREADABLE
        if self._policy == "integers" and dtype is not None and is_synthesized(dtype):
            return self._recipe(storage, dtype)
        return FirstContent(StorageOrigin.payload, ValueKind.payload, embed(self._writer, storage))

    def _recipe(self, storage: torch.UntypedStorage, dtype: torch.dtype, statistics: bool = True) -> FirstContent:
        self._recipes += 1
        number = self._writer.recipe(recipe(storage, dtype, self._recipes, statistics=statistics))
        return FirstContent(StorageOrigin.initializer, ValueKind.recipe, number)

    def _loaded_as(self, storage: torch.UntypedStorage) -> torch.dtype | None:
        """The dtype that a loader is about to give to bytes that are a tensor in a safetensors file. It views them as
        bytes before it says that they are floats."""
        if storage.device.type != "cpu":
            return None
        found = self._mappings.find(storage.data_ptr(), storage.nbytes())
        if found is None:
            return None
        key = found.path, found.identity
        if key not in self._dtypes:
            self._dtypes[key] = dtypes_in(found.path)
        name = self._dtypes[key].get((found.offset, found.bytes))
        return None if name is None else _DTYPES.get(name)

    def is_private(self, storage: torch.UntypedStorage) -> bool:
        """Whether its bytes are in host memory of this process alone, and in no file."""
        if storage.device.type != "cpu" or not storage.nbytes() or storage.is_shared():
            return False
        return storage.resizable() or self._mappings.holds_no_file(storage.data_ptr(), storage.nbytes())

    def _is_of_lost_file(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is mapped from a file that has since been removed, replaced or written, and whose header is
        therefore lost."""
        if storage.device.type != "cpu" or not storage.nbytes():
            return False
        address, length = storage.data_ptr(), storage.nbytes()
        return self._mappings.find(address, length) is None and self._mappings.is_file(address, length)

    def keep(self, found: FoundRange, alive: Callable[[], object | None]) -> None:
        """`alive` returns something other than None as long as the storage of a found range lives."""
        if self._files is not None:
            self._files.keep(found, alive)

    def changed_files(self) -> list[str]:
        """One message for each file that the capture refers to and that has changed since, saying what happened to
        it."""
        return [] if self._files is None else self._files.changed()
