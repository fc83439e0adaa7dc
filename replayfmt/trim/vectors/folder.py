"""A directory of result files that is written completely or not at all: it is created beside its final name and renamed
when complete. With `force` it replaces an earlier directory of the same kind, but nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replayfmt.errors import CaptureFailed, OutputExists, UsageError
from replayfmt.format.container.output import check_folder

INDEX = "index.json"
FORMAT = "opreplay-vectors"
_ENDINGS = {".json", ".safetensors"}


@contextmanager
def new_folder(path: str, force: bool) -> Iterator[Path]:
    """Where to write; the directory is renamed when everything inside has succeeded, and removed otherwise. It must
    then contain an INDEX.

    Raises OutputExists for an existing directory without `force`, UsageError for one that must not be replaced, and
    CaptureFailed if something cannot be written.
    """
    final = Path(path)
    partial = final.with_name(f"{final.name}.partial") if final.name else final
    if not final.name:
        raise UsageError(f"--vectors={path}: expected the name of a directory")
    try:
        _check(final, force)
        check_folder(str(final))
        if partial.is_dir() and not partial.is_symlink() and force:
            _check(partial, force=True, index=False)
            shutil.rmtree(partial)
        partial.mkdir()
    except FileExistsError:
        raise OutputExists(
            f"{partial}: exists already, from a run that is still in progress or was interrupted; remove it, or "
            f"use --force"
        ) from None
    except OSError as error:
        raise CaptureFailed(f"{partial}: cannot be created: {error.strerror}") from None
    try:
        yield partial
        _check(final, force)
        if final.is_dir():
            shutil.rmtree(final)
        os.rename(partial, final)
    except OSError as error:
        raise CaptureFailed(f"{error.filename or final}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(folder: Path, force: bool, index: bool = True) -> None:
    """Raise if a directory cannot get this name."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{folder}: is not a directory; name a new one")
    names = [each.name for each in folder.iterdir()]
    if not names:
        return
    if not force:
        raise OutputExists(f"{folder}: exists already; remove it, write elsewhere, or use --force")
    ours = all(Path(name).suffix in _ENDINGS for name in names) and (not index or _is_index(folder / INDEX))
    if not ours:
        raise UsageError(
            f"{folder}: contains something other than test vectors, and is not replaced; name another directory"
        )


def _is_index(path: Path) -> bool:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("format") == FORMAT
