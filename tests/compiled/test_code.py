"""What becomes of a compiled region's code in a replay: it fits or it is compiled, else it is refused."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tools
from in_process import tools as tools

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import Kernel
from replayfmt.format.reader import open_capture
from replayfmt.pytorch import cpp_kernels
from replayfmt.pytorch.cpp_kernels import _FLAG, CannotLoad, compiled
from replayfmt.replay.plan import Plan
from replayfmt.replay.resolution.code_kernels import InductorCppKernel, resolve_inductor_cpp

pytestmark = pytest.mark.slow
Contents = dict[str, bytes]


def work(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).relu() * x.sum()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, x = torch.compile(work), torch.randn(8, 16)
    run(x)
    made = tmp_path_factory.mktemp("code") / "region.opreplay"
    with replayfmt.capture(made):
        _kept = run(x)
    return made


@pytest.fixture
def stored(path: Path) -> tuple[Kernel, Contents]:
    """The kernel of the region, and what is stored of it."""
    with open_capture(path) as reader:
        kernel = next(each for each in reader.kernels if each is not None and each.kind is KernelKind.inductor_cpp)
        return kernel, contents_of(reader, kernel)


def resolved(kernel: Kernel, contents: Contents) -> Any:
    found = resolve_inductor_cpp(kernel, lambda: contents, frozenset({"cpu"}))
    return found if isinstance(found, str) else found.loaded()


def another_machine(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    here = {**cpp_kernels.machine_of_code(), "cpu": "another one"}
    monkeypatch.setattr(cpp_kernels, "machine_of_code", lambda: here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_no_code_runs_without_leave(path: Path) -> None:
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    assert len(refused.value.findings) == 1
    assert "inductor_cpp::cpp_fused" in refused.value.findings[0] and "--allow-code" in refused.value.findings[0]
    advice = str(refused.value)
    assert "(inductor_cpp 1)" in advice and "replay with --allow-code" in advice and "--compiled=eager" in advice


def test_a_shared_library_names_no_directory_of_this_machine(stored: tuple[Kernel, Contents]) -> None:
    _kernel, contents = stored
    library = contents["object"]
    for place in {Path(torch.__file__).parent, Path.home(), Path(sys.base_prefix), Path(tempfile.gettempdir())}:
        assert str(place).encode() not in library
    named = b"/include/torch/csrc/inductor", b".main.cpp"  # by PyTorch 2.11 the latter
    assert any(each in library for each in named), "messages keep their meaning"
    assert str(Path(torch.__file__).parent).encode() not in contents["source"]


def test_the_stored_library_runs_where_it_fits(path: Path) -> None:
    with Plan(path, allow_code=True) as plan:
        result = plan.execute(verify="bitwise")
    assert result.outcome == "ok"
    assert any("1 inductor_cpp kernel is run from the stored library" in note for note in result.notes)


def test_a_region_is_reconciled_with_its_isolated_kernels(path: Path, tools: Tools) -> None:
    out = path.with_suffix(".json")
    flags = ("--reconcile", "--allow-code", "--benchmark-min-time=6x", "--force", f"--benchmark-out={out}")
    done = tools("benchmark", *flags, path)
    assert done.code == 0 and "reconciliation of BM_replay" in done.out, done.err
    found = json.loads(out.read_text())["reconciliation"]
    with open_capture(path) as reader:
        calls = reader.summary.records[RecordKind.op]
    for inputs in ("isolated_hot", "isolated_cold"):
        assert found[inputs]["total_ns"] > 0 and found[inputs]["calls"] == calls and not found[inputs]["left_out"]
    assert found["whole_replay_ns"] > 0 and found["captured_ns"] > 0


def test_elsewhere_the_source_is_compiled_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    another_machine(monkeypatch, tmp_path)
    for said in ("compiling a C++ kernel", ""):
        with Plan(path, allow_code=True) as plan:
            result = plan.execute(verify="bitwise")
        assert result.outcome == "ok"
        assert any("compiled here from the stored source (its library is for another cpu)" in n for n in result.notes)
        told = capfd.readouterr().err
        assert said in told and bool(said) is ("compiling" in told)


def test_a_generated_kernel_is_replaced_from_its_skeleton(path: Path, tools: Tools, tmp_path: Path) -> None:
    with open_capture(path) as reader:
        (name,) = (each.name for each in reader.kernels if each is not None and each.kind is KernelKind.inductor_cpp)
    assert tools("dump", f"--kernel-skeleton={name}", path).code == 2
    skeleton = tools("dump", f"--kernel-skeleton={name}", "--allow-code", path).out
    assert "It must write out_ptr0, out_ptr1, and no other argument." in skeleton.splitlines()
    assert 'extern "C"  void  kernel(const float* in_ptr0,' in skeleton.splitlines() and "PyInit" not in skeleton
    other = skeleton.replace(".sin()", ".cos()")
    assert other != skeleton
    for written, code, said in ((skeleton, 0, "each checked against the original kernel"), (other, 1, "out_ptr1")):
        file = tmp_path / f"kernel{code}.py"
        file.write_text(written)
        ran = tools("run", "--allow-code", f"--replay-kernel-substitution={name}={file}", path)
        assert ran.code == code and said in ran.out + ran.err, ran
        assert code or ", values equal" in ran.out


def altered(change: Callable[[Contents, dict[str, Any]], object], contents: Contents) -> Contents:
    contents = dict(contents)
    metadata = json.loads(contents["metadata"])
    change(contents, metadata)
    return {**contents, "metadata": json.dumps(metadata).encode()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c, m: c.update(object=c["object"] + b"\0"), "does not match the digest"),
        (lambda c, m: c.update(source=c["source"] + b"\n// other"), "is another than the one it is named after"),
        (lambda c, m: c.update(source=c["source"].replace(b"in_ptr0", b"in_ptr7")), "other parameters than stored"),
        (lambda c, m: c.pop("source") and m.update(parameters="const double* in_ptr0, float* out_ptr0"), "its schema"),
        (lambda c, m: m.pop("flags"), "cannot be read"),
        (lambda c, m: m.update(compiled_for=[]), "cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused(
    stored: tuple[Kernel, Contents], change: Callable[[Contents, dict[str, Any]], object], why: str
) -> None:
    kernel, contents = stored
    assert isinstance(resolved(kernel, contents), InductorCppKernel)
    refused = resolved(kernel, altered(change, contents))
    assert isinstance(refused, str) and why in refused and refused.startswith(kernel.qualified_name)


def test_elsewhere_a_kernel_without_its_source_is_refused(
    stored: tuple[Kernel, Contents], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, contents = stored
    another_machine(monkeypatch, tmp_path)
    refused = resolved(kernel, altered(lambda c, m: c.pop("source"), contents))
    assert "its library is for another cpu, and its source is not in the capture" in refused


@pytest.mark.guarantee("cpp-kernels")
@pytest.mark.parametrize(
    "flag",
    [
        *("-fplugin=/x.so", "-fplugin=x", "-wrapper", "-specs=x", "-Bx", "@file", "-x", "-include", "-imacros"),
        *("-o/x", "-I/x", "-l/x", "-Wl,-rpath,/x", "-Wp,-MD,x", "-MMD", "-save-temps", "-dumpdir"),
        *("-fdump-tree-all", "-fopt-info-vec=x", "-fsanitize=address", "-fprofile-use=x", "-fmodules-ts", "-flto"),
        *("-mllvm", "-mdump-tune-features", "-D X=/x", "-O3\n-fplugin=x", ""),
    ],
)
def test_a_flag_that_reads_or_writes_files_is_refused(flag: str) -> None:
    with pytest.raises(CannotLoad, match="not one that a kernel is compiled with"):
        compiled("", ["-O3", flag])


def test_flags_of_every_processor_that_inductor_knows_are_taken() -> None:
    from torch._inductor import cpp_builder, cpu_vec_isa

    flags = {f"-{each}" for least in (True, False) for each in cpp_builder._get_optimization_cflags("c++", least)[0]}
    for isa in (cpu_vec_isa.VecNEON, *cpu_vec_isa.supported_vec_isa_list):
        flags |= set((isa if isinstance(isa, cpu_vec_isa.VecISA) else isa()).build_arch_flags().split())
    assert {"-O3", "-mavx512f", "-mamx-tile", "-fno-trapping-math"} <= flags
    assert [flag for flag in flags if not _FLAG.match(flag)] == []


def test_a_pointer_to_other_elements_is_refused(stored: tuple[Kernel, Contents]) -> None:
    kernel = resolved(*stored)
    right = [torch.float32] * 3
    assert kernel.problem_with(right) == ""
    assert "in_ptr0 points to elements of torch.float32" in kernel.problem_with([torch.float64, *right[1:]])
    assert "takes 3 tensors" in kernel.problem_with(right[1:])


def test_the_generated_module_is_put_back(tmp_path: Path) -> None:
    from torch._inductor.codecache import PyCodeCache

    run, x = torch.compile(work), torch.randn(8, 16)
    expected = run(x)
    before = [dict(vars(module)) for module in PyCodeCache.modules]
    with replayfmt.capture(tmp_path / "c.opreplay"):
        run(x)
        assert [dict(vars(module)) for module in PyCodeCache.modules] != before
    assert [dict(vars(module)) for module in PyCodeCache.modules] == before
    assert torch.equal(run(x), expected)


def test_a_region_that_is_not_known_is_one_unsupported_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import PyCodeCache

    run, x = torch.compile(lambda x: work(x).cos()), torch.randn(8, 16)
    run(x)
    monkeypatch.setitem(vars(PyCodeCache.modules[-1]), "assert_size_stride", lambda *arguments: None)
    with replayfmt.capture(tmp_path / "c.opreplay"):
        run(x * 2)
    with open_capture(tmp_path / "c.opreplay") as reader:
        assert reader.summary.unsupported == {"compiled_region": 1}
        details = [
            str(node.constant)
            for signature in reader.signatures
            if signature is not None
            for node in signature.args
            if node.name == "detail"
        ]
    assert len(details) == 1 and "calls assert_size_stride, which is not known" in details[0]


def test_a_cpp_wrapper_runs_beneath_python_and_is_refused(tmp_path: Path) -> None:
    run, x = torch.compile(lambda x: x.sin() + 1, options={"cpp_wrapper": True}), torch.randn(8)
    run(x)
    with replayfmt.capture(tmp_path / "c.opreplay"):
        run(x * 2)
    with open_capture(tmp_path / "c.opreplay") as reader:
        assert reader.summary.unsupported == {"compiled_region": 1}
