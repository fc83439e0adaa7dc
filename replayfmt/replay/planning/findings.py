"""Findings: the reasons against replaying a capture here, as far as they are known before the first op runs.

Each finding is one sentence that says what, how often, where first, and what to do. They are all collected; a strict
plan refuses with the whole list.
"""

from __future__ import annotations

from collections import defaultdict

from replayfmt.format.codes import Layout as LayoutCode
from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.collectives import plays_ranks
from replayfmt.pytorch.environment import check_settings
from replayfmt.pytorch.overloads import ArgumentRules
from replayfmt.pytorch.tensors.composites import FORMS
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE

from .devices import DeviceMap, host_memory_bytes
from .kernels import ResolvedKernel
from .scan import Occurrences, Scan, waits

_OPEN_KINDS = (ValueKind.opaque, ValueKind.process_group)


class Findings:
    """The findings of one plan. `refused` has the reason for every op signature that cannot be run, by id; `notes` say
    what a user has to know about those that can, `elsewhere` what child processes did."""

    def __init__(
        self, reader: CaptureReader, devices: DeviceMap, kernels: tuple[ResolvedKernel | str | None, ...], scan: Scan
    ) -> None:
        self._reader, self._devices, self._kernels, self._scan = reader, devices, kernels, scan
        self.refused: dict[int, str] = {}
        self.sentences: list[str] = []
        self.notes: list[str] = []
        self.elsewhere: list[str] = []

    def collect(self, *, unsupported: bool = True) -> None:
        """Check everything the scan saw; without `unsupported`, those records are left to the caller."""
        if unsupported:
            self._unsupported()
        self._ops()
        self._collectives()
        self._tensors()
        self._settings()
        self._memory()

    def _unsupported(self) -> None:
        groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for number, signature in self._scan.occurring(RecordKind.unsupported):
            texts = {node.name: str(node.constant) for node in signature.args}
            if not signature.unseen:
                self.elsewhere.append(texts.get("detail", ""))
                continue
            groups[texts.get("reason", ""), texts.get("op", ""), texts.get("detail", "")].append(number)
        for number, _signature in self._scan.occurring(RecordKind.collective):
            groups["collective", "", "collectives are not replayed yet"].append(number)
        by_reason: dict[tuple[str, str], list[tuple[str, list[int]]]] = defaultdict(list)
        for (reason, op, detail), numbers in groups.items():
            by_reason[reason, op].append((detail, numbers))
        for (reason, op), details in by_reason.items():
            seen = self._scan.seen(number for _detail, numbers in details for number in numbers)
            named = f" {op}" if op else ""
            detail = next((detail for detail, _numbers in details if detail), "")
            because = f": {detail}" if detail else ""
            self.sentences.append(f"unsupported, {reason}:{named} {_times(seen)}{because}")

    def _ops(self) -> None:
        by_kernel: dict[int, list[int]] = defaultdict(list)
        for number, signature in self._scan.occurring(RecordKind.op):
            by_kernel[signature.kernel].append(number)
        for kernel_id, numbers in by_kernel.items():
            kernel = self._reader.kernels[kernel_id]
            resolved = self._kernels[kernel_id]
            assert kernel is not None
            if isinstance(resolved, str):
                self._refuse(numbers, resolved)
                continue
            if resolved is None:
                continue
            self._arguments(kernel.qualified_name, resolved, numbers)
            self._values(kernel.qualified_name, numbers)
            self._placed(kernel.qualified_name, resolved, numbers)

    def _refuse(self, numbers: list[int], sentence: str) -> None:
        for number in numbers:
            self.refused.setdefault(number, sentence)
        self.sentences.append(f"{sentence}; called {_times(self._scan.seen(numbers))}")

    def _arguments(self, name: str, resolved: ResolvedKernel, numbers: list[int]) -> None:
        """Arguments that the operator does not have, or that break what its kernels take for granted: nothing of a file
        may get into generated code unchecked."""
        known, rules = resolved.argument_names, ArgumentRules(resolved.schema)
        for number in numbers:
            signature = self._reader.signatures[number]
            names = [node.name for node in signature.args]
            wrong = [given for given in names if given not in known or names.count(given) > 1]
            if wrong:
                self._refuse([number], f"{name} does not take the arguments {names}, it takes {known}")
            problem = rules.problem(signature.args) or resolved.problem_with_arguments(signature.args)
            if problem:
                self._refuse([number], problem)
            unknown = {str(node.constant) for node in signature.nodes if node.kind is ValueKind.composite} - set(FORMS)
            if unknown:
                self._refuse([number], f"{name} has tensors of unknown form ({', '.join(sorted(unknown))})")

    def _values(self, name: str, numbers: list[int]) -> None:
        """Arguments and results that were not captured as values."""
        for kind in _OPEN_KINDS:
            texts: dict[str, list[int]] = defaultdict(list)
            for number in numbers:
                signature = self._reader.signatures[number]
                for node in signature.nodes:
                    if node.kind is kind:
                        texts[str(node.constant)].append(number)
            for text, affected in texts.items():
                what = "an opaque value" if kind is ValueKind.opaque else "the process group"
                self._refuse(affected, f"{name} takes {what} that cannot be rebuilt ({text})")

    def _placed(self, name: str, resolved: ResolvedKernel, numbers: list[int]) -> None:
        """Whether the op runs on the devices its tensors are mapped to."""
        unavailable: dict[str, list[int]] = defaultdict(list)
        foreign_draws: list[int] = []
        for number in numbers:
            signature = self._reader.signatures[number]
            captured = [device for device in self._scan.signature_devices.get(number, ()) if device]
            captured += [
                int(node.constant)
                for node in signature.nodes
                if node.kind is ValueKind.device and isinstance(node.constant, int)
            ]
            if any(self._devices.targets[device] is None for device in captured):
                self.refused.setdefault(number, "its device cannot be mapped")
                continue
            if resolved.draws and any(
                self._devices.crosses(device) and self._kind(device) != "cpu" for device in captured
            ):
                foreign_draws.append(number)
            types = {self._devices.target(device).type for device in captured}
            plain = not any(node.kind is ValueKind.composite for node in signature.nodes)
            strict = sorted(types - {"cpu"}) or sorted(types)
            if plain and self._scan.layout(number).arg_tensors:
                for device_type in strict:
                    if not resolved.runs_on(device_type):
                        unavailable[device_type].append(number)
        if foreign_draws and "import" in self._reader.session.policies:
            # An import has none of the program's content, and nothing is compared: other random numbers will do.
            self.notes.append(f"{name} draws random numbers that the captured device would have drawn differently")
        elif foreign_draws:
            self._refuse(foreign_draws, f"{name} draws random numbers that only the captured kind of device can draw")
        for device_type, affected in unavailable.items():
            self._refuse(affected, f"{name} has no kernel for {device_type} in this torch")

    def _kind(self, device: int) -> str:
        captured = self._devices.captured[device]
        return "" if captured is None else captured.kind

    def _collectives(self) -> None:
        """Results that are not in the capture. (`payload="none"` leaves all content out, which others say; a trace has
        none.)"""
        policies = self._reader.session.policies
        imported = "import" in policies
        left_out = policies.get("collective-results") == "none" and (imported or policies.get("payload") != "none")
        if left_out and not plays_ranks():
            seen = self._scan.seen(waits(self._reader))
            if seen.count:
                times = _times(seen)
                why = "are not in the trace" if imported else "were not recorded (--collective-results=none)"
                self.sentences.append(
                    f"the results of collectives {why}, so that only all ranks together replay: torchrun "
                    "--nproc-per-node=N opreplay-run FOLDER; --collectives=none leaves them out, for timing alone; "
                    f"waited for {times}"
                )

    def _tensors(self) -> None:
        dtypes, layouts = set(), set()
        for meta_id in self._scan.metas:
            meta = self._reader.metas[meta_id]
            if meta.dtype not in TORCH_DTYPE:
                dtypes.add(meta.dtype.name)
            if meta.layout is not LayoutCode.strided:
                layouts.add(meta.layout.name)
        if dtypes:
            self.sentences.append(f"this torch has no dtype {', '.join(sorted(dtypes))}")
        if layouts:
            self.sentences.append(f"tensors with the layout {', '.join(sorted(layouts))} cannot be rebuilt as such")

    def _memory(self) -> None:
        """The memory of all storages alive at once, if all of it is the host's: the system kills a process that takes
        more than there is, without a message. (Accelerators report it.)"""
        there, needed = host_memory_bytes(), max(self._scan.known_peak_bytes, self._scan.longest_resize_bytes)
        if {target.type for target in self._devices.targets if target is not None} == {"cpu"} and (
            there is not None and needed > there
        ):
            self.sentences.append(
                f"the capture says that {needed:,} bytes of tensors are alive at once; this machine "
                f"has {there:,} bytes of memory, swap included"
            )

    def _settings(self) -> None:
        self.sentences += check_settings(self._reader.session.settings)
        for _number, signature in self._scan.occurring(RecordKind.global_state):
            unknown = check_settings({node.name: None for node in signature.args})
            self.sentences += [sentence for sentence in unknown if sentence not in self.sentences]


def _times(seen: Occurrences) -> str:
    """`3 times, first at ordinals 4, 17, 90`."""
    where = ", ".join(map(str, seen.first))
    if seen.count == 1:
        return f"once, at ordinal {where}"
    return f"{seen.count} times, first at ordinal{'s' if len(seen.first) > 1 else ''} {where}"
