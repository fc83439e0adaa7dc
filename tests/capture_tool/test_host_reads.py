"""Values that leave without an operator are recorded, and the program gets exactly what it would get."""

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from replayfmt.recording.hooks.host_access import HostReads

from .fakes import FakeRecorder


@pytest.fixture
def recorder():
    recorder = FakeRecorder()
    reads = HostReads(recorder)
    reads.install()
    assert reads.missing == []
    with recorder.mode:
        yield recorder
    reads.remove()


@pytest.mark.parametrize(
    ("method", "read"),
    [
        ("tolist", lambda t: t.tolist()),
        ("tolist", lambda t: torch.Tensor.tolist(t)),
        ("numpy", lambda t: t.numpy().tolist()),
        ("numpy", lambda t: t.numpy(force=True).tolist()),
        ("__array__", lambda t: np.asarray(t).tolist()),
        ("__array__", lambda t: np.array(t, dtype=np.float64).tolist()),
        ("__array__", lambda t: np.add(t, 0).tolist()),
        ("__dlpack__", lambda t: np.from_dlpack(t).tolist()),
        ("to_dlpack", lambda t: torch.from_dlpack(torch.to_dlpack(t)).numpy().tolist()),
        ("to_dlpack", lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)).numpy().tolist()),
    ],
)
def test_each_way_out_is_one_host_read(recorder, method, read):
    values = [1.0, 2.5, -3.0]
    tensor = torch.tensor(values)
    assert read(tensor) == values
    assert recorder.take("host_read")[0] == ("host_read", method, values)


def test_memory_that_a_library_with_kernels_of_its_own_takes_is_a_host_read(monkeypatch):
    """On a GPU, by `__cuda_array_interface__`: a tensor of the host has none, so that a stand-in says where it is."""
    monkeypatch.setattr(torch.Tensor, "__cuda_array_interface__", property(lambda t: {"data": (t.data_ptr(), False)}))
    recorder = FakeRecorder()
    reads = HostReads(recorder)
    reads.install()
    with recorder.mode:
        x = torch.ones(2)
        recorder.log.clear()
        assert x.__cuda_array_interface__ == {"data": (x.data_ptr(), False)}
    reads.remove()
    assert [event[:2] for event in recorder.take("host_read")] == [("host_read", "__cuda_array_interface__")]


def test_a_tensor_of_the_host_still_has_no_interface_of_cuda(recorder):
    assert not hasattr(torch.ones(2), "__cuda_array_interface__")
    assert recorder.take("host_read") == []


def test_one_read_is_recorded_once_though_it_goes_through_others(recorder):
    np.asarray(torch.ones(2))
    assert [event[1] for event in recorder.take("host_read")] == ["__array__"]


def test_operators_that_read_values_are_left_to_the_recorder(recorder):
    tensor = torch.tensor(3)
    assert (tensor.item(), bool(tensor), int(tensor), float(tensor), range(5)[tensor]) == (3, True, 3, 3.0, 3)
    assert recorder.take("host_read") == []


def test_a_read_that_fails_raises_as_before_and_is_not_recorded(recorder):
    wanting = torch.ones(2, requires_grad=True), torch.ones(2, device="meta")
    for tensor, message in zip(wanting, ("requires grad", "meta"), strict=True):
        with pytest.raises((RuntimeError, TypeError), match=message):
            tensor.numpy()
    with pytest.raises(TypeError):
        torch.ones(2).tolist(1)
    assert recorder.take("host_read") == []


def test_reads_while_paused_or_in_an_op_or_in_another_thread_are_the_recorders_business(recorder):
    @torch.library.custom_op("capture_tests::through_numpy", mutates_args=())
    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1)

    tensor = torch.ones(2)
    assert through_numpy(tensor).sum().item() == 4
    with recorder.paused():
        tensor.tolist()
    thread = threading.Thread(target=tensor.tolist)
    thread.start()
    thread.join()
    assert recorder.take("host_read") == []


def test_subclasses_and_function_modes_are_asked_first_and_read_once(recorder):
    calls = []

    class Plain(torch.Tensor):
        pass

    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    original = torch._C.TensorBase.tolist
    base = torch.tensor([1.0])
    for tensor in (base.as_subclass(Plain), base.as_subclass(Overriding)):
        assert tensor.tolist() == [1.0]
        assert recorder.take("host_read") == [("host_read", "tolist", [1.0])]
    with Mode():
        assert base.tolist() == [1.0]
    assert recorder.take("host_read") == [("host_read", "tolist", [1.0])]
    assert calls.count(torch.Tensor.tolist) == 2
    assert {original: "handler"}[calls[-1]] == "handler", "tables keyed by the original find it"
    assert {torch.Tensor.tolist: "handler"}[original] == "handler"


def test_wrapper_subclasses_and_traced_tensors_are_not_read(recorder):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    two = TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(RuntimeError):
        two.tolist()
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.ones(2).numpy()
    assert recorder.take("host_read") == []


def test_methods_look_like_themselves_and_memory_is_freed(recorder):
    tensor = torch.ones(3)
    method = tensor.tolist
    assert (method.__name__, method.__self__ is tensor) == ("tolist", True)
    assert torch.Tensor.tolist.__doc__ == torch._C.TensorBase.tolist.__doc__
    assert copy.deepcopy(tensor).tolist() == [1.0] * 3
    tensor.numpy()
    alive = weakref.ref(tensor)
    del tensor, method
    recorder.log.clear()
    gc.collect()
    assert alive() is None


def test_everything_is_as_it_was_afterwards():
    names = ("tolist", "numpy", "__array__", "__cuda_array_interface__", "__dlpack__")

    def state():
        return [vars(torch.Tensor).get(name) for name in names] + [torch.to_dlpack, torch.utils.dlpack.to_dlpack]

    before = state()
    reads = HostReads(FakeRecorder())
    reads.install()
    assert all(now is not then for now, then in zip(state(), before, strict=True))
    reads.remove()
    assert all(now is then for now, then in zip(state(), before, strict=True))
