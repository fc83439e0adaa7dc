"""What the folder of a probe's run says of the kernels of a capture.

A run names a kernel by its entry function, a capture by `triton::NAME.variant`. Where both have the kernel's PTX, it
must be the same: of several variants that is the one that was probed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from replayfmt.errors import CaptureNotFound, InvalidRecording, UsageError
from replayfmt.format.attachments import contents_of, roles_of
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader
from replayfmt.probes.evaluations.overhead import KernelOverhead, evaluate_overhead
from replayfmt.probes.evaluations.schedule import evaluate_schedule
from replayfmt.probes.evaluations.tables import Cell, ResultTable
from replayfmt.probes.evaluations.warps import evaluate_warps
from replayfmt.probes.recordings.files import lines
from replayfmt.probes.recordings.folders import TraceFolder
from replayfmt.probes.recordings.logs import EventLog, read_event_log
from replayfmt.probes.recordings.results import BLOCK_SCHED, ProbeRecording

_PROBE = re.compile(r"\s*// probe (\S+?):?(?:\s|$)")
_NAMESPACE = "triton::"
_MOST_RECORDINGS = 200


@dataclass(frozen=True)
class ProbedKernel:
    """A kernel with a probe, named by the PTX, else by the folder. `kernels` are ids of the capture: several if only
    their common name is known."""

    probe: str
    entry: str
    kernels: tuple[int, ...]
    overhead: KernelOverhead


@dataclass(frozen=True)
class RecordedSchedule:
    """A recording of `block_sched`: what `evaluate_schedule` and `evaluate_warps` say of the whole launch, by name."""

    kernel: ProbedKernel
    recording: str
    schedule: dict[str, Cell]
    warps: dict[str, Cell]


@dataclass(frozen=True)
class ProbeRun:
    """A folder. `notes`: what is not shown of it, and why."""

    where: str
    kernels: list[ProbedKernel]
    launches: list[RecordedSchedule]
    notes: list[str]


def read_probe_run(flag: str, path: str, reader: CaptureReader) -> ProbeRun:
    """The folder of a run of this capture's kernels. Raises UsageError for another one and for damaged files,
    InvalidCapture if the capture's attachments are damaged."""
    where = f"{flag}={path}"
    try:
        folder = TraceFolder.open(path)
        if folder.event_log is None:
            raise UsageError(f"{where}: has no event.log; expected the folder that opreplay-probe run wrote")
        log = read_event_log(folder.event_log)
        names = dict.fromkeys([*log.folders.values(), *(each.kernel for each in log.launches if each.kernel)])
        if not names:
            raise UsageError(f"{where}: event.log names no kernel; expected the folder that opreplay-probe run wrote")
        overheads = {each.kernel: each for each in evaluate_overhead([("", path)]).kernels}
        kernels = [
            _probed(where, name, overheads.get(name) or KernelOverhead("", name), folder, log, reader) for name in names
        ]
        return _with_launches(where, kernels, folder, log)
    except (CaptureNotFound, InvalidRecording) as error:
        raise UsageError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from None
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}") from None


def _probed(
    where: str, entry: str, overhead: KernelOverhead, folder: TraceFolder, log: EventLog, reader: CaptureReader
) -> ProbedKernel:
    places = [each for each in folder.kernels if log.folders.get(each.name) == entry]
    probe = next(filter(None, map(_probe_of, places)), None) or folder.path.resolve().name
    return ProbedKernel(printable(probe, 80), entry, _kernels_of(where, entry, places, reader), overhead)


def _probe_of(place: Path) -> str | None:
    """The probe's name, which opreplay-probe writes into the PTX."""
    path = place / "probed.ptx"
    found = (_PROBE.match(line) for line in lines(path)) if path.is_file() else iter(())
    return next((each[1] for each in found if each), None)


def _kernels_of(where: str, entry: str, places: list[Path], reader: CaptureReader) -> tuple[int, ...]:
    """The ids of the kernel in the capture."""
    found = {
        number: kernel
        for number, kernel in enumerate(reader.kernels)
        if number and kernel.name == f"{_NAMESPACE}{entry}"
    }
    if not found:
        ours = sorted({each.name for each in reader.kernels[1:] if each.name.startswith(_NAMESPACE)})
        has = f"has {', '.join(ours[:5])}{', …' if len(ours) > 5 else ''}" if ours else "has no Triton kernel"
        raise UsageError(
            f"{where}: is a run of the kernel {printable(entry, 100)}, which {reader.path} does not have: it "
            f"{printable(has, 300)}; name the folder of a run of this capture"
        )
    originals = [place / "original.ptx" for place in places if (place / "original.ptx").is_file()]
    codes = {
        number: contents_of(reader, kernel)["ptx"]
        for number, kernel in found.items()
        if "ptx" in roles_of(reader, kernel)
    }
    if not originals or not codes:
        return tuple(found)
    same = [
        number
        for number, code in codes.items()
        if any(each.stat().st_size == len(code) and each.read_bytes() == code for each in originals)
    ]
    chosen = same or [number for number in found if number not in codes]
    if not chosen:
        raise UsageError(
            f"{where}: is a run of another {printable(entry, 100)} than {reader.path} has: its PTX differs; name the "
            "folder of a run of this capture"
        )
    return tuple(chosen)


def _with_launches(where: str, kernels: list[ProbedKernel], folder: TraceFolder, log: EventLog) -> ProbeRun:
    """Which launch a recording is of follows from their order."""
    run = ProbeRun(printable(where), kernels, [], [])
    if not any(each.probe == BLOCK_SCHED.name for each in kernels):
        return run
    if len(folder.results) != len(log.launches):
        run.notes.append(
            f"{run.where}: schedules are not measured: {len(folder.results):,} recordings, {len(log.launches):,} "
            "launches in event.log"
        )
        return run
    by_name = {each.entry: each for each in kernels}
    for path, launch in zip(folder.results[:_MOST_RECORDINGS], log.launches, strict=False):
        kernel = by_name.get(launch.kernel or "")
        if kernel is None or kernel.probe != BLOCK_SCHED.name:
            continue
        section = ProbeRecording.open(path).section(0)
        if launch.shape is not None and launch.shape != section.launch:
            raise UsageError(
                f"{where}: {path.name}: expected the grid and block of its launch in event.log, got others"
            )
        schedule, warps = evaluate_schedule(section), evaluate_warps([(path.name, section)])
        run.launches.append(RecordedSchedule(kernel, path.name, _first_row(schedule.tables), _first_row(warps.tables)))
    if len(folder.results) > _MOST_RECORDINGS:
        left = len(folder.results) - _MOST_RECORDINGS
        run.notes.append(f"{run.where}: {left:,} more recordings are left out of the page")
    return run


def _first_row(tables: tuple[ResultTable, ...]) -> dict[str, Cell]:
    return dict(zip(tables[0].columns, tables[0].rows[0], strict=True))
