"""The folder of a run: what `replayfmt.probes.recordings` reads. Recordings and `event.log` in the published artifact's
format, the captured tensors' places in memory as `tensor.trace`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from replayfmt.format.container.output import check_place
from replayfmt.probes.recordings.files import new_file
from replayfmt.probes.recordings.logs import BenchmarkTimes
from replayfmt.probes.recordings.results import LaunchShape, Structured, write_recording

EVENTS, TENSORS, RESULTS = "event.log", "tensor.trace", "result"


class RunFolder:
    """What one run writes beside the kernel's own folder: a recording for each launch, when it was made; the logs when
    it ends."""

    def __init__(
        self, path: str | os.PathLike[str], kernel: str, kernel_folder: str, parameters: int, force: bool
    ) -> None:
        """`kernel_folder`: its name under `kernel/`. Raises OutputExists, also where there are recordings already."""
        self.path = Path(path)
        self._force = force
        for name in (EVENTS, TENSORS):
            check_place(self.path / name, force)
        for recording in sorted((self.path / RESULTS).glob("*.bin")):  # of another run: must not look like ours
            check_place(recording, force)
            recording.unlink()
        handle = "0x1"
        self._handle = handle
        self._events = [
            f"[pid] {os.getpid()}",
            f"[probe] rename {kernel} {kernel_folder}",
            f"[probe] finish {handle} name {kernel} n_param {parameters}",
        ]
        self._tensors: list[str] = []
        self._latest = -1

    def launch(
        self,
        at_ns: int,
        shape: LaunchShape,
        records: Structured,
        times: BenchmarkTimes,
        tensors: Mapping[str, torch.Tensor],
    ) -> Path:
        """Write the recording of a launch; `at_ns`: since the run began. Returns its path. Raises CaptureFailed."""
        # The name is the time, and tells launches apart.
        self._latest = microseconds = max(at_ns // 1000, self._latest + 1)
        path = self.path / RESULTS / f"{microseconds // 10**6}.{microseconds % 10**6:06}.bin"
        path.parent.mkdir(exist_ok=True)
        write_recording(path, shape, [records], force=self._force)
        sizes = " ".join(map(str, (*shape.grid, "block", *shape.block)))
        ratio = times.kernel_ms / times.original_ms if times.original_ms else float("nan")
        self._events += [
            f"[exec] funcmap-find {self._handle} success",
            f"[exec] grid {sizes} shared {shape.shared_bytes}",
            f"[exec] probe-mem {records.nbytes} (bytes)",
            f"[benchmark] prologue {times.prologue_ms:f} kernel {times.kernel_ms:f} epilogue {times.epilogue_ms:f} "
            f"original {times.original_ms:f} impact {ratio:f} 0",
        ]
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            shown = f"torch.Size({list(tensor.shape)})"
            self._tensors.append(
                f"[call]  {at_ns}  {shown}  {storage.nbytes()}  {storage.data_ptr()}  {name}  replay  launch"
            )
        return path

    def finish(self) -> None:
        """Write the logs, if there is a recording. Raises CaptureFailed."""
        if self._latest < 0:
            return
        for name, lines in ((EVENTS, self._events), (TENSORS, self._tensors)):
            with new_file(self.path / name, self._force) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
