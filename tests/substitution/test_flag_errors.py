"""Every wrong use of --replay-kernel-substitution ends a run with exit code 2, one line, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .conftest import Captured, Kernels, Tool


def program() -> None:
    x = torch.ones(2, 3)
    torch.mm(x, x.t())
    torch.mm(torch.ones(3, 2), x)
    torch.add(x, x, alpha=2).sum(1)
    torch.add(x, 1.0)
    torch.clamp(x, min=0.0)


KERNELS = """
def mm(self, mat2): return torch.matmul(self, mat2)
def add(self, other, *, alpha=1): return torch.ops.aten.add(self, other, alpha=alpha)
def sum(self, dim, keepdim=False, *, dtype=None): return torch.ops.aten.sum(self, dim, keepdim, dtype=dtype)
def few(self): return self
def other_name(self, *, beta): return self
def more(self, other, required, *, alpha=1): return self
def keyword_only(*, self, mat2): return self
def other_default(self, other, *, alpha=2): return self + other
def without_default(self, other, *, alpha): return self + other
number = 3
"""

CASES = [
    (["=k.py"], "the selector is empty"),
    (["aten::mm="], "the path is empty"),
    (["aten::mm@=FILE"], "the format is empty"),
    (["0=FILE"], "kernel id 0: ids count from 1"),
    (["99=FILE"], "no kernel 99"),
    (["aten::mm=FILE", "aten::mm=FILE"], "the selector 'aten::mm' is repeated"),
    (["aten::mm=FILE", "aten::mm.default=FILE"], "overlaps with --replay-kernel-substitution=aten::mm="),
    (["aten::mm.default=FILE", "aten::mm=FILE"], "both select calls of aten::mm.default"),
    (["ID=FILE", "aten::mm=FILE"], "overlaps with"),
    (["aten::mm=FILE", "aten::mm.default(float32[2,3], *)=FILE"], "overlaps with"),
    (["aten::mm.default(float32[2,3], *)=FILE", "aten::mm=FILE"], "overlaps with"),
    (["aten::mm.default(float32[2,*], *)=FILE", "aten::mm.default(float32[*,3], *)=FILE"], "overlaps with"),
    (["aten::sum.dim_IntList(*, [int])=FILE", "aten::sum.dim_IntList(*, [1])=FILE"], "overlaps with"),
    (["aten::sum.dim_IntList(*, [1])=FILE", "aten::sum.dim_IntList(*, [int])=FILE"], "overlaps with"),
    (["aten::sum.dim_IntList(*, [1])=FILE", "aten::sum.dim_IntList(float32[2,3], [1])=FILE"], "overlaps with"),
    (["aten::mmm=FILE"], "matches no call of"),
    (["aten::mmm=FILE"], "did you mean aten::mm"),
    (["aten::mm.out=FILE"], "matches no call of"),
    (["aten::mm.default(float16[2,3], *)=FILE"], "its signatures there are aten::mm.default(float32[2,3]"),
    (["aten::sum.dim_IntList(*, [0])=FILE"], "matches no call of"),
    (["aten::mm=gone.py"], "gone.py: cannot be read: No such file or directory"),
    (["aten::mm@python=FOLDER"], "cannot be read: Is a directory"),
    (["all=FILE", "aten::mm=FILE"], "all must be the only selector"),
    (["aten::mm=FILE", "all=FILE"], "all must be the only selector"),
    (["all=FILE:mm"], "all takes no name"),
    (["aten::mm=FILE:fast"], "it defines no function 'fast'; it has mm, add, sum, few"),
    (["aten::mm=FILE:number"], "'number' in it is not a function"),
    (["aten::clamp=FILE"], "it defines no function 'clamp'"),
    (["aten::mm=FILE:few"], "which does not bind aten::mm(Tensor self, Tensor mat2) -> Tensor: too many positional"),
    (["aten::add=FILE:other_name"], "which does not bind aten::add.Tensor"),
    (["aten::add=FILE:more"], "missing a required argument: 'required'"),
    (["aten::mm=FILE:keyword_only"], "too many positional arguments"),
    (["aten::add=FILE:other_default"], "its default for 'alpha' is 2, the operator's is 1"),
    (["aten::add=FILE:without_default"], "argument: 'alpha'"),
    (["aten::mm=FILE:mine::mm"], "there is no operator mine::mm"),
    (["aten::mm@torch-library=FILE"], "registers 0 operators called 'mm'"),
    (["aten::mm=noformat.txt"], "the format of 'noformat.txt' cannot be inferred"),
]


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import replayfmt

    path = tmp_path_factory.mktemp("errors") / "capture.opreplay"
    with replayfmt.capture(path):
        program()
    return path


@pytest.mark.parametrize(("flags", "said"), CASES, ids=[f"{index}: {said}" for index, (_, said) in enumerate(CASES)])
def test_wrong_use_is_one_line_with_exit_code_2(
    flags: list[str], said: str, capture: Path, kernels: Kernels, tool: Tool, tmp_path: Path
) -> None:
    from replayfmt.format.reader import open_capture

    path = kernels(KERNELS)
    with open_capture(capture) as reader:
        number = next(i for i, kernel in enumerate(reader.kernels) if kernel and kernel.name == "aten::mm")
    given = [
        flag.replace("FILE", str(path)).replace("FOLDER", str(tmp_path)).replace("ID=", f"{number}=") for flag in flags
    ]
    code, out, err = tool("run", *(f"--replay-kernel-substitution={each}" for each in given), capture)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("INVALID_ARGUMENT: ")
    assert said in err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise KeyError('no such table')", "does not load: KeyError: 'no such table' (kernels.py:2)"),
        ("def mm(self, mat2:", "does not load: SyntaxError: '(' was never closed (kernels.py:2)"),
        ("def _load():\n  return 1 / 0\n_load()", "does not load: ZeroDivisionError: division by zero (kernels.py:3)"),
        ("import module_that_does_not_exist", "does not load: ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", "does not load: SystemExit: 3 (kernels.py:2)"),
    ],
)
def test_a_file_that_does_not_load_is_one_line_with_the_place(
    code: str, said: str, capture: Path, kernels: Kernels, tool: Tool
) -> None:
    given = f"--replay-kernel-substitution=aten::mm={kernels(code)}"
    status, _out, err = tool("run", given, capture)
    assert status == 2 and len(err.splitlines()) == 1 and said in err


def test_a_library_that_is_no_library_does_not_load(capture: Path, tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"no library at all")
    code, _out, err = tool("run", f"--replay-kernel-substitution=aten::mm={path}:mine::mm", capture)
    assert code == 2 and len(err.splitlines()) == 1 and "does not load: OSError" in err


def test_a_file_that_may_not_be_read_is_said(
    capture: Path, kernels: Kernels, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kernels("")

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("replayfmt.replay.substitution.loading.open", refuse, raising=False)
    code, _out, err = tool("run", f"--replay-kernel-substitution=aten::mm={path}", capture)
    assert code == 2 and "kernels.py: cannot be read: Permission denied" in err


def test_a_file_without_any_operator_by_name_matches_nothing_under_all(
    capture: Path, kernels: Kernels, tool: Tool
) -> None:
    path = kernels("def matmul(self, mat2): return self")
    code, _out, err = tool("run", f"--replay-kernel-substitution=all={path}", capture)
    assert code == 2 and "has no function with the name of an operator" in err and "it has matmul" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--substitution-rtol=0.1"], "expected a number from 0, and --replay-kernel-substitution"),
        (["--replay-kernel-substitution=aten::mm=FILE", "--substitution-rtol=-1"], "expected a number from 0"),
        (["--replay-kernel-substitution=aten::mm=FILE", "--substitution-atol=nan"], "expected a number from 0"),
    ],
)
def test_tolerances_are_numbers_about_substitutions(
    flags: list[str], said: str, capture: Path, kernels: Kernels, tool: Tool
) -> None:
    path = kernels(KERNELS)
    code, _out, err = tool("run", *(flag.replace("FILE", str(path)) for flag in flags), capture)
    assert code == 2 and said in err


def test_the_benchmark_takes_the_same_flags_and_says_the_same(capture: Path, kernels: Kernels, tool: Tool) -> None:
    path = kernels(KERNELS)
    code, out, err = tool("benchmark", f"--replay-kernel-substitution=aten::mmm={path}", capture)
    assert (code, out) == (2, "") and "matches no call of" in err


def test_an_operator_that_is_not_here_is_refused_although_something_stands_for_it(
    captured: Captured, kernels: Kernels, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original is what a replacement is judged by."""
    path = captured(program)
    monkeypatch.setattr("replayfmt.replay.resolution.kernel_lookup.find_overload", lambda *_names: None)
    code, _out, err = tool("run", f"--replay-kernel-substitution=aten::mm={kernels(KERNELS)}", path)
    assert code == 1 and "aten::mm.default does not exist in torch" in err
