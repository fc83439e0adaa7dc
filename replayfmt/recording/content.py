"""Where the content of a storage that no captured op produced comes from, as the policies of the capture decide.

Four answers: it is in a file that the capture refers to, it is embedded, a recipe stands in for it, or it is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from replayfmt.format.codes import StorageOrigin, ValueKind
from replayfmt.format.writer import CaptureWriter

from .external_files import ExternalFiles, FoundRange
from .options import CaptureOptions
from .recipes import is_synthesized, recipe
from .storage_content import embed


class Content(NamedTuple):
    """A storage's content: its origin, and the kind and id of what holds it (0: nothing)."""

    origin: StorageOrigin
    kind: ValueKind
    id: int
    found: FoundRange | None = None


ABSENT = Content(StorageOrigin.absent, ValueKind.none, 0)


class Contents:
    """Decides for each storage. Callers hold the recorder's lock."""

    def __init__(self, writer: CaptureWriter, options: CaptureOptions, files: ExternalFiles | None) -> None:
        self._writer = writer
        self._policy = options.payload
        self._files = files
        self._recipes = 0

    @property
    def recorded(self) -> bool:
        """Whether anything of content is recorded at all."""
        return self._policy != "none"

    def first(self, storage: torch.UntypedStorage, dtype: torch.dtype | None, foreign: bool) -> Content:
        """At the first use, as `dtype` (None: as bytes). `foreign`: memory that torch did not allocate.

        Raises CaptureFailed where it cannot be written, or is in a file and must not be.
        """
        if not self.recorded:
            return ABSENT
        if self._files is not None:
            found = self._files.find(storage, storage.nbytes(), foreign)
            if found is not None:
                return Content(StorageOrigin.external_file, ValueKind.range, found.range, found)
        return self.again(storage, dtype)

    def again(self, storage: torch.UntypedStorage, dtype: torch.dtype | None) -> Content:
        """After it was written from outside. Raises CaptureFailed."""
        if not self.recorded:
            return ABSENT
        if self._policy == "integers" and dtype is not None and is_synthesized(dtype):
            self._recipes += 1
            number = self._writer.recipe(recipe(storage, dtype, self._recipes))
            return Content(StorageOrigin.initializer, ValueKind.recipe, number)
        return Content(StorageOrigin.payload, ValueKind.payload, embed(self._writer, storage))

    def keep(self, found: FoundRange, alive: Callable[[], object | None]) -> None:
        """`alive` gives something but None as long as the storage of a found range lives."""
        if self._files is not None:
            self._files.keep(found, alive)

    def changed_files(self) -> list[str]:
        """What became of files that the capture refers to and that are no longer what they were: a sentence each."""
        return [] if self._files is None else self._files.changed()
