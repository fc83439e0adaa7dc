"""Test vectors: whoever has the files and docs/vectors.md can test a kernel; what they cannot say is never left out
unsaid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from replay.rewriting import rewrite

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import CaptureFailed, OutputExists, ReplayMismatch, ReplayRefused, UsageError
from replayfmt.format.model import Kernel
from replayfmt.replay.plan import Plan
from replayfmt.trim import vectors
from replayfmt.trim.vectors import VectorsResult, file_name, write_vectors

from .conftest import Captured, Tool

ROOT = Path(__file__).parents[2]

LIBRARY = torch.library.Library("vectors_test", "DEF")
LIBRARY.define("fill(Tensor(a!) out, Tensor x) -> ()")
LIBRARY.define("sly(Tensor x, Tensor y) -> Tensor")


@torch.library.impl(LIBRARY, "fill", "CompositeExplicitAutograd")
def _fill(out: torch.Tensor, x: torch.Tensor) -> None:
    out.view(-1)[: x.numel()].copy_(x.view(-1) * 2)


@torch.library.impl(LIBRARY, "sly", "CompositeExplicitAutograd")
def _sly(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.copy_(x)  # without saying so
    return x + 1


def documented() -> dict[str, Any]:
    """What the document's blocks of Python define."""
    text = (ROOT / "docs/vectors.md").read_text(encoding="utf-8")
    defined: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), defined)
    return defined


def written(
    path: Path, out: Path, *, verify: Any = "auto", force: bool = False, partial: bool = False, **wanted: str
) -> VectorsResult:
    with Plan(path, keep_going=True) as plan:
        return write_vectors(plan, str(out), OpSelection(**wanted), verify=verify, force=force, partial=partial)


def cases(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Every vector of a directory, loaded as the document says, by operator."""
    load, found = documented()["load"], {}
    for entry in json.loads((out / "index.json").read_text())["vectors"]:
        found.setdefault(entry["op"], []).append(load(out / entry["name"]))
    return found


def kernel(case: dict[str, Any]) -> Any:
    namespace, name = case["op"].split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), case["overload"])


def program() -> None:
    weight = torch.randn(6, 4).t()
    norm = torch.nn.BatchNorm1d(4)
    x = torch.randn(3, 6)
    with torch.no_grad():
        y = norm(x @ weight.t())
        y.mul_(float("inf")).add_(torch.tensor(1.5), alpha=2)
        torch.cat([y, y.t().reshape(3, 4)], 1).to(torch.float16).sum().item()
        torch.full((2, 2), 2 + 3j, dtype=torch.complex64).conj().add(1 - 1j)
        torch.full((2,), float("nan")).expand(3, 2).clone(memory_format=torch.contiguous_format)
        torch.zeros(0, 3).sum(0, dtype=torch.float64)
        torch.arange(4).index_select(0, torch.tensor([2, 1]))
        torch.ones(3).to(torch.float8_e5m2fnuz).to(torch.float32)
        z = torch.ones(2)
        z.mul_(z)
        torch.split(torch.arange(6.0), 4)


def test_the_documents_loader_and_check_work_on_every_vector_of_the_operators_themselves(
    captured: Captured, tmp_path: Path
) -> None:
    path, out = captured(program), tmp_path / "vectors"
    with replayfmt.open(path) as capture:
        ops = len(capture.ops)
    result = written(path, out, partial=True)
    found, check = cases(out), documented()["check"]
    assert sum(map(len, found.values())) == result.ops and result.ops + len(result.left_out) == ops
    for group in found.values():
        for case in group:
            check(kernel(case), case)
    assert all("aten::empty" in sentence or "aten::randn" in sentence for sentence in result.left_out)
    assert "aten::native_batch_norm.default" in found and result.verified.startswith("bitwise")


def test_a_vector_says_what_the_program_gave_and_got(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(program, digests="ops"), tmp_path / "vectors"
    written(path, out, partial=True)
    found = cases(out)
    (mul, *_rest) = found["aten::mul_.Tensor"]
    assert mul["arguments"]["other"] == float("inf")
    assert torch.equal(mul["results"][0], mul["written"]["self"])
    assert torch.equal(mul["written"]["self"], mul["arguments"]["self"] * float("inf"))
    assert found["aten::mul_.Tensor"][1]["shared_memory"] == [["self", "other"]]
    (norm,) = found["aten::native_batch_norm.default"]
    assert set(norm["written"]) == {"running_mean", "running_var"}, "which the schema keeps quiet about"
    (full, *_) = (case for case in found["aten::full.default"] if case["arguments"]["fill_value"] == 2 + 3j)
    assert full["arguments"]["dtype"] is torch.complex64
    clone = found["aten::clone.default"][-1]
    assert clone["arguments"]["memory_format"] is torch.contiguous_format
    assert clone["arguments"]["self"].isnan().all() and clone["arguments"]["self"].shape == (3, 2)
    said = json.loads(max(out.glob("*clone*.json")).read_text())
    assert said["arguments"]["self"]["strides"] == [0, 1] and said["arguments"]["self"]["device"] == "cpu"
    assert said["nondeterministic"] is None


def test_memory_that_nothing_wrote_is_zeros_and_what_an_operator_writes_unsaid_is_said(
    captured: Captured, tmp_path: Path
) -> None:
    def custom() -> None:
        torch.add(torch.ones(2), 1, out=torch.empty(2))
        torch.ops.vectors_test.fill(torch.empty(8), torch.ones(3))
        torch.ops.vectors_test.sly(torch.ones(2), torch.zeros(2))

    path, out = captured(custom, whole=["vectors_test::*"]), tmp_path / "vectors"
    written(path, out, partial=True)
    found = cases(out)
    (add,) = found["aten::add.out"]
    assert add["arguments"]["out"].tolist() == [0.0] * 2 and add["written"]["out"].tolist() == [2.0] * 2
    (fill,) = found["vectors_test::fill.default"]  # what was in the memory given to it is in the capture
    assert fill["written"]["out"][:3].tolist() == [2.0] * 3 and fill["results"] == []
    assert fill["written"]["out"][3:].view(torch.int32).equal(fill["arguments"]["out"][3:].view(torch.int32))
    (sly,) = found["vectors_test::sly.default"]
    assert sly["written_without_saying_so"] == ["y"] and sly["written"]["y"].tolist() == [1.0, 1.0]
    documented()["check"](torch.ops.vectors_test.sly.default, sly)
    wrong = documented()["load"](next(out.glob("*sly*.json")).with_suffix(""))
    with pytest.raises(AssertionError):
        documented()["check"](lambda x, y: x + 1, wrong)  # does not write y


def test_what_a_vector_cannot_say_is_refused_and_listed_and_nothing_is_written(
    captured: Captured, tmp_path: Path
) -> None:
    def odd() -> None:
        torch.ones(2).add(1)
        torch.rand(2)
        torch.empty(2).fill_(1)
        torch.eye(2).to_sparse().sum()
        with pytest.raises(RuntimeError):
            torch.ones(2).mm(torch.ones(2))

    path, out = captured(odd), tmp_path / "vectors"
    with pytest.raises(ReplayRefused, match="of them cannot be written as test vectors; --partial") as refused:
        written(path, out)
    findings = "\n".join(refused.value.findings)
    for expected in (
        r"ordinal \d+ \(aten::rand.default\): it draws random numbers",
        r"\(aten::empty.memory_format\): a result holds bytes that no run reproduces",
        r"\(aten::_to_sparse.default\): a tensor is sparse_coo",
        r"\(aten::mm.default\): it raised",
    ):
        assert re.search(expected, findings), findings
    assert list(tmp_path.glob("vectors*")) == []
    result = written(path, out, partial=True)
    assert list(result.left_out) == list(refused.value.findings)
    assert json.loads((out / "index.json").read_text())["left_out"] == list(result.left_out)
    with pytest.raises(ReplayRefused, match="none of the selected ops can be written"):
        written(path, tmp_path / "other", partial=True, kernel="aten::rand")


def test_nothing_is_written_behind_work_that_was_not_captured(captured: Captured, tmp_path: Path) -> None:
    weight = torch.ones(2, 2)

    def unseen() -> None:
        weight.mm(weight)
        torch.ones(2, dtype=torch.uint64).fill_(2**63 + 1)
        weight.relu()

    path = captured(unseen)
    with pytest.raises(ReplayRefused, match="may have written any of them") as refused:
        written(path, tmp_path / "vectors", kernel="aten::relu")
    assert refused.value.findings[0].startswith("unsupported at ordinal ")
    assert written(path, tmp_path / "vectors", kernel="aten::mm").ops == 1


def test_nothing_is_written_where_the_replay_differs(captured: Captured, tmp_path: Path) -> None:
    weight = torch.randn(4)
    path = captured(lambda: weight.exp(), digests="ops")
    changed = rewrite(
        path,
        tmp_path / "changed.opreplay",
        payload=lambda _number, content: content[:2] + bytes([content[2] ^ 64]) + content[3:],
    )
    with pytest.raises(ReplayMismatch, match="nothing can be taken from it"):
        written(changed, tmp_path / "vectors")
    assert list(tmp_path.glob("vectors*")) == []


def test_a_directory_is_written_whole_or_not_at_all(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = captured(program), tmp_path / "vectors"
    write, count = vectors.write_safetensors, 0

    def full(name: Path, arrays: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device", str(name))
        write(name, arrays)

    monkeypatch.setattr(vectors, "write_safetensors", full)
    with pytest.raises(CaptureFailed, match="cannot be written: No space left on device"):
        written(path, out, partial=True)
    assert count == 3 and list(tmp_path.glob("vectors*")) == []


@pytest.mark.guarantee("file-names")
def test_only_an_earlier_directory_of_vectors_is_replaced(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(program), tmp_path / "vectors"
    written(path, out, kernel="aten::cat")
    with pytest.raises(OutputExists, match="--force"):
        written(path, out, kernel="aten::mm")
    written(path, out, kernel="aten::mm", force=True)
    assert set(cases(out)) == {"aten::mm.default"} and list(tmp_path.glob("vectors*")) == [out]
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not a folder of test vectors"):
        written(path, out, kernel="aten::mm", force=True)
    assert (out / "thesis.txt").exists() and (out / "index.json").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder; name"):
        written(path, tmp_path / "file", kernel="aten::mm", force=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert written(path, empty, kernel="aten::mm").ops == 1


def test_made_up_inputs_are_said_to_be(captured: Captured, tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    path, out = captured(lambda: weight.mm(weight), payload="none"), tmp_path / "vectors"
    result = written(path, out)
    assert result.verified.startswith("not verified")
    assert json.loads((out / "index.json").read_text())["made_up"]
    (case,) = cases(out)["aten::mm.default"]
    documented()["check"](
        torch.mm, {**case, "arguments": {"input": case["arguments"]["self"], "mat2": case["arguments"]["mat2"]}}
    )


@pytest.mark.guarantee("file-names")
@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b::c\n", "x" * 500, "aten::mm", "::", "é∀\u202e"])
def test_a_files_name_is_safe_whatever_a_kernel_is_called(name: str) -> None:
    made = file_name(7, 1000, Kernel(name, "de/fault", ""))
    assert re.fullmatch(r"007-[A-Za-z0-9_.-]{1,100}", made)


def test_the_tool_says_what_it_wrote_and_refuses_flags_that_do_not_fit(
    captured: Captured, tool: Tool, tmp_path: Path
) -> None:
    path, out = captured(program), tmp_path / "vectors"
    code, printed, error = tool(f"--vectors={out}", "--partial", path)
    assert code == 0, error
    assert re.search(r"^left out  ordinal \d+ \(aten::empty", printed, re.MULTILINE)
    assert re.search(rf"^{re.escape(str(out))}: test vectors of \d+ ops, [\d,]+ bytes$", printed, re.MULTILINE)
    other = tmp_path / "x.opreplay"
    for wrong in (
        (f"--vectors={out}", path, other),
        ("--partial", path, other),
        (f"--vectors={out}", "--payload=none", path),
        (f"--vectors={out}", "--script=x.py", path),
    ):
        assert tool(*wrong)[0] == 2
