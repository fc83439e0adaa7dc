"""Kernels that a probe can be put into: of a capture, a `.ptx` or a `.cu` file; and the folder with one put in.

The folder is that of a run, before it ran: `kernel/0_<hash>/` with the PTX as it was (`original.ptx`, and `pruned.ptx`,
which is assembled like the probed one), with the probe (`probed.ptx`), for probes that save each time the one that
counts (`counting.ptx`), the machine code (`.cubin`), what ptxas said (`process.log`) and `kernel.info`. Nothing is
launched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replayfmt.errors import LibraryMissing, ReplayRefused, UsageError
from replayfmt.format.attachments import contents_of, roles_of
from replayfmt.format.output import check_place, make_folder, new_file
from replayfmt.format.reader import open_capture

from .costs import predicted_bytes
from .definitions import ProbeDefinition
from .ptx import AssembledPtx, ProbedPtx, PtxError, PtxModule, assemble, parse_ptx, position_of, probed_ptx
from .recordings import MOST_THREADS, LaunchShape, check_readable
from .tables import Cell, ResultTable, Unmeasured

_LAUNCH = re.compile(r"(\d+),(\d+),(\d+):(\d+),(\d+),(\d+)$")
_NVCC_SECONDS = 300
DEFAULT_TARGET = "sm_80"
FILES_OF_KERNELS = (".opreplay", ".ptx", ".cu")
NO_PTX = "not probeable: no PTX"


@dataclass(frozen=True)
class ProbeableKernel:
    """An entry function of some PTX, or, with `module` None, a kernel of a capture that has no PTX."""

    name: str
    entry: str | None
    module: PtxModule | None

    @property
    def sites(self) -> dict[str, int]:
        """At how many places of each position a probe could be."""
        if self.module is None:
            return {}
        found = Counter(map(position_of, self.module.entry(self.entry).instructions))
        return {name: found[name] for name in sorted(each for each in found if each is not None)}


def kernels_of(path: str | os.PathLike[str], target: str = DEFAULT_TARGET) -> list[ProbeableKernel]:
    """The kernels of a capture, a PTX file, or a CUDA file, which nvcc compiles for `target`.

    Raises CaptureNotFound, InvalidCapture, PtxError, LibraryMissing where nvcc is needed, UsageError for another file.
    """
    name = os.fspath(path)
    ending = Path(name).suffix
    if ending == ".opreplay":
        return list(_captured(name))
    if ending not in FILES_OF_KERNELS:
        raise UsageError(f"{name}: expected a capture (.opreplay), PTX (.ptx) or CUDA source (.cu)")
    check_readable(name)
    try:
        text = _compiled(name, target) if ending == ".cu" else Path(name).read_text(encoding="utf-8")
        module = parse_ptx(text)
    except UnicodeDecodeError as error:
        raise PtxError(f"{name}: expected PTX as text: {error.reason} at byte {error.start}") from None
    except PtxError as error:
        raise PtxError(f"{name}: {error}") from None
    return [ProbeableKernel(each.name, each.name, module) for each in module.entries]


def _captured(path: str) -> Iterator[ProbeableKernel]:
    reader = open_capture(path)
    try:
        for kernel in reader.kernels[1:]:
            if "ptx" not in roles_of(reader, kernel):
                yield ProbeableKernel(kernel.qualified_name, None, None)
                continue
            try:
                module = parse_ptx(contents_of(reader, kernel)["ptx"].decode("utf-8"))
                yield ProbeableKernel(kernel.qualified_name, module.entry().name, module)
            except (PtxError, UnicodeDecodeError) as error:
                raise PtxError(f"{path}: {kernel.qualified_name}: {error}") from None
    finally:
        reader.close()


def _compiled(path: str, target: str) -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise LibraryMissing(f"{path}: CUDA source needs nvcc, which is not on PATH; name a .ptx file")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernel.ptx")
        command = [nvcc, "-ptx", f"-arch={target}", "-o", str(out), path]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_NVCC_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise PtxError(f"nvcc took more than {_NVCC_SECONDS} s") from None
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line or "fatal" in line), "no message")
            raise PtxError(f"nvcc does not compile it: {said}")
        return out.read_text(encoding="utf-8")


def chosen_kernel(path: str | os.PathLike[str], kernels: list[ProbeableKernel], name: str | None) -> ProbeableKernel:
    """The kernel of a name (with or without its overload), or the only one. Raises UsageError, PtxError without PTX."""
    found = [each for each in kernels if name in (None, each.name, each.name.rpartition(".")[0], each.entry)]
    if len(found) != 1:
        names = ", ".join(each.name for each in (found or kernels)[:8]) or "none"
        wanted = "--kernel=NAME of one kernel" if name is None or found else f"a kernel {name}"
        raise UsageError(f"{os.fspath(path)}: expected {wanted}; there are: {names}")
    if found[0].module is None:
        raise PtxError(f"{os.fspath(path)}: {found[0].name}: {NO_PTX}")
    return found[0]


def parse_launch(text: str) -> LaunchShape:
    """`GX,GY,GZ:BX,BY,BZ`. Raises UsageError."""
    found = _LAUNCH.match(text)
    numbers = [int(each) for each in found.groups()] if found else [0]
    if 0 in numbers or numbers[3] * numbers[4] * numbers[5] > MOST_THREADS:
        wanted = f"GX,GY,GZ:BX,BY,BZ, each at least 1, and at most {MOST_THREADS} threads in a block"
        raise UsageError(f"--launch={text}: expected {wanted}")
    x, y, z, i, j, k = numbers
    return LaunchShape((x, y, z), (i, j, k))


@dataclass(frozen=True)
class InstrumentedKernel:
    """A kernel with a probe in it, assembled, before it is written. `counting` only for probes that save each time.
    `needed_bytes` of its records in the launch that was named, or why they are not known."""

    probe: ProbeDefinition
    original: PtxModule
    probed: ProbedPtx
    counting: ProbedPtx | None
    before: AssembledPtx
    after: AssembledPtx
    needed_bytes: int | Unmeasured

    @property
    def table(self) -> ResultTable:
        """The plan: what is where, what it costs, and how much memory it needs."""
        one, other = self.before.figures[self.probed.entry], self.after.figures[self.probed.entry]

        def cell(value: int | None) -> Cell:
            return Unmeasured("ptxas does not say it") if value is None else value

        added: Cell = Unmeasured("ptxas does not say both")
        if one.registers is not None and other.registers is not None:
            added = other.registers - one.registers
        columns: dict[str, Cell] = {
            "kernel": self.probed.entry,
            "target": self.original.target,
            "probe": self.probe.name,
            "sites": ", ".join(f"{count} {name}" for name, count in self.probed.sites.items()),
            "calls_without_probes": ", ".join(self.probed.called) or "none",
            "record_bytes": self.probe.record_bytes,
            "row_of": f"each {self.probe.level}",
            "needed_bytes": self.needed_bytes,
            "registers_before": cell(one.registers),
            "registers_after": cell(other.registers),
            "registers_added": added,
            "spill_stores_after_bytes": cell(other.spill_stores_bytes),
            "spill_loads_after_bytes": cell(other.spill_loads_bytes),
        }
        return ResultTable("plan", tuple(columns), [tuple(columns.values())])


def instrumented(
    kernel: ProbeableKernel,
    probe: ProbeDefinition,
    *,
    launch: LaunchShape | None = None,
    records: int | None = None,
    most_bytes: int | None = None,
) -> InstrumentedKernel:
    """Put a probe into a kernel and assemble it. `records` of a row, for probes that save each time.

    Raises PtxError, LibraryMissing, UsageError, and ReplayRefused if its records need more than `most_bytes`.
    """
    if kernel.module is None:
        raise PtxError(f"{kernel.name}: {NO_PTX}")
    if records is not None and not probe.each_site:
        raise UsageError(f"--records: probe {probe.name} saves one record in a launch")
    if most_bytes is not None and (launch is None or (probe.each_site and records is None)):
        raise UsageError("--max-bytes: give --launch, and --records where the probe saves each time it is reached")
    needed: int | Unmeasured
    if launch is None:
        needed = Unmeasured("no --launch was given")
    elif probe.each_site and records is None:
        needed = Unmeasured("records are counted by a first launch; --records=N says how many there are in a row")
    else:
        needed = predicted_bytes(launch, probe.record_bytes, probe.level, records or 1)
        if most_bytes is not None and needed > most_bytes:
            raise ReplayRefused(
                f"{kernel.name}: probe {probe.name} needs {needed:,} bytes for {launch.blocks:,} blocks of "
                f"{launch.threads} threads; --max-bytes allows {most_bytes:,}"
            )
    probed = probed_ptx(kernel.module, kernel.entry, probe)
    counting = probed_ptx(kernel.module, kernel.entry, probe, counting=True) if probe.each_site else None
    before, after = assemble(kernel.module.text), assemble(probed.text)
    return InstrumentedKernel(probe, kernel.module, probed, counting, before, after, needed)


def write_instrumented(made: InstrumentedKernel, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write the folder of a kernel with a probe; returns its `kernel/0_<hash>`. Raises OutputExists, CaptureFailed."""
    entry = made.original.entry(made.probed.entry)
    digest = hashlib.sha1(entry.name.encode(), usedforsecurity=False).hexdigest()
    place = Path(folder) / "kernel" / f"0_{digest}"
    size = -1 if made.probe.each_site else made.probe.record_bytes
    level = {"thread": 0, "warp": 1}[made.probe.level]
    logs = "".join(
        f"ptxas -arch={made.original.target} --verbose {name}.ptx -o {name}.cubin\n{each.log.rstrip()}\n"
        for name, each in (("pruned", made.before), ("probed", made.after))
    )
    content = {
        "original.ptx": made.original.text.encode(),
        "pruned.ptx": made.original.text.encode(),
        "probed.ptx": made.probed.text.encode(),
        "pruned.cubin": made.before.cubin,
        "probed.cubin": made.after.cubin,
        "process.log": logs.encode(),
        "kernel.info": f"{entry.name}\n{len(entry.parameters)}\n1\n{level},{size}\n".encode(),
    }
    if made.counting is not None:
        content["counting.ptx"] = made.counting.text.encode()
    make_folder(place)
    for name in content:
        check_place(place / name, force)
    for name, text in content.items():
        with new_file(place / name, force) as file:
            file.write(text)
    return place
