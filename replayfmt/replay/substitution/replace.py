"""The fast path: a replay's code calls the replacements directly."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from replayfmt.errors import SubstitutionFailed
from replayfmt.format.reader import CaptureReader

from .call_sites import CallSite
from .checked import failure
from .table import Substitutions


class Replace:
    """Replaces calls with the replacements chosen for them."""

    def __init__(self, reader: CaptureReader, table: Substitutions, describe: Callable[[int], tuple[str, str]]) -> None:
        self._reader, self._table, self._describe = reader, table, describe

    @property
    def reason(self) -> str:
        return self._table.reason

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        replacement = self._table.find(site.signature_id, site.metas, site.ordinal)
        if replacement is None:
            return None
        wrapped = site.wrap(replacement.call)
        # Wrappers of custom operators are made for each site: they may depend on settings that change during the
        # replay.
        return (("replacement", replacement.call) if wrapped is replacement.call else None), wrapped

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        replacement = self._table.at(ordinal)
        return None if replacement is None else failure(self._reader, self._describe, ordinal, replacement, error)
