"""The folder of a report's pictures: refused early, then all of its files are written, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from replayfmt.benchmark.output import OutputFile, output_file, refuse_existing
from replayfmt.errors import CaptureFailed, UsageError

from .contents import ReportContents
from .pictures import MissingPicture
from .plots import draw_plots, file_names, plots_of

_FLAG = "--plots"


@dataclass(frozen=True)
class PlotFolder:
    """Files that are complete, but for their names; and what there is no picture of."""

    files: dict[Path, OutputFile]
    missing: list[MissingPicture]

    def commit(self) -> list[Path]:
        """Give the files their names, which are returned."""
        for file in self.files.values():
            file.commit()
        return list(self.files)


@contextmanager
def plot_folder(folder: str, contents: ReportContents, others: Sequence[str], force: bool) -> Iterator[PlotFolder]:
    """Draw every picture into a folder, which is created. `others` are files that a picture may not replace. What is
    not committed is removed on leaving.

    Raises UsageError for one of `others`, OutputExists for an existing file without `force`, CaptureFailed if the files
    cannot be created, LibraryMissing.
    """
    if not folder:
        raise UsageError(f"{_FLAG}: is empty; name a folder to write to")
    place = Path(folder)
    plots, missing = plots_of(contents)
    paths = [place / name for name in file_names(plots)]
    taken = {os.path.realpath(other): other for other in others}
    for path in paths:
        if (other := taken.get(os.path.realpath(path))) is not None:
            raise UsageError(f"{_FLAG}={folder}: a picture would replace {other}; name another folder")
        if os.path.lexists(path):
            refuse_existing(_FLAG, path, force)
    drawn = draw_plots(plots)
    with ExitStack() as opened:
        opened.enter_context(_created(place))
        files = {path: opened.enter_context(output_file(_FLAG, path, force)) for path in paths}
        for path, file in files.items():
            file.fill(drawn[path.name])
        yield PlotFolder(files, missing)


@contextmanager
def _created(place: Path) -> Iterator[None]:
    """The folder and those that it is in are made; those of them that are empty in the end are removed again."""
    made: list[Path] = []
    try:
        try:
            for each in (*reversed(place.parents), place):
                if not each.is_dir():
                    each.mkdir()
                    made.append(each)
        except OSError as error:
            raise CaptureFailed(f"{_FLAG}={place}: cannot be created: {error.strerror}") from None
        yield
    finally:
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir()
