"""The work of a call (operations, bytes, class), the peaks of a device, and the roofline."""

import json

import pytest
import torch

import replayfmt
from replayfmt.benchmark import peaks as peaks_module
from replayfmt.benchmark.meters.meter import Clock
from replayfmt.benchmark.peaks import Peak, Peaks, parse_rate
from replayfmt.benchmark.per_op.roofline import place
from replayfmt.benchmark.per_op.work import CallWork, work_of
from replayfmt.errors import UsageError
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.replay.run.isolated import IsolatedCall

aten = torch.ops.aten


def work(overload, *arguments, **named):
    kernel = Kernel(overload._schema.name, overload._schema.overload_name or "default", str(overload._schema))
    return work_of(kernel, IsolatedCall(arguments, named, overload(*arguments, **named)))


def f32(*sizes):
    return torch.ones(sizes)


AT = torch.tensor([3])


def test_a_matrix_product_has_the_operations_and_bytes_of_its_definition():
    found = work(aten.mm.default, f32(2, 3), f32(3, 5))
    assert (found.flops, found.bytes_read, found.bytes_written) == (2 * 2 * 3 * 5, 4 * (6 + 15), 4 * 10)
    assert found.kernel_class == "matrix product or convolution"
    assert found.rule == "torch.utils.flop_counter has its formula" and found.dtype is torch.float32
    convolved = work(
        aten.convolution.default, f32(1, 2, 8, 8), f32(4, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    )
    assert convolved.flops == 2 * 4 * 2 * 3 * 3 * 6 * 6


def test_what_a_call_did_before_it_raised_is_not_known(tmp_path, tools):
    path, out = tmp_path / "raises.opreplay", tmp_path / "per_op.json"
    with replayfmt.capture(path), pytest.raises(RuntimeError):
        torch.mm(f32(2, 3), f32(4, 5))
    flags = ("--per-op", "--roofline", "--peak-flops=1T", "--peak-bandwidth=1T", "--op-filter=aten::mm")
    assert tools("benchmark", *flags, "--benchmark-min-time=2x", f"--benchmark-out={out}", path).code == 0
    (row,) = json.loads(out.read_text())["benchmarks"]
    assert row["flops"] is row["bytes_read"] is row["bytes_written"] is None and "bound" not in row
    assert row["flops_reason"].startswith("it raises") and row["bytes_read_reason"].startswith("it raises")


def test_operations_without_a_formula_are_not_known_and_not_zero():
    found = work(aten.tanh.default, f32(4))
    assert found.flops is None and found.flops_reason == "torch.utils.flop_counter has no formula of aten::tanh"
    assert (found.bytes_read, found.bytes_written) == (16, 16)
    assert (found.kernel_class, found.rule) == ("other operator", "none of the other rules holds")


@pytest.mark.parametrize(
    ("overload", "arguments", "named", "read", "written"),
    [
        (aten.add_.Tensor, (f32(4), f32(4)), {}, 32, 16),
        (aten.add.out, (f32(4), f32(4)), {"out": f32(4)}, 32, 16),
        (aten.copy_.default, (f32(4), f32(4)), {}, 16, 16),
        (aten.zero_.default, (f32(4),), {}, 0, 16),
        (aten.zeros_like.default, (f32(4),), {}, 0, 16),
        (aten.clone.default, (f32(4),), {}, 16, 16),
        (aten.sum.default, (f32(1).expand(1000),), {}, 4, 4),  # one element, read as often as one likes
        (aten.cat.default, ([f32(2), f32(3)],), {}, 20, 20),
        (aten.embedding.default, (f32(1000, 2), torch.tensor([1, 2, 3])), {}, 24 + 24, 24),
        (aten.index_select.default, (f32(2), 0, torch.tensor([0, 1, 0])), {}, 8 + 24, 12),
        (aten.index_put_.default, (f32(1000, 2), [AT], f32(1, 2)), {}, 8 + 8, 8),
        (aten.index_put_.default, (f32(1000, 2), [AT], f32(1, 2), True), {}, 8 + 8 + 8, 8),
        (aten.index_copy_.default, (f32(1000, 2), 0, AT, f32(1, 2)), {}, 8 + 8, 8),
        (aten.index_add_.default, (f32(1000, 2), 0, AT, f32(1, 2)), {}, 8 + 8 + 8, 8),
        (aten.scatter_.src, (f32(1000), 0, AT, f32(1)), {}, 8 + 4, 4),
        (aten.scatter_.reduce, (f32(1000), 0, AT, f32(1)), {"reduce": "add"}, 8 + 4 + 4, 4),
        (aten.scatter_add_.default, (f32(1000), 0, AT, f32(1)), {}, 8 + 4 + 4, 4),
        (aten.index_put.default, (f32(1000, 2), [AT], f32(1, 2)), {}, 8000 + 8 + 8, 8000),
        (aten.nll_loss_forward.default, (f32(1, 1000), AT, None, 0, -100), {}, 8 + 8, 4 + 4),
        (aten.view.default, (f32(4), [2, 2]), {}, 0, 0),
        (aten.split.Tensor, (f32(4), 2), {}, 0, 0),
        (aten.empty.memory_format, ([4],), {}, 0, 0),
        (aten.max.dim, (f32(4, 2), 1), {}, 32, 4 * 4 + 4 * 8),
        (aten.mul.Tensor, (*[f32(4)[:2]] * 2,), {}, 8, 8),  # the same view twice
    ],
)
def test_bytes_are_those_that_a_call_has_to_move_at_least(overload, arguments, named, read, written):
    if overload is aten.mul.Tensor:
        arguments = (arguments[0], arguments[0])
    found = work(overload, *arguments, **named)
    assert (found.bytes_read, found.bytes_written) == (read, written)


@pytest.mark.parametrize(
    ("overload", "arguments", "rule"),
    [
        (aten.clone.default, (f32(4),), "it moves elements as they are"),
        (aten.cat.default, ([f32(4)],), "it moves elements as they are"),
        (aten.t.default, (f32(4, 2),), "its results are views of its arguments"),
        (aten.empty.memory_format, ([4],), "it only allocates or describes memory"),
    ],
)
def test_what_moves_data_says_by_which_rule(overload, arguments, rule):
    found = work(overload, *arguments)
    assert found.kernel_class == "data movement" and found.rule.startswith(rule)


def test_bytes_of_sparse_tensors_are_not_known():
    found = work(aten._sparse_sum.default, f32(4).to_sparse())
    assert found.bytes_moved is None and found.bytes_reason == "it has a tensor of layout torch.sparse_coo"


def test_kernels_that_are_code_have_bytes_and_no_known_operations():
    kernel = Kernel(
        "triton::softmax", "v1234", "triton::softmax.v1234(Tensor(a!) out, Tensor x) -> ()", KernelKind.triton
    )
    found = work_of(kernel, IsolatedCall((f32(4), f32(8)), {}, None))
    assert found.flops is None and (found.bytes_read, found.bytes_written) == (48, 16)
    assert found.kernel_class == "other operator" and "of the kind triton" in found.rule
    unknown = Kernel("x::y", "default", "x::y(NoSuchType a) -> ()")
    found = work_of(unknown, IsolatedCall((f32(4),), {}, None))
    assert found.bytes_moved is None and "cannot parse the schema x::y(NoSuchType a)" in found.bytes_reason


def test_a_call_is_placed_under_the_lower_of_its_two_roofs():
    at = Peaks(torch.device("cpu"), 1, flops=1e12, bandwidth=1e11)

    def of(flops, moved):
        return CallWork(flops, "", moved, 0, "", "other operator", "", torch.float32)

    bound = place(of(1_000_000, 1_000), 2_000, at)  # 1000 operations a byte; at best 1 us
    assert (bound.bound, bound.of_roof, bound.intensity) == ("compute", pytest.approx(0.5), 1000)
    bound = place(of(1_000, 1_000_000), 20_000, at)  # at best 10 us
    assert (bound.bound, bound.of_roof) == ("memory", pytest.approx(0.5))
    bound = place(of(None, 1_000_000), 20_000, at)
    assert (bound.bound, bound.of_roof, bound.peak_flops) == ("memory", pytest.approx(0.5), None)
    assert place(of(1_000, 0), 1_000, at) is None
    assert place(of(1_000, None), 1_000, at) is None


def test_peaks_are_measured_once_for_each_device_and_dtype_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(peaks_module, "_WIDTH", {False: 16})
    monkeypatch.setattr(peaks_module, "_COPIED_BYTES", {False: 1000})
    ticks = iter(range(0, 10**12, 100_000_000))  # every run takes 0.1 s
    threads = torch.get_num_threads()
    clock = Clock(real=lambda: next(ticks))
    kept = tmp_path / "deep" / "peaks.json"
    cpu = torch.device("cpu")
    measured = Peaks(cpu, 1, cache=kept, clock=clock)
    assert measured.of_bandwidth() == Peak(pytest.approx(2 * 1000 / 0.1), "measured")
    assert measured.of_flops(torch.float32) == Peak(pytest.approx(2 * 16**3 / 0.1), "measured")
    assert measured.of_flops(torch.float64) is not None and len(json.loads(kept.read_text())) == 3
    later = Peaks(cpu, 1, cache=kept, clock=Clock(real=lambda: 1 / 0))
    assert later.of_flops(torch.float32) == measured.of_flops(torch.float32)
    other_threads = Peaks(cpu, 2, cache=kept, clock=clock)
    assert other_threads.of_bandwidth() is not None and len(json.loads(kept.read_text())) == 4
    assert torch.get_num_threads() == threads
    kept.write_text("damaged")
    assert measured.of_bandwidth() is not None and len(json.loads(kept.read_text())) == 1
    assert Peaks(cpu, 1, flops=5.0, cache=kept).of_flops(torch.float32) == Peak(5.0, "given")
    assert measured.of_flops(torch.uint16) is None  # no product of such matrices


@pytest.mark.parametrize(("text", "value"), [("19.5T", 19.5e12), ("2e12", 2e12), (".5G", 5e8), ("7", 7.0)])
def test_a_rate_is_a_number_with_a_scale(text, value):
    assert parse_rate("--peak-flops", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0", "-1", "fast", "1TT", "1e999", "", "nan", "9" * 400])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(UsageError, match="expected a number a second"):
        parse_rate("--peak-flops", text)


@pytest.fixture
def product(tmp_path):
    path = tmp_path / "product.opreplay"
    with replayfmt.capture(path):
        torch.tanh(torch.mm(torch.ones(8, 16), torch.ones(16, 4))).t()
    return path


def test_every_op_has_its_work_in_the_json_and_with_roofline_on_the_console(tools, product, tmp_path, monkeypatch):
    flags = ["--per-op", "--benchmark-min-time=3x"]
    rows = json.loads(tools("benchmark", product, *flags, "--benchmark-format=json").out)["benchmarks"]
    by_op = {row["op"]: row for row in rows}
    product_row = by_op["aten::mm.default"]
    assert product_row["flops"] == 2 * 8 * 16 * 4 and product_row["bytes_written"] == 4 * 32
    assert product_row["flops_per_second"] == pytest.approx(1024 / product_row["median_real_time"] * 1e9)
    assert by_op["aten::tanh.default"]["flops"] is None and by_op["aten::tanh.default"]["flops_reason"]
    assert (
        by_op["aten::t.default"]["kernel_class"] == "data movement"
        and "bytes_per_second" not in by_op["aten::t.default"]
    )
    assert "share_of_roof" not in product_row
    ran = tools("benchmark", product, *flags, "--roofline", "--peak-flops=1e-9P", "--peak-bandwidth=1")
    assert ran.code == 2 and "--peak-flops=1e-9P" in ran.err
    ran = tools("benchmark", product, *flags, "--roofline", "--peak-flops=900P", "--peak-bandwidth=900P")
    assert ran.code == 0 and "of roof" in ran.out and "matrix product or convolution" in ran.out
    assert "faster than the peak" not in ran.out
    ran = tools("benchmark", product, *flags, "--roofline", "--peak-flops=1", "--peak-bandwidth=1")
    assert "faster than the peak that it is compared with: " in ran.out and "the given peaks are too low" in ran.out
    cache = tmp_path / "opreplay" / "peaks.json"
    cache.parent.mkdir()
    monkeypatch.setattr(peaks_module, "_WIDTH", {False: 16})
    monkeypatch.setattr(peaks_module, "_COPIED_BYTES", {False: 1000})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.write_text('{"a": Infinity, "b": true, "c": 2}')
    ran = tools("benchmark", product, *flags, "--roofline", f"--benchmark-out={tmp_path / 'roofed.json'}")
    kept = json.loads(cache.read_text())
    assert ran.code == 0 and "a" not in kept and "b" not in kept and len(kept) == 3
    cache.write_text(json.dumps(dict.fromkeys(kept, 1.0)))
    ran = tools("benchmark", product, *flags, "--roofline")
    assert f"or remove {cache}, and they are measured again" in ran.out
    csv = tools("benchmark", product, *flags, "--benchmark-format=csv").out.splitlines()[0].split(",")
    assert csv.count("bytes_per_second") == 1 and len(csv) == len(set(csv))


def test_a_kernels_row_sums_what_is_known_and_says_of_how_many_calls_it_is_not(tools, product):
    flags = ["--per-op", "--benchmark-min-time=3x", "--group-by=kernel", "--benchmark-format=json"]
    rows = {row["name"]: row for row in json.loads(tools("benchmark", product, *flags).out)["benchmarks"]}
    mm, tanh = rows["BM_op/kernel:aten::mm.default"], rows["BM_op/kernel:aten::tanh.default"]
    assert (mm["total_flops"], mm["total_flops_unknown_calls"]) == (1024, 0)
    assert mm["kernel_classes"] == {"matrix product or convolution": 1}
    assert tanh["total_flops"] is None and tanh["total_flops_unknown_calls"] == 1 and tanh["total_flops_reason"]
    assert tanh["total_bytes"] == 2 * 4 * 32


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--roofline"], "needs --per-op"),
        (["--per-op", "--peak-flops=1T"], "--peak-flops needs --roofline"),
        (["--per-op", "--roofline", "--group-by=kernel"], "does not go with --group-by"),
    ],
)
def test_flags_of_the_roofline_that_do_not_fit_are_refused(tools, product, flags, words):
    ran = tools("benchmark", product, *flags)
    assert ran.code == 2 and words in ran.err
