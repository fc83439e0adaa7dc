"""Where the external files of a capture are now: CAPTURED=REPLAY pairs of path prefixes, as the user gave them.

Pure path logic. A prefix matches whole components of a captured path; the longest match is replaced, once, and the
result is not looked at again. What a remap makes of a path lies below its replacement: a captured path that climbs out
again with `..` is not matched, because the capture must not choose where the user's words lead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replayfmt.errors import UsageError
from replayfmt.format.arguments import texts_of

FLAG = "--replay-file-remap"


def _components(path: str) -> tuple[str, ...]:
    """A path's parts, without empty ones and `.`; a leading slash is a part of its own, `..` stays as it is."""
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    return ("/", *parts) if path.startswith("/") else parts


@dataclass(frozen=True)
class _Remap:
    text: str  # as given
    captured: tuple[str, ...]
    replay: str


class FileRemaps:
    """Path prefixes to replace; an empty one changes nothing."""

    def __init__(self, remaps: Sequence[_Remap] = ()) -> None:
        self._remaps = tuple(sorted(remaps, key=lambda remap: len(remap.captured), reverse=True))

    @classmethod
    def parse(cls, values: Sequence[str]) -> FileRemaps:
        """Remaps from CAPTURED=REPLAY texts, each split at its first `=`. Raises UsageError if one has no `=` or no
        captured prefix, or if two have the same one. An empty REPLAY takes the prefix away."""
        remaps: list[_Remap] = []
        for value in texts_of("file_remaps", values):
            captured, equals, replay = value.partition("=")
            if not equals:
                raise UsageError(f"{FLAG}={value}: expected CAPTURED=REPLAY, found no `=`")
            if not captured:
                raise UsageError(
                    f"{FLAG}={value}: the captured prefix before `=` is empty; give the path, or the "
                    "leading directories of it, that the capture names"
                )
            if "\0" in value:
                raise UsageError(f"{FLAG}={value!r}: a path cannot hold a NUL")
            remap = _Remap(value, _components(captured), replay)
            for other in remaps:
                if other.captured == remap.captured:
                    raise UsageError(f"{FLAG}={value}: {FLAG}={other.text} has the same captured prefix; give it once")
            remaps.append(remap)
        return cls(remaps)

    def __bool__(self) -> bool:
        return bool(self._remaps)

    def _find(self, path: str) -> _Remap | None:
        parts = _components(path)
        for remap in self._remaps:
            if not remap.captured and path.startswith("/"):
                continue  # `.` is where relative paths begin, and no other
            if parts[: len(remap.captured)] == remap.captured and ".." not in parts[len(remap.captured) :]:
                return remap
        return None

    def apply(self, path: str) -> str:
        """Where a captured path is now: the path as it is where no prefix matches. A path that an empty REPLAY leaves
        nothing of raises UsageError."""
        remap = self._find(path)
        if remap is None:
            return path
        rest = "/".join(_components(path)[len(remap.captured) :])
        if not remap.replay:
            replaced = rest
        elif not rest:
            replaced = remap.replay
        else:
            replaced = remap.replay.rstrip("/") + "/" + rest
        if not replaced:
            raise UsageError(f"{FLAG}={remap.text} leaves nothing of the captured path {path}")
        return replaced

    def check_used(self, paths: Iterable[str]) -> None:
        """Raise UsageError where a remap is the longest match of none of the captured `paths`: it would do nothing."""
        paths = list(paths)
        used = {remap.text for path in paths if (remap := self._find(path)) is not None}
        for remap in self._remaps:
            if remap.text not in used:
                some = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
                raise UsageError(
                    f"{FLAG}={remap.text} matches no external file of the capture, which names "
                    f"{some or 'none'}; prefixes match whole path components, the longest wins"
                )
