"""Bytes alive by device against the records: exactly what a plain model of the records counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from dump.captures import Builder, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import DType, Layout, OpStatus, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.memory import DeviceMemory, memory_by_device
from replayfmt.format.model import Device, Kernel, Node, Signature, TensorMeta
from replayfmt.format.reader import CaptureReader, open_capture

V, K = ValueKind, RecordKind
_STORAGE = Node(V.storage, "storage")
_RELEASE = Signature(K.storage_release, (_STORAGE,))
_RESIZE = Signature(K.storage_resize, (_STORAGE, Node(V.int, "bytes")))
_IMPORT = Signature(
    K.storage_import, (_STORAGE, Node(V.none, "payload"), Node(V.int, "version"), Node.scalar("reason", "first_use"))
)


@dataclass
class Model:
    """Writes a capture, and notes beside it what happens to each storage."""

    builder: Builder
    device_of: dict[int, str] = field(default_factory=dict)
    lengths: dict[int, dict[int, int]] = field(default_factory=dict)  # by storage: new lengths by ordinal
    last_used: dict[int, int] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        w = self.builder.writer
        self.devices = {name: w.device(device) for name, device in DEVICES.items()}
        self._meta = {
            name: w.meta(TensorMeta(DType.uint8, Layout.strided, number, (0,), (1,)))
            for name, number in self.devices.items()
        }
        self._scope = w.scope(0, "execute")
        self._calls = [
            Signature(
                K.op,
                (*tensors("self"),) if takes else (),
                (Node(V.tensor),),
                w.kernel(Kernel(f"test::{name}", "default", f"test::{name}() -> Tensor")),
                OpStatus.ok,
            )
            for name, takes in (("make", False), ("turn", True))
        ]

    def _storage(self, device: str, length: int, origin: StorageOrigin) -> int:
        number = self.builder.storage(length, self.devices[device], origin)
        self.device_of[number], self.lengths[number] = device, {self.builder.ordinal: length}
        self.last_used[number] = self.builder.ordinal
        return number

    def there(self) -> list[int]:
        return [number for number in self.device_of if number not in self.released]

    def make(self, device: str, length: int) -> int:
        number = self._storage(device, length, StorageOrigin.op)
        tensor = self.builder.tensor(number, self._meta[device])
        self.builder.record(self._calls[0], [tensor], scope=self._scope)
        return number

    def enter(self, device: str, length: int) -> int:
        number = self._storage(device, length, StorageOrigin.absent)
        self.builder.record(_IMPORT, ints=[number, 0])
        return number

    def turn(self, number: int) -> None:
        """An op on a storage that returns a new one."""
        device = self.device_of[number]
        made = self._storage(device, 1000, StorageOrigin.uninitialized)
        both = [self.builder.tensor(each, self._meta[device]) for each in (number, made)]
        self.last_used[number] = self.builder.record(self._calls[1], both, scope=self._scope)

    def resize(self, number: int, length: int) -> None:
        self.last_used[number] = self.builder.record(_RESIZE, ints=[number, length])
        self.lengths[number][self.last_used[number]] = length

    def release(self, number: int) -> None:
        self.released[number] = self.builder.record(_RELEASE, ints=[number])

    def alive_at(self, ordinal: int, device: str, held: bool = False) -> dict[int, int]:
        """The storages alive at a record, with their lengths."""
        found = {}
        for number in (each for each, on in self.device_of.items() if on == device):
            born = min(self.lengths[number])
            end = self.builder.ordinal
            if number in self.released:
                end = self.released[number] - 1 if held else self.last_used[number]
            if born <= ordinal <= end:
                found[number] = self.lengths[number][max(each for each in self.lengths[number] if each <= ordinal)]
        return found

    def bytes(self, device: str, held: bool = False) -> list[int]:
        return [sum(self.alive_at(each, device, held).values()) for each in range(self.builder.ordinal)]


DEVICES = {"cpu": Device("cpu"), "cuda:1": Device("cuda", 1), "meta": Device("meta")}
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["make", "enter", "turn", "resize", "release", "frame"]),
        st.sampled_from(sorted(DEVICES)),
        st.integers(0, 1000),
        st.integers(0, 1 << 40),
    ),
    min_size=1,
    max_size=60,
)


def written(folder: str, actions: list[tuple[str, str, int, int]]) -> Model:
    model = Model(Builder(Path(folder, "a.opreplay")))
    for what, device, which, length in actions:
        there = model.there()
        if what == "frame":
            model.builder.frame()
        elif what in ("make", "enter"):
            getattr(model, what)(device, length)
        elif there:
            number = there[which % len(there)]
            model.resize(number, length) if what == "resize" else getattr(model, what)(number)
    model.builder.frame()
    model.builder.close()
    return model


def compare(reader: CaptureReader, model: Model, found: DeviceMemory) -> None:
    alive = model.bytes(found.device)
    assert found.peak_bytes == max(alive)
    assert found.peak_ordinal == alive.index(max(alive))
    assert found.end_bytes == alive[-1]
    assert found.held_peak_bytes == max(model.bytes(found.device, held=True))
    there = model.alive_at(found.peak_ordinal, found.device)
    assert found.peak_storages == len(there)
    assert {each.storage: each.bytes for each in found.largest} == there
    assert sum(each.bytes for each in found.shares) == found.peak_bytes
    assert sum(each.storages for each in found.shares) == len(there)
    ends = [*found.ordinals.tolist()[1:], len(alive)]
    for start, end, least, most in zip(
        found.ordinals.tolist(), ends, found.least_bytes.tolist(), found.most_bytes.tolist(), strict=True
    ):
        assert (least, most) == (min(alive[start:end]), max(alive[start:end]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.sampled_from([1, 3, 7, 1000]))
def test_memory_is_what_a_plain_model_of_the_lifetimes_counts(
    actions: list[tuple[str, str, int, int]], steps: int
) -> None:
    with TemporaryDirectory() as folder:
        model = written(folder, actions)
        with open_capture(model.builder.path) as reader:
            found = memory_by_device(reader, steps=steps, largest=1000)
            assert [each.device for each in found] == [
                name for name in DEVICES if name != "meta" and name in model.device_of.values()
            ]
            for each in found:
                assert len(each.ordinals) <= steps
                compare(reader, model, each)


def test_the_peak_names_the_ops_that_made_its_storages_and_what_came_from_outside(tmp_path: Path) -> None:
    model = Model(Builder(tmp_path / "a.opreplay"))
    weight = model.enter("cuda:1", 700)
    model.turn(weight)
    short = model.make("cuda:1", 50)
    model.builder.frame()
    model.turn(weight)
    model.release(short)
    model.builder.frame()
    model.builder.close()
    with open_capture(model.builder.path) as reader:
        (found,) = memory_by_device(reader)
    assert (found.peak_bytes, found.peak_ordinal, found.peak_storages) == (2700, 3, 3)
    assert (found.held_peak_bytes, found.end_bytes) == (2750, 2700)
    assert [(each.op, each.outside, each.storages, each.bytes) for each in found.shares] == [
        ("test::turn.default", False, 2, 2000),
        (None, True, 1, 700),
    ]
    assert [(each.storage, each.outside, each.op, each.ordinal, each.scope) for each in found.largest] == [
        (2, False, "test::turn.default", 1, "execute"),
        (4, False, "test::turn.default", 3, "execute"),
        (1, True, "test::turn.default", 0, ""),
    ]
    assert found.as_json()["most_bytes"] == [700, 1700, 1750, 2700, 2700]


def test_storages_of_absurd_length_are_one_error_and_no_wrong_sum(tmp_path: Path) -> None:
    model = Model(Builder(tmp_path / "a.opreplay"))
    for _ in range(8):
        model.make("cpu", 1 << 60)
    model.builder.frame()
    model.builder.close()
    with open_capture(model.builder.path) as reader, pytest.raises(InvalidCapture, match="2\\^62"):
        memory_by_device(reader)


def test_a_capture_without_storages_has_no_device(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "a.opreplay")
    builder.close()
    with open_capture(builder.path) as reader:
        assert memory_by_device(reader) == []
