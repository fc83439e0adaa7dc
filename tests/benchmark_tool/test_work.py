"""The work of a call (operations, bytes, class), the peaks of a device, and the roofline."""

import json
from datetime import datetime, timedelta
from itertools import accumulate, chain, count, repeat

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt
from replayfmt.benchmark.meters import Clock
from replayfmt.benchmark.per_op import roofline as peaks_module
from replayfmt.benchmark.per_op.groups import CallWork, work_of
from replayfmt.benchmark.per_op.roofline import Peak, Peaks, parse_rate, peak_caveats, peak_line, place
from replayfmt.errors import UsageError
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.pytorch import operators
from replayfmt.replay.run.steps import IsolatedCall

aten = torch.ops.aten


def work(overload, *arguments, **named):
    kernel = Kernel(overload._schema.name, overload._schema.overload_name or "default", str(overload._schema))
    return work_of(kernel, IsolatedCall(arguments, named, overload(*arguments, **named)))


def f32(*sizes):
    return torch.ones(sizes)


AT = torch.tensor([3])
CONVOLUTION = (f32(1, 1, 4, 4), f32(1, 1, 4, 4), f32(1, 1, 3, 3), [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
CONVOLUTION += ([True, False, False],)


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
    flags = ("--per-op", "--roofline", "--peak-flops=1T", "--peak-bandwidth=1T", "--kernel=aten::mm")
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
        (aten.addmm.default, (f32(4, 4), f32(4, 4), f32(4, 4)), {"beta": 0}, 2 * 64, 64),
        (aten.convolution_backward.default, CONVOLUTION, {}, 64 + 36, 64),  # without a gradient of the weight
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


SHAPES = {  # of programs whose backward passes are given tensors for their shape alone
    "nll_loss": (lambda x: F.nll_loss(x, torch.tensor([1, 0])), (2, 3)),
    "nll_loss2d": (lambda x: F.nll_loss(x, torch.ones(1, 2, 2, dtype=torch.int64)), (1, 3, 2, 2)),
    "max_pool2d_with_indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], (1, 1, 4, 4)),
    "max_pool3d_with_indices": (lambda x: F.max_pool3d(x, 2, return_indices=True)[0], (1, 1, 4, 4, 4)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), (1, 1, 4, 4)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (1, 1, 4, 4, 4)),
    "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 2, output_size=2), (1, 1, 5, 5)),
    "fractional_max_pool3d": (lambda x: F.fractional_max_pool3d(x, 2, output_size=2), (1, 1, 5, 5, 5)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (1, 1, 4, 4)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (1, 1, 4, 4, 4)),
    "_adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (1, 1, 5, 5)),
    "_adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (1, 1, 5, 5, 5)),
    **{
        f"{mode}_pad{n}d": (lambda x, n=n, how=how: F.pad(x, [1] * 2 * n, how), [1] + [4] * (n + 1))
        for mode, how in (("reflection", "reflect"), ("replication", "replicate"))
        for n in (1, 2, 3)
    },
}


class Emptied(TorchDispatchMode):
    """Calls the operators of _LENDS_SHAPE with NaN in what they are said not to read."""

    def __init__(self):
        super().__init__()
        self.called = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, names = kwargs or {}, [argument.name for argument in func._schema.arguments]
        if unread := operators._LENDS_SHAPE.get(func._schema.name):
            emptied = [
                torch.full_like(value, torch.nan) if name in unread else value
                for name, value in zip(names, args, strict=False)
            ]
            found = work(func, *args, **kwargs)
            given = sum(each.nbytes for each in args if isinstance(each, torch.Tensor))
            assert found.bytes_read == given - args[names.index(unread[0])].nbytes
            result = func(*emptied, **kwargs)
            self.called[func._schema.name] = torch.equal(result, func(*args, **kwargs)) and not result.isnan().any()
            return result
        return func(*args, **kwargs)


@pytest.mark.slow
def test_a_tensor_that_lends_only_its_shape_is_not_read_and_not_charged():
    with Emptied() as mode:
        for program, sizes in SHAPES.values():
            program(torch.rand(*sizes, requires_grad=True)).square().sum().backward()
    assert mode.called == {f"aten::{name}_backward": True for name in SHAPES} and set(mode.called) == set(
        operators._LENDS_SHAPE
    )


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


@pytest.fixture
def small(monkeypatch):
    """Peaks of small work."""
    monkeypatch.setattr(peaks_module, "_WIDTH", {False: 16})
    monkeypatch.setattr(peaks_module, "_COPIED_BYTES", {False: 1000})


CPU = torch.device("cpu")


def steady(seconds=0.1):
    """A clock by which every run takes so long."""
    ticks = count()
    return Clock(real=lambda: int(next(ticks) * seconds * 1e9))


def test_peaks_are_measured_once_for_each_device_and_dtype_and_kept(tmp_path, small):
    threads = torch.get_num_threads()
    kept, quiet = tmp_path / "deep" / "peaks.json", tmp_path / "no such machine"
    measured = Peaks(CPU, 1, cache=kept, clock=steady(), root=quiet)
    assert measured.of_bandwidth().per_second == pytest.approx(2 * 1000 / 0.1)
    product = measured.of_flops(torch.float32)
    assert (product.per_second, product.source, product.doubts) == (pytest.approx(2 * 16**3 / 0.1), "measured", ())
    assert measured.of_flops(torch.float64) is not None and len(json.loads(kept.read_text())) == 3
    later = Peaks(CPU, 1, cache=kept, clock=Clock(real=lambda: 1 / 0))
    assert later.of_flops(torch.float32) == product
    other_threads = Peaks(CPU, 2, cache=kept, clock=steady(), root=quiet)
    assert other_threads.of_bandwidth() is not None and len(json.loads(kept.read_text())) == 4
    assert torch.get_num_threads() == threads
    for damaged in ("damaged", "[" * 100_000, "9" * 5000):
        kept.write_text(damaged)
        assert Peaks(CPU, 1, cache=kept, clock=steady(), root=quiet).of_bandwidth() is not None
        assert len(json.loads(kept.read_text())) == 1
    assert Peaks(CPU, 1, flops=5.0, cache=kept).of_flops(torch.float32) == Peak(5.0, "given")
    assert measured.of_flops(torch.uint16) is None  # no product of such matrices


def test_peaks_are_measured_on_random_values_and_draw_from_no_generator_of_the_program(tmp_path, small, monkeypatch):
    seen, mm, before = [], torch.mm, torch.get_rng_state()
    monkeypatch.setattr(torch, "mm", lambda left, right, out: seen.append(left) or mm(left, right, out=out))
    Peaks(CPU, 1, cache=tmp_path / "peaks.json", clock=steady()).of_flops(torch.float32)
    assert len(seen[0].unique()) > 200 and torch.equal(torch.get_rng_state(), before)


def test_the_precision_of_float32_products_is_that_of_the_capture_and_the_setting_stays(tmp_path, small):
    peaks = Peaks(CPU, 1, precision="high", cache=tmp_path / "peaks.json", clock=steady(), root=tmp_path)
    assert peaks.of_flops(torch.float32) and peaks.of_flops(torch.float64)
    assert [row["what"] for row in peaks.rows()] == ["products of float32 (high precision)", "products of float64"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_peak_of_runs_that_differ_is_doubtful_and_not_kept(tmp_path, small):
    now = accumulate(chain.from_iterable(repeat((0, 200_000_000, 0, 100_000_000, 0, 200_000_000))))
    kept = tmp_path / "peaks.json"
    peaks = Peaks(CPU, 1, cache=kept, clock=Clock(real=lambda: next(now)), root=tmp_path)
    peak = peaks.of_bandwidth()
    assert peak.doubts == ("half of its runs took 100% longer than the fastest",) and not kept.exists()
    assert peaks.of_bandwidth() is peak, "measured once for a report"
    placed = place(CallWork(None, "", 1000, 1000, "", "other operator", ""), 1_000, peaks)
    assert placed is not None and placed.fields()["peaks_doubtful"] is True
    (warning,) = peak_caveats(peaks.rows())
    assert "the peak of cpu (bandwidth) is doubtful" in warning and "100% longer" in warning
    (line,) = map(peak_line, peaks.rows())
    assert "measured less than a minute ago" in line and "doubtful, so not kept" in line


@pytest.mark.parametrize(("user", "stolen", "share"), [(0, 0, 0.0), (50, 0, 0.25), (20, 40, 0.3)])
def test_other_work_on_the_processors_and_stolen_time_make_a_peak_doubtful(tmp_path, small, user, stolen, share):
    (tmp_path / "proc").mkdir()
    stat, ticks = tmp_path / "proc" / "stat", count()

    def real():
        number = next(ticks)
        idle = 200 - user - stolen
        stat.write_text(f"cpu  {100 + number * user} 0 50 {1000 + number * idle} 10 0 0 {number * stolen} 0 0\n")
        return number * 10**8

    real()
    kept = tmp_path / "peaks.json"
    peak = Peaks(CPU, 1, cache=kept, clock=Clock(real=real), root=tmp_path).of_bandwidth()
    words = f"others had {share:.0%} of the processors"
    assert words in peak.conditions
    assert (peak.doubts == ()) == (share < 0.1) == kept.exists()


def test_an_old_peak_is_measured_again_and_a_kept_one_has_its_age_and_conditions(tmp_path, small):
    kept, now = tmp_path / "peaks.json", datetime.now().astimezone()
    first = Peaks(CPU, 1, cache=kept, clock=steady(), root=tmp_path).of_bandwidth()
    (key,) = json.loads(kept.read_text())
    for days, found in ((40, first.per_second), (29, 7.0)):
        entry = {"per_second": 7.0, "measured": (now - timedelta(days=days)).isoformat(), "conditions": "alone"}
        kept.write_text(json.dumps({key: entry}))
        peaks = Peaks(CPU, 1, cache=kept, clock=steady(), root=tmp_path)
        assert peaks.of_bandwidth().per_second == pytest.approx(found)
    assert peak_line(peaks.rows()[0]) == "cpu: bandwidth 7.000/s, measured 29 days ago (alone)"


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


@pytest.mark.slow
def test_every_op_has_its_work_in_the_json_and_with_roofline_on_the_console(
    tools, product, tmp_path, small, monkeypatch
):
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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peaks_module, "_MOST_SPREAD", 1e9)
    monkeypatch.setattr(peaks_module, "_MOST_OTHERS", 1.0)
    cache.write_text('{"a": Infinity, "b": true, "c": 2, "d": {"per_second": Infinity}}')
    ran = tools("benchmark", product, *flags, "--roofline", f"--benchmark-out={tmp_path / 'roofed.json'}")
    kept = json.loads(cache.read_text())
    assert ran.code == 0 and not set("abcd") & set(kept) and len(kept) == 2
    assert "peak      cpu: bandwidth" in ran.out and "measured less than a minute ago" in ran.out
    peaks = json.loads((tmp_path / "roofed.json").read_text())["context"]["peaks"]
    assert {peak["what"] for peak in peaks} == {"bandwidth", "products of float32"}
    assert all(peak["measured"] and peak["conditions"] for peak in peaks)
    cache.write_text(json.dumps({key: entry | {"per_second": 1.0} for key, entry in kept.items()}))
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
