"""The section on memory: bytes alive by device over the records of the capture, and what the peak is made of."""

from __future__ import annotations

import numpy as np

from replayfmt.dump.values import scope_path
from replayfmt.format.memory import DeviceMemory, PeakShare, memory_by_device
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader

from .kernel_sections import Section
from .ops import CapturedOps
from .pictures import Axis, Line, MissingPicture, Picture, Region, StepPicture
from .tables import ReportTable, TableColumn, TableRow, count_cell, figure_cell, si, text_cell

_TITLE = "Memory"
_SHOWN_SHARES = 50
_LONGEST_NAME = 30
_CHARACTERS = 45  # fit side by side into the picture on a phone


def memory_section(reader: CaptureReader, ops: CapturedOps) -> tuple[Section, list[DeviceMemory]]:
    """The section, and the figures that it is made of. Raises InvalidCapture for a damaged frame."""
    devices = memory_by_device(reader)
    about = [
        "Bytes of the program's storages that are alive at each record, exactly, from their lifetimes: those that came "
        "from outside count from their first use. What kernels allocate within a call, and what an allocator rounds up "
        "or keeps, is not in it."
    ]
    about += [
        f"{each.device}: at most {si(each.peak_bytes, 'B')} at record {each.peak_ordinal:,}, in "
        f"{each.peak_storages:,} storages; {si(each.held_peak_bytes, 'B')} if each is held until its release was "
        f"noticed; {si(each.end_bytes, 'B')} at the end."
        for each in devices
    ]
    if not devices:
        return Section("memory", _TITLE, about, [MissingPicture("memory", _TITLE, "the capture has no storages")]), []
    notes = [
        "A step of the picture stands for several records; the line is the most bytes at any of them."
        for each in devices[:1]
        if bool((each.least_bytes != each.most_bytes).any())
    ]
    lines = [_line(each) for each in devices]
    picture: Picture = StepPicture("memory", _TITLE, Axis("record"), Axis("alive", "B"), lines, _regions(reader, ops))
    return Section("memory", _TITLE, about, [picture], [_shares(devices)], notes), devices


def _line(memory: DeviceMemory) -> Line:
    """The steps at which the bytes change, and the last one, where the line ends."""
    bytes_alive = memory.most_bytes
    changes = np.concatenate([[True], bytes_alive[1:] != bytes_alive[:-1]])
    changes[-1] = True
    return Line(memory.device, memory.ordinals[changes].tolist(), bytes_alive[changes].tolist())


def _regions(reader: CaptureReader, ops: CapturedOps) -> list[Region]:
    """Outermost passes through scopes that have room for their name; where threads overlap, those that begin first."""
    found: list[Region] = []
    for each in ops.scope_passes:
        name = printable(scope_path(reader, each.scope), _LONGEST_NAME)
        roomy = (each.last - each.first) * _CHARACTERS > len(name) * reader.record_count
        if not each.depth and roomy and (not found or each.first > found[-1].last):
            found.append(Region(name, each.first, each.last))
    return found


def _shares(devices: list[DeviceMemory]) -> ReportTable:
    """What made the storages of each peak, the largest shares first."""
    rows = [
        TableRow(
            (
                text_cell(device.device),
                text_cell(_maker(share)),
                count_cell(share.storages),
                figure_cell(float(share.bytes), "B", ""),
                figure_cell(share.bytes / device.peak_bytes if device.peak_bytes else None, "%", "the peak is 0 bytes"),
            )
        )
        for device in devices
        for share in device.shares[:_SHOWN_SHARES]
    ]
    columns = (
        TableColumn("device"),
        TableColumn("made by"),
        TableColumn("storages", figures=True),
        TableColumn("bytes", figures=True),
        TableColumn("of the peak", figures=True),
    )
    return ReportTable("peak", "What the peak is made of", columns, rows, 3)


def _maker(share: PeakShare) -> str:
    if share.outside:
        return "from outside the capture" + (f", first used by {share.op}" if share.op else "")
    return share.op or "not known"
