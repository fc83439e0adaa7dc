"""Which captures race: ops of two streams on the same memory, one of them writing, and nothing between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayfmt.format.codes import DType, Layout, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.maintenance import check_capture
from replayfmt.format.model import Device, Kernel, Node, Signature, StreamPlacement, TensorMeta
from replayfmt.format.races import find_races, judge_races
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

from .samples import SESSION, Records, op

V, K = ValueKind, RecordKind


class Program:
    """Writes what two streams of a device do. Storages are numbered from 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = CaptureWriter(path, SESSION)
        self.cpu, self.gpu = self.writer.device(Device("cpu")), self.writer.device(Device("gpu", 0))
        self.records = Records(self.writer)
        self._metas = [
            self.writer.meta(TensorMeta(DType.float32, Layout.strided, device, (2,), (1,)))
            for device in (self.cpu, self.gpu)
        ]
        self._placements = [0, *(self.writer.placement(StreamPlacement(((self.gpu, n),))) for n in (1, 2))]

    def tensor(self, on_host: bool = False) -> int:
        """A new tensor."""
        device = self.cpu if on_host else self.gpu
        return self.records.tensor(
            self.records.storage(8, device, StorageOrigin.uninitialized), 0, self._metas[not on_host]
        )

    def call(self, stream: int, schema: str, *tensors: int, returns: tuple[Node, ...] = (), ints: tuple[int, ...] = ()):
        """An op whose tensor arguments are these."""
        name = schema.partition("(")[0].partition(".")[0]
        kernel = self.writer.kernel(Kernel(name, "default", schema))
        nodes = tuple(Node(V.tensor, f"x{index}") for index in range(len(tensors)))
        self.records.add(op(kernel, nodes, returns), tensors, ints, placement=self._placements[stream])

    def write(self, stream: int, tensor: int) -> None:
        self.call(stream, "aten::fill_(Tensor(a!) x0) -> Tensor(a!)", tensor)

    def read(self, stream: int, tensor: int) -> None:
        self.call(stream, "aten::look(Tensor x0) -> ()", tensor)

    def event(self, kind: RecordKind, event: int, stream: int) -> None:
        nodes = (Node(V.int, "event"), Node(V.device, "device", self.gpu), Node(V.int, "stream"))
        self.records.add(Signature(kind, nodes), ints=(event, stream))

    def edge(self, of: int, to: int) -> None:
        self.event(K.event_record, 1, of)
        self.event(K.event_wait, 1, to)

    def races(self) -> list[tuple[int, int]]:
        """The ordinals of each race."""
        self.records.write()
        self.writer.close(0)
        check_capture(self.path)
        with open_capture(self.path) as reader:
            return [(race.first.ordinal, race.second.ordinal) for race in find_races(reader)]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path / "a.opreplay")


@pytest.mark.parametrize("first", ["write", "read"])
@pytest.mark.parametrize("second", ["write", "read"])
def test_two_streams_race_where_one_writes(program: Program, first: str, second: str) -> None:
    x = program.tensor()
    getattr(program, first)(1, x)
    getattr(program, second)(2, x)
    assert program.races() == ([] if first == second == "read" else [(0, 1)])


def test_an_event_orders_what_came_before_it_and_nothing_later(program: Program) -> None:
    x, y = program.tensor(), program.tensor()
    program.write(1, x)
    program.edge(1, 2)
    program.write(1, y)
    program.read(2, x)
    program.read(2, y)
    assert program.races() == [(3, 5)]


def test_order_passes_on_from_stream_to_stream_but_not_backwards(program: Program) -> None:
    x = program.tensor()
    program.write(1, x)
    program.edge(1, 0)
    program.edge(0, 2)
    program.write(2, x)
    program.read(1, x)
    assert program.races() == [(5, 6)]


def test_an_event_that_is_recorded_again_stands_for_the_later_work_alone(program: Program) -> None:
    x = program.tensor()
    program.write(1, x)
    program.event(K.event_record, 1, 1)
    program.event(K.event_record, 1, 0)
    program.event(K.event_wait, 1, 2)
    program.read(2, x)
    assert program.races() == [(0, 4)]


@pytest.mark.parametrize("kind", [K.synchronize, K.stream_synchronize, K.event_synchronize, K.storage_release])
def test_what_the_host_waited_for_is_done(program: Program, kind: RecordKind) -> None:
    x = program.tensor()
    program.write(1, x)
    program.event(K.event_record, 1, 1)
    nodes, ints = {
        K.synchronize: ((Node(V.device, "device", program.gpu),), ()),
        K.stream_synchronize: ((Node(V.device, "device", program.gpu), Node(V.int, "stream")), (1,)),
        K.event_synchronize: ((Node(V.int, "event"),), (1,)),
        K.storage_release: ((Node(V.storage, "storage"),), (x,)),
    }[kind]
    program.records.add(Signature(kind, nodes), ints=ints)
    program.write(2, x)
    assert program.races() == []


def test_the_host_waits_for_numbers_and_for_what_it_is_given(program: Program) -> None:
    x, y, host = program.tensor(), program.tensor(), program.tensor(on_host=True)
    program.write(1, x)
    program.call(1, "aten::item(Tensor x0) -> Scalar", x, returns=(Node(V.int),), ints=(7,))
    program.write(2, x)
    program.write(1, y)
    program.call(1, "aten::copy_(Tensor(a!) x0, Tensor x1) -> Tensor(a!)", host, y)
    program.write(2, y)
    assert program.races() == []


@pytest.mark.parametrize(("dtype", "ordered"), [(DType.bool, True), (DType.int64, False)])
def test_the_host_waits_for_masks_and_not_for_indices(program: Program, dtype: DType, ordered: bool) -> None:
    x, where = program.tensor(), program.tensor()
    meta = program.writer.meta(TensorMeta(dtype, Layout.strided, program.gpu, (2,), (1,)))
    indices = program.records.tensor(where, 0, meta)
    program.write(1, x)
    program.call(1, "aten::index(Tensor x0, Tensor x1) -> Tensor", x, indices)
    program.read(2, x)
    assert program.races() == ([] if ordered else [(0, 2)])


def test_of_very_many_streams_it_is_said_that_nothing_is_looked_for(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.format.races.MOST_STREAMS", 1)
    x = program.tensor()
    program.write(1, x)
    program.write(2, x)
    assert program.races() == []
    with open_capture(program.path) as reader:
        assert "2 streams" in judge_races(reader).unjudged


@pytest.mark.parametrize("bound", ["MOST_STEPS", "MOST_KEPT"])
def test_what_takes_too_long_or_too_much_is_said_with_where_it_ended(
    program: Program, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.format.races._STEPS_PER_RECORD", 0)
    monkeypatch.setattr(f"replayfmt.format.races.{bound}", 20)
    x, y = program.tensor(), program.tensor()
    program.write(1, x)
    program.write(2, x)
    for _ in range(20):
        for event in range(20):
            program.event(K.event_record, event, 1)
            program.edge(1, 2)
            program.write(2, y)
    program.write(1, y)
    assert program.races() == [(0, 1)]
    with open_capture(program.path) as reader:
        races = judge_races(reader)
    assert len(races.sentences) == 1 and "from ordinal " in races.unjudged


def test_an_event_knows_what_was_done_when_it_was_recorded_and_a_stream_that_waits_does_not_change_it(
    program: Program,
) -> None:
    x, y = program.tensor(), program.tensor()
    program.write(1, x)
    program.event(K.event_record, 7, 1)
    program.event(K.event_wait, 7, 2)
    program.write(2, y)
    program.event(K.event_wait, 7, 0)
    program.read(0, x)
    program.read(0, y)
    assert program.races() == [(3, 6)]


def test_views_and_tensors_made_alike_do_not_read(program: Program) -> None:
    x = program.tensor()
    program.write(1, x)
    program.call(2, "aten::view(Tensor(a) x0) -> Tensor(a)", x)
    program.call(2, "aten::ones_like(Tensor x0) -> Tensor", x)
    assert program.races() == []


def test_a_kernel_whose_schema_says_nothing_may_write_what_it_is_given(program: Program) -> None:
    x = program.tensor()
    program.read(1, x)
    program.call(2, "mylib::odd(...) -> ()", x)
    assert program.races() == [(0, 1)]


def test_each_storage_is_named_once_and_a_race_reads_as_a_sentence(program: Program) -> None:
    x = program.tensor()
    for _ in range(3):
        program.write(1, x)
        program.write(2, x)
    assert program.races() == [(0, 1)]
    with open_capture(program.path) as reader:
        (race,) = find_races(reader)
        assert race.text(reader) == (
            "ordinal 0 (aten::fill_.default, stream 1 of gpu:0) writes and ordinal 1 (aten::fill_.default, stream 2 of "
            "gpu:0) writes storage 1, and nothing orders them"
        )
