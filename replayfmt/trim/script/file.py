"""The frame around a script's ops: its description, its inputs, and the timing loop."""

from __future__ import annotations

from typing import Any

from replayfmt.format.codes import ITEM_BYTES
from replayfmt.format.model import TensorValue

from ..safetensors import Array
from ..selection import Kept, Wanted
from .content import Made
from .events import Input, ScriptEvents, ScriptOp
from .text import ScriptBody
from .triton_sections import TritonSections
from .values import comment, device, dtype, setting

_VIEW = '''
def view(storage, dtype, sizes, strides, offset=0):
    """A tensor on a storage; strides and offset count elements."""
    return torch.empty((0,), dtype=dtype, device=storage.device).set_(storage, offset, sizes, strides)
'''

_LOAD = '''
def read_data():
    """The storages and states in the safetensors file beside this script, by name."""
    with open(Path(__file__).resolve().parent / DATA, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        found = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            file.seek(begin + first)
            found[name] = torch.frombuffer(bytearray(file.read(end - first)) or bytearray(1), dtype=torch.uint8)
        return found


def on(content, nbytes, device):
    """A fresh storage on a device with these bytes."""
    return content[:nbytes].to(device, copy=True).untyped_storage()


def load(storage, number):
    """Overwrite a storage."""
    content = CONTENT[f"content_{number}"]
    torch.empty((0,), dtype=torch.uint8, device=storage.device).set_(storage, 0, (len(content),), (1,)).copy_(content)
'''

_SYNTHESIZE = '''
def synthesize(storage, nbytes, dtype, device, make=None):
    """A fresh storage of what `make` gives for a number of elements and a generator; without it, of zeros."""
    n = nbytes // dtype.itemsize
    tensor = torch.zeros(n + 1, dtype=dtype)
    if make is not None:
        tensor[:n] = make(n, torch.Generator().manual_seed(storage))
    return tensor.view(torch.uint8)[:nbytes].to(device, copy=True).untyped_storage()
'''

_POSITIVE_DEFINITE = '''
def positive_definite(n, g, views):
    """Matrices near the identity in these views (sizes, strides, offset), small numbers elsewhere."""
    content = torch.randn(n, generator=g) * 0.02
    for view in views:
        matrices = content.as_strided(*view)
        matrices.copy_((matrices + matrices.mT) / (10 + matrices.shape[-1]))
        matrices.diagonal(dim1=-2, dim2=-1).add_(1)
    return content
'''

_MAIN = '''
def sha256(tensor):
    """Of a tensor's elements in row-major order."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(flat.data_ptr() if flat.numel() else 0, flat.nbytes)).hexdigest()


def wait():
    """For whatever the accelerator still does."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main():
    results = run(*inputs())
    same = True
    for name, value in results.items():
        if isinstance(value, torch.Tensor):
            digest = sha256(value)
            print(f"{name}: {value.dtype} {list(value.shape)} sha256 {digest}")
            print(value)
        else:
            digest = repr(value)
            print(f"{name}: {value!r}")
        if name in EXPECTED:
            print("  as captured" if digest == EXPECTED[name] else f"  CAPTURED {EXPECTED[name]}")
            same &= digest == EXPECTED[name]
    times = []
    for _ in range(REPEAT):
        given = inputs()
        wait()
        start = time.perf_counter()
        run(*given)
        wait()
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    print(f"{OPS} ops: median {times[REPEAT // 2]:.1f} us, least {times[0]:.1f} us, of {REPEAT} runs")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
'''


# All names that a script has besides those of its kernels and the numbered ones in `run`.
FRAME = f"{_VIEW}{_LOAD}{_SYNTHESIZE}{_POSITIVE_DEFINITE}{_MAIN} DATA STATES CONTENT EXPECTED"


class ScriptFile:
    """Builds a script. `hashes` are the expected results, by ordinal and slot; `numbers` says whether captured numbers
    are results of these inputs; `made` is how inputs are made where there is no data, by storage."""

    def __init__(
        self,
        events: ScriptEvents,
        body: ScriptBody,
        settings: dict[str, Any],
        hashes: dict[tuple[int, int], str],
        *,
        numbers: bool,
        triton: TritonSections,
        made: dict[int, Made],
    ) -> None:
        self._numbers, self._triton = numbers, triton
        self._events, self._body, self._settings, self._hashes = events, body, settings, hashes
        used = set(body.first_uses)
        self._made = made
        self._inputs = [each for each in events.inputs if each.storage in used]

    def arrays(self) -> list[Array]:
        """The contents of the data file."""
        data = self._events.writer.by_number
        arrays = []
        for each in self._inputs:
            if each.data is not None:
                first = self._body.first_uses[each.storage]
                arrays.append(Array(f"storage_{each.storage}", data[each.data], first.meta.dtype, _shape(first, each)))
        arrays += [Array(f"content_{number}", data[number]) for number in sorted(self._body.loads)]
        return arrays + [Array(f"state_{number}", data[number]) for number in sorted(self._body.states)]

    def text(self, wanted: Wanted, kept: Kept, data: str | None) -> str:
        """The whole script; `data` is the path of the data file relative to it, None if inputs are synthesized."""
        reader, body = self._events.reader, self._body
        session = reader.session
        values = (
            "loaded from the file beside this script: the bytes they had"
            if data is not None
            else "synthesized: dtypes, shapes and strides are the captured ones, the values are not"
        )
        needs = "torch and triton" if self._triton.imports() else "torch"
        head = [
            "#!/usr/bin/env python3",
            f"# {kept.ops} op{'s' if kept.ops > 1 else ''} of a capture ({comment(wanted.text)}), from ordinal "
            f"{kept.first}; session {session.session_id}.",
            f"# Written by opreplay-trim. Needs only {needs}; captured with {comment(session.torch_version or '?')}.",
            f"# Inputs are {values}.",
            "# After each op: its ordinal in the capture, and its results.",
            "",
            *self._triton.head(),
            "import ctypes",
            "import hashlib",
            *(["import json"] if data is not None else []),
            "import sys",
            "import time",
            *(["from pathlib import Path"] if data is not None else []),
            "",
            "import torch",
            *self._triton.imports(),
            "",
            f"OPS = {kept.ops}",
            "REPEAT = 20",
            *([f"DATA = {data!a}"] if data is not None else []),
            "",
        ]
        head += [setting(name, value) for name, value in self._settings.items()]
        head += [f"g{number} = {self._generator(number)}" for number in sorted(body.generators)]
        if data is None:
            helpers = "\n" + _VIEW + "\n" + _SYNTHESIZE
            if any("positive_definite(" in each.expression for each in self._made.values()):
                helpers += "\n" + _POSITIVE_DEFINITE
        else:
            helpers = "\n" + _VIEW + "\n" + _LOAD
        after = self._triton.sections()
        if data is not None:
            after += ["", "", "CONTENT = read_data()"]
            states = ", ".join(f"{number}: CONTENT['state_{number}']" for number in sorted(body.states))
            after.append(f"STATES = {{{states}}}")
        expected = self._expected()
        after += [
            "",
            "# What the capture says of results: a tensor's SHA-256, a number itself.",
            "EXPECTED = {",
            *(f"    {name!a}: {value!a}," for name, value in expected.items()),
            "}",
        ]
        return (
            "\n".join(
                [*head, helpers.rstrip("\n"), *after, "", "", *self._input_lines(data), "", "", *self._run_lines(data)]
            )
            + "\n\n"
            + _MAIN
        )

    def _input_lines(self, data: str | None) -> list[str]:
        lines = ["def inputs():", '    """The storages that the ops start from, fresh each time."""', "    return ["]
        for each in self._inputs:
            first = self._body.first_uses[each.storage]
            stored = self._events.reader.storage(each.storage)
            place = self._events.reader.devices[stored.device]
            assert place is not None
            sizes = ", ".join(map(str, first.meta.sizes))
            note = f"  # s{each.storage}: {each.length:,} bytes, first used as {first.meta.dtype.name}[{sizes}]"
            if data is not None and each.data is not None:
                lines.append(f"        on(CONTENT['storage_{each.storage}'], {each.length}, {device(place)}),{note}")
            elif data is not None:
                lines.append(
                    f"        on(torch.zeros({each.length}, dtype=torch.uint8), {each.length}, {device(place)}),{note}"
                )
            else:
                made = self._made.get(each.storage)
                how = f", lambda n, g: {made.expression}" if made is not None and made.expression else ""
                of = dtype(first.meta.dtype) if made is None else str(made.dtype)
                why = f"; {comment(made.why)}" if made is not None and made.why else ""
                lines.append(
                    f"        synthesize({each.storage}, {each.length}, {of}, {device(place)}{how}),{note}{why}"
                )
        return [*lines, "    ]"]

    def _run_lines(self, data: str | None) -> list[str]:
        taken = ", ".join(f"s{each.storage}" for each in self._inputs)
        given = ", ".join(f"{name!a}: {value}" for name, value in self._body.returned.items())
        seeds = [f"    g{number}.manual_seed(0)" for number in sorted(self._body.generators)] if data is None else []
        return [
            f"def run({taken}):",
            '    """The ops, in the order of the capture. Returns the results that no later op uses."""',
            *seeds,
            *(f"    {line}" for line in self._body.lines),
            f"    return {{{given}}}",
        ]

    def _generator(self, number: int) -> str:
        generator = self._events.reader.generators[number]
        assert generator is not None
        place = self._events.reader.devices[generator.device]
        assert place is not None
        if not generator.default:
            return f"torch.Generator({device(place)})"
        if place.kind == "cpu":
            return "torch.default_generator"
        module = f"torch.get_device_module({place.kind!r})"
        return f"({module}.init(), {module}.default_generators[{max(place.index, 0)}])[1]"

    def _expected(self) -> dict[str, str]:
        """The expected values: known for tensors if they were computed, for numbers if the content is the captured
        one."""
        expected = {name: self._hashes[where] for name, where in self._body.tensors.items() if where in self._hashes}
        if self._numbers:
            for event in self._events.events:
                if isinstance(event, ScriptOp):
                    for index, value in enumerate(event.record.results):
                        if isinstance(value, bool | int | float | complex | str):
                            expected[f"value_{event.record.ordinal}_{index}"] = repr(value)
        return expected


def _shape(first: TensorValue, given: Input) -> tuple[int, ...]:
    """The sizes of a storage's first tensor if that covers it, else one dimension."""
    count = 1
    for size in first.meta.sizes:
        count *= size
    item = ITEM_BYTES[first.meta.dtype]
    if not first.offset and count * item == given.length and _is_contiguous(first):
        return first.meta.sizes
    return (given.length // item,)


def _is_contiguous(tensor: TensorValue) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.meta.sizes), reversed(tensor.meta.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
