"""Replays with substituted kernels: what runs, which calls it takes, how the result is verified and printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import replayfmt
from replayfmt.errors import SubstitutionRejected, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.replay.plan import Plan
from replayfmt.replay.substitution.loading import Substitution
from replayfmt.replay.substitution.table import KernelCall

from .conftest import Captured, Kernels, Tool


def program() -> None:
    x = torch.randn(4, 6)
    with replayfmt.scope("execute"):
        for _ in range(3):
            y = torch.mm(x, torch.randn(6, 4))
            x = x + y.sum() / 100
        torch.mm(x.t(), torch.ones(4, 2))
        x.sum(1).add_(1.0).sum().item()


class Counting:
    """A right kernel for aten::mm that counts its calls by sizes."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.__name__ = "counting"

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls.append(tuple(a.shape))
        return torch.matmul(a, b)


def test_the_run_calls_the_replacement_itself_after_the_check_once(captured: Captured) -> None:
    counting = Counting()
    with Plan(captured(program), substitutions=[Substitution("aten::mm", counting)]) as plan:
        plan.execute()
        checked = len(counting.calls) - 4
        assert checked == 4 + 2  # every call, and the first of each signature once more
        plan.execute()
        assert len(counting.calls) == checked + 8
        window = next(iter(plan.windows(checks=False)[0]))
        constants = window.function.__defaults__
        assert any(value is counting for value in constants)  # nothing stands between


def test_only_the_selected_calls_are_substituted(captured: Captured) -> None:
    path = captured(program)
    for selector, sizes in (
        ("aten::mm", {(4, 6), (6, 4)}),
        ("aten::mm.default(float32[4,6], *)", {(4, 6)}),
        ("aten::mm.default(float32[6,4]{*}, *)", {(6, 4)}),
    ):
        counting = Counting()
        with Plan(path, substitutions=[Substitution(selector, counting)]) as plan:
            assert plan.execute().outcome == "ok"
        assert set(counting.calls) == sizes


def test_two_signatures_of_one_kernel_can_have_two_replacements(captured: Captured) -> None:
    wide, tall = Counting(), Counting()
    with Plan(
        captured(program),
        substitutions=[
            Substitution("aten::mm.default(float32[4,6], *)", wide),
            Substitution("aten::mm.default(float32[6,4]{*}, *)", tall),
        ],
    ) as plan:
        assert plan.execute().outcome == "ok"
    assert set(wide.calls) == {(4, 6)} and set(tall.calls) == {(6, 4)}


def test_a_signature_with_numbers_takes_calls_with_those_numbers_alone(captured: Captured) -> None:
    def sums() -> None:
        x = torch.ones(2, 3)
        x.sum(0), x.sum(1), x.sum(0)

    seen: list[list[int]] = []

    def mine(x: Tensor, dim: list[int], keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        seen.append(list(dim))
        return torch.ops.aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)

    with Plan(captured(sums), substitutions=[Substitution("aten::sum.dim_IntList(*, [0])", mine)]) as plan:
        assert plan.execute().outcome == "ok"
    assert seen == [[0]] * (2 + 1 + 2)


def test_a_callback_decides_by_ordinal_device_kernel_and_signature(captured: Captured) -> None:
    path = captured(program)
    asked: list[KernelCall] = []
    counting = Counting()

    def decide(call: KernelCall) -> Callable[..., Any] | None:
        asked.append(call)
        return (
            counting
            if call.kernel == "aten::mm.default"
            and "float32[6,4]" in call.signature.split(",")[0] + call.signature
            and call.ordinal == last
            else None
        )

    with Plan(path) as plan:
        products = [op.ordinal for op in replayfmt.open(path).ops if op.kernel.qualified_name == "aten::mm.default"]
        ops = len(replayfmt.open(path).ops)
        assert plan.substitution is None
    last = products[-1]
    with Plan(path, substitutions=decide) as plan:
        assert plan.execute().outcome == "ok"
        assert plan.substitution is not None and plan.substitution.report is not None
        assert [check.first for check in plan.substitution.report.checks] == [last]
    assert [call.ordinal for call in asked] == sorted(call.ordinal for call in asked) and len(asked) == ops
    assert {str(call.device) for call in asked} == {"cpu"}
    assert counting.calls == [(6, 4)] * 3


def test_a_callback_that_gives_no_function_or_one_that_cannot_bind_is_wrong_use(captured: Captured) -> None:
    path = captured(program)
    with pytest.raises(UsageError, match="the callback returned a int for ordinal"):
        Plan(path, substitutions=lambda call: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="does not bind"):
        Plan(path, substitutions=lambda call: (lambda: None) if call.kernel == "aten::mm.default" else None)
    with pytest.raises(UsageError, match="expected a list of them"):
        Plan(path, substitutions="aten::mm=k.py")
    with pytest.raises(UsageError, match="int is not one; expected Substitution"):
        Plan(path, substitutions=[3])  # type: ignore[list-item]


def test_digests_are_compared_close_and_the_sentence_says_why(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    path = captured(program)
    file = kernels("def mm(self, mat2): return (self.double() @ mat2.double()).float()")
    code, out, err = tool("run", f"--replay-kernel-substitution=aten::mm={file}", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    at = lines.index("verified: close")
    assert lines[at + 1] == "  why: kernels are substituted: aten::mm.default by kernels.py:mm"
    assert "substituted: 4 calls of 2 signatures, each checked against the original kernel" in lines
    assert any(
        line.startswith("  aten::mm.default(float32[4,6], float32[6,4]) by kernels.py:mm: 3 calls, values ")
        for line in lines
    )


def test_bitwise_stays_bitwise_where_it_is_asked_for(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    path = captured(program)
    same = f"--replay-kernel-substitution=aten::mm={kernels('def mm(self, mat2): return torch.mm(self, mat2)')}"
    assert tool("run", "--verify=bitwise", same, path)[0] == 0
    other = kernels("def mm(self, mat2): return (self.double() @ mat2.double()).float()", "other.py")
    code, _out, err = tool("run", "--verify=bitwise", f"--replay-kernel-substitution=aten::mm={other}", path)
    assert code == 1 and "the replay differs from the capture" in err


def test_rows_for_programs_have_the_distances_by_signature(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    path = captured(program)
    file = kernels("def mm(self, mat2): return (self.double() @ mat2.double()).float()")
    code, out, _err = tool("run", "--format=jsonl", f"--replay-kernel-substitution=aten::mm={file}", path)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["kind"] for row in rows] == ["replay", "substitution", "substitution"]
    first = rows[1]
    assert first["signature"] == "aten::mm.default(float32[4,6], float32[6,4])"
    assert (first["calls"], first["elements"], first["ok"], first["faults"]) == (3, 48, True, [])
    assert 0 <= first["largest_absolute"] < 1e-3 and int(first["largest_ulp"]) >= 0
    assert rows[0]["verification"]["reasons"][0].startswith("kernels are substituted: ")


def test_a_wrong_kernel_exits_with_1_and_what_was_found_is_printed(
    captured: Captured, kernels: Kernels, tool: Tool
) -> None:
    path = captured(program)
    flag = f"--replay-kernel-substitution=aten::mm={kernels('def mm(self, mat2): return self @ mat2 + 0.1')}"
    code, out, err = tool("run", flag, path)
    assert (code, out) == (1, ""), "what was found is printed once"
    first, *findings = err.splitlines()
    assert first == (
        f"ABORTED: {path}: the replacements of 2 signatures do not do what the original kernels do; nothing was timed"
    )
    assert len(findings) == 2 and "kernels.py:mm in place of aten::mm.default(float32[4,6]" in findings[0]
    assert re.search(
        r"the worst at ordinal \d+, result 0: element \[\d, \d\] expected -?[\d.]+, got -?[\d.]+, where", findings[0]
    )
    code, out, _err = tool("run", "--format=jsonl", flag, path)
    assert code == 1 and [json.loads(line)["ok"] for line in out.splitlines()] == [False, False]
    worst = json.loads(out.splitlines()[0])["worst"]
    assert abs(float(worst["got"]) - float(worst["expected"]) - 0.1) < 1e-4 and len(worst["index"]) == 2
    assert tool("run", flag, "--substitution-atol=0.2", "--verify=none", path)[0] in (0, 1)
    code, _out, err = tool("benchmark", flag, "--benchmark-min-time=1x", path)
    assert code == 1 and "nothing was timed" in err and err.startswith("ABORTED: ")


def test_an_exception_in_a_file_names_its_line(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    path = captured(program)
    file = kernels("def mm(self, mat2):\n    return helper(self)\ndef helper(x):\n    raise ValueError('no such tile')")
    code, out, err = tool("run", f"--replay-kernel-substitution=aten::mm={file}", path)
    assert (code, out) == (1, "") and err.startswith(f"ABORTED: {path}: ordinal ")
    assert [line.strip() for line in err.splitlines()[1:] if "^" not in line] == [
        f'File "{file}", line 3, in mm',
        "return helper(self)",
        f'File "{file}", line 5, in helper',
        "raise ValueError('no such tile')",
        "ValueError: no such tile",
    ]
    assert f"scope execute): the replacement kernels.py:mm failed at {file}:5: ValueError: no such tile" in err


@pytest.mark.parametrize("after", [0, 6])
def test_a_replacement_cannot_end_the_process_as_if_all_were_well(
    captured: Captured, kernels: Kernels, tool: Tool, after: int
) -> None:
    file = kernels(
        f"calls = []\ndef mm(self, mat2):\n    calls.append(1)\n    if len(calls) > {after}:\n"
        "        raise SystemExit(0)\n    return torch.matmul(self, mat2)"
    )
    code, out, err = tool("run", f"--replay-kernel-substitution=aten::mm={file}", captured(program))
    assert (code, out) == (1, "") and f"kernels.py:mm failed at {file}:6: SystemExit: 0" in err


def test_all_takes_every_function_that_has_an_operators_name(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    path = captured(program)
    file = kernels(
        "def mm(self, mat2): return torch.matmul(self, mat2)\n"
        "def add_(self, other, *, alpha=1): return self.copy_(self + other)\n"
        "def unused(x): return x\nfrom torch import sum"
    )
    code, out, err = tool("run", "--format=jsonl", f"--replay-kernel-substitution=all={file}", path)
    assert (code, err) == (0, "")
    kinds = {row["kernel"] for row in map(json.loads, out.splitlines()) if row["kind"] == "substitution"}
    assert kinds == {"aten::mm.default", "aten::add_.Tensor"}


def test_an_id_selects_the_kernel_that_dump_shows(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    path = captured(program)
    _code, out, _err = tool("dump", "--signatures", "--kernel=aten::mm", "--jq", ".kernel", path)
    file = kernels("def mm(self, mat2): return torch.matmul(self, mat2)")
    code, out, _err = tool("run", f"--replay-kernel-substitution={out.splitlines()[0]}={file}", path)
    assert code == 0 and "substituted: 4 calls of 2 signatures" in out


LIBRARY_MODULE = """
library = torch.library.Library("{namespace}", "DEF")
library.define("mm(Tensor self, Tensor mat2) -> Tensor")
library.define("other(Tensor self, Tensor mat2, int more) -> Tensor")
library.impl("mm", lambda self, mat2: torch.matmul(self, mat2), "CPU")
"""


def test_a_module_that_registers_an_operator_is_a_torch_library(
    captured: Captured, kernels: Kernels, tool: Tool
) -> None:
    path = captured(program)
    file = kernels(LIBRARY_MODULE.format(namespace="opreplay_mine"))
    for given in (
        f"aten::mm={file}:opreplay_mine::mm",
        f"aten::mm@torch-library={file}",
        f"aten::mm@torch-library={file}:mm",
        f"aten::mm={file}:opreplay_mine::mm.default",
    ):
        code, out, err = tool("run", f"--replay-kernel-substitution={given}", path)
        assert (code, err) == (0, "") and "by kernels.py:opreplay_mine::mm" in out
    code, _out, err = tool("run", f"--replay-kernel-substitution=aten::mm={file}:opreplay_mine::other", path)
    assert code == 2 and "missing a required argument: 'more'" in err
    code, _out, err = tool("run", f"--replay-kernel-substitution=aten::mm={file}:opreplay_mine::mm.out", path)
    assert code == 2 and "has the overloads default; name one of them" in err


def test_a_replacement_of_a_custom_operator_runs_in_its_surroundings(captured: Captured) -> None:
    """Where the captured operator's own code may use tensor subclasses, its replacement may."""
    from torch.testing._internal.two_tensor import TwoTensor

    @torch.library.custom_op("opreplay_surroundings::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x + x

    def mine(x: Tensor) -> Tensor:
        pair = TwoTensor(x, x) * 1
        return pair.a + pair.b

    substitutions = [Substitution("opreplay_surroundings::twice", mine)]
    with Plan(captured(lambda: twice(torch.ones(2)).sum().item()), substitutions=substitutions) as plan:
        assert plan.execute(verify="auto").outcome == "ok"


def test_captured_settings_and_python_dispatch_apply_wherever_a_replacement_runs(captured: Captured) -> None:
    seen: list[tuple[bool, bool]] = []

    def mine(a: Tensor, b: Tensor) -> Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch._C._is_torch_function_enabled()))
        return torch.matmul(a, b)

    def calls() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        finally:
            torch.use_deterministic_algorithms(False)

    with Plan(captured(calls), substitutions=[Substitution("aten::mm", mine)], keep_going=True) as plan:
        assert plan.execute().outcome == "ok"
        plan.run_single(max(each.ordinal for each in plan.reader.records() if each.kind is RecordKind.op))
    assert seen == [(True, True)] * 4 and not torch.are_deterministic_algorithms_enabled()


def test_a_plan_that_keeps_going_rejects_a_wrong_kernel_as_well(captured: Captured) -> None:
    path = captured(program)
    right = Substitution("aten::mm", lambda a, b: torch.matmul(a, b))
    with Plan(path, substitutions=[right], keep_going=True) as plan:
        result = plan.execute(verify="auto", keep_going=True)
        assert result.outcome == "ok" and result.totals()["ok"] == result.ops

    def fails(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("no")

    for wrong, said in ((lambda a, b: a @ b + 1, "too far off"), (fails, "failed: ")):
        with Plan(path, substitutions=[Substitution("aten::mm", wrong)], keep_going=True) as plan:
            with pytest.raises(SubstitutionRejected) as raised:
                plan.execute(keep_going=True)
            assert said in raised.value.findings[0]


def test_a_very_long_capture_prepared_window_by_window_is_substituted_too(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.replay.plan._KEPT_RECORDS", 1)
    counting = Counting()
    with Plan(captured(program), substitutions=[Substitution("aten::mm", counting)]) as plan:
        for _ in range(2):
            assert plan.execute(verify="auto").outcome == "ok"
    assert len(counting.calls) == 6 + 2 * (4 + 6)  # both signatures are called once more when they are checked


def test_a_file_is_loaded_once_and_again_when_it_changed(captured: Captured, kernels: Kernels, tmp_path: Path) -> None:
    path = captured(program)
    log = tmp_path / "log"
    code = f"open({str(log)!r}, 'a').write('loaded ')\ndef mm(self, mat2): return torch.matmul(self, mat2)"
    file = kernels(code)
    for _ in range(2):
        with Plan(
            path,
            substitutions=[
                f"aten::mm.default(float32[4,6], *)={file}",
                f"aten::mm.default(float32[6,4]{{*}}, *)={file}",
            ],
        ) as plan:
            plan.execute()
    assert log.read_text() == "loaded "
    kernels(code + "\n# changed")
    with Plan(path, substitutions=[f"aten::mm={file}"]) as plan:
        plan.execute()
    assert log.read_text() == "loaded loaded "
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_can_import_what_lies_beside_it(captured: Captured, kernels: Kernels) -> None:
    kernels("def product(a, b): return torch.matmul(a, b)", "opreplay_beside.py")
    file = kernels("import opreplay_beside\ndef mm(self, mat2): return opreplay_beside.product(self, mat2)")
    with Plan(captured(program), substitutions=[f"aten::mm={file}"]) as plan:
        assert plan.execute().outcome == "ok"


@pytest.mark.slow
def test_a_compiled_function_can_be_a_replacement(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    """torch.compile makes fake tensors, which a replay's own surroundings have no room for."""
    file = kernels(
        '@torch.compile(backend="eager")\ndef mm(self, mat2): return self.double().matmul(mat2.double()).float()'
    )
    path = captured(program)
    code, out, err = tool("run", f"--replay-kernel-substitution=aten::mm={file}", path)
    assert (code, err) == (0, "") and "each checked against the original kernel" in out
    flag = f"--replay-kernel-substitution=aten::mm={file}"
    code, out, _err = tool("benchmark", "--per-op", "--kernel=aten::mm", "--benchmark-min-time=1x", flag, path)
    assert code == 0 and "attempted 2 = 2 successful + 0 failed" in out


def test_a_capture_without_content_can_be_substituted_too(captured: Captured) -> None:
    weight = torch.randn(6, 4)
    path = captured(lambda: torch.mm(torch.ones(4, 6), weight), payload="none", digests="none")
    with Plan(path, substitutions=[Substitution("aten::mm", lambda a, b: torch.matmul(a, b))]) as plan:
        assert plan.execute(verify="auto").outcome == "ok"
    with (
        Plan(path, substitutions=[Substitution("aten::mm", lambda a, b: torch.matmul(a, b) * 1.1)]) as plan,
        pytest.raises(SubstitutionRejected),
    ):
        plan.execute(verify="auto")
