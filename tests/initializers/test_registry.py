"""Which initializers there are, in which order, and files that register more of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from in_process import Tool, Tools

import replayfmt
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.initializers import Initializer, Registry, Request, Role, load_initializers, register, unregister
from replayfmt.initializers.registry import _registered
from replayfmt.replay.plan import Plan

UNKNOWN = """
import torch
from replayfmt.initializers import register

@register("aten::_convert_indices_from_coo_to_csr", argument="self", name="rows")
def rows_of_a_sparse_matrix(request):
    '''Sorted rows.

    More about them.'''
    return torch.tensor([0, 1, 3], dtype=request.tensor.dtype)
"""


@pytest.fixture(autouse=True)
def _registrations() -> Iterator[None]:
    before = list(_registered)
    yield
    _registered[:] = before


@pytest.fixture
def tool(tools: Tools) -> Tool:
    return partial(tools, "run")


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    rows, path = torch.tensor([0, 1, 2]), tmp_path / "capture.opreplay"
    with replayfmt.capture(path, payload="none"):
        torch._convert_indices_from_coo_to_csr(rows, 4)
    return path


def give(_request: object) -> torch.Tensor:
    return torch.zeros(1)


def test_given_ones_come_before_registered_ones_and_those_before_the_built_in() -> None:
    register("aten::first", name="b")(give)
    register("aten::second", name="c")(give)
    names = [each.name for each in Registry([Initializer("a", give)])]
    assert names[:3] == ["a", "b", "c"] and names.index("recipe") > 2 and names[-1] == "bytes"
    unregister("b")
    assert [each.name for each in Registry()][0] == "c"
    with pytest.raises(UsageError, match="no initializer called b"):
        unregister("b")


def test_registering_says_what_is_wrong() -> None:
    register("aten::mm", name="one")(give)
    for wrong, said in (
        ({"op": "aten::mm", "name": "one"}, "registered already"),
        ({"argument": "self", "name": "two"}, "needs op"),
        ({"joint": True, "name": "three"}, "needs op"),
        ({"op": "", "name": "four"}, "not a name or pattern"),
    ):
        with pytest.raises(UsageError, match=said):
            register(**wrong)(give)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Initializer objects"):
        Registry([give])  # type: ignore[list-item]


def test_operators_and_arguments_match_by_name_or_pattern() -> None:
    def matches(op: str, *arguments: str) -> bool:
        made = Initializer("x", give, op=op, arguments=arguments)
        return made.names("vllm::attention", "default", "block_table", "block_table")

    assert matches("vllm::attention") and matches("vllm::attention.default") and matches("*attention*")
    assert not matches("vllm::attention.other") and not matches("attention")
    assert matches("vllm::*", "block_table") and matches("vllm::*", "slots", "block_*") and not matches("*", "slots")
    in_list = Initializer("x", give, op="aten::index", arguments=("indices[1]",))
    assert in_list.names("aten::index", "Tensor", "indices", "indices[1]")
    assert not in_list.names("aten::index", "Tensor", "indices", "indices[0]")


def test_dtypes_and_roles_limit_an_initializer() -> None:
    made = Initializer("x", give, dtypes=frozenset({torch.int32}), roles=frozenset({Role.index}))
    assert made.matches_content(torch.int32, Role.index)
    assert not made.matches_content(torch.int64, Role.index) and not made.matches_content(torch.int32, None)


def test_a_file_fills_what_no_built_in_initializer_knows(capture: Path, tmp_path: Path, tool: Tool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(UNKNOWN)
    code, out, err = tool(str(capture))
    assert (code, out) == (1, "") and "--replay-initializer=FILE.py" in err
    code, out, err = tool(f"--replay-initializer={file}", str(capture))
    assert code == 0, err
    assert "rows: 1 x self of aten::_convert_indices_from_coo_to_csr" in out
    with Plan(capture, initializers=load_initializers(str(file))) as plan:
        assert [each.initializer for each in plan.synthesis.initialized] == ["rows"]
    with pytest.raises(ReplayRefused):
        Plan(capture)  # the file's initializers were for that command alone


def test_the_example_in_the_finding_works_as_it_stands(capture: Path, tmp_path: Path, tool: Tool) -> None:
    with pytest.raises(ReplayRefused) as caught:
        Plan(capture)
    (finding,) = caught.value.findings
    example = finding[finding.index("from replayfmt") : finding.index("; or capture")]
    statements = [part.strip() for part in example.split(";")]
    file = tmp_path / "example.py"
    file.write_text("import torch\n" + "\n".join(statements) + "\n")
    code, out, err = tool(f"--replay-initializer={file}", str(capture))
    assert code == 0, err
    assert "content: 1 x self of" in out


def test_initializers_are_listed_in_the_order_they_are_tried(tmp_path: Path, tool: Tool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(UNKNOWN)
    code, out, _err = tool(f"--replay-initializer={file}", "--list-initializers")
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == [
        "1",
        "rows",
        "aten::_convert_indices_from_coo_to_csr(self):",
        "Sorted",
        "rows",
        f"({file})",
    ]
    assert any("index" in line and "integers" in line and "role" in line for line in lines)
    assert len(lines) == len(list(Registry())) + 1
    assert tool()[0] == 2  # without either there is nothing to do


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("\n\nx = 1 / 0\n", "line 3: ZeroDivisionError"),
        ("import sys; sys.exit(0)\n", "SystemExit"),
        ("x = 1\n", "registers no initializer"),
        ("from replayfmt.initializers import register\nregister(argument='x')(print)\n", "needs op"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_error(
    capture: Path, tmp_path: Path, tool: Tool, text: str | None, said: str
) -> None:
    file = tmp_path / "wrong.py"
    if text is not None:
        file.write_text(text)
    code, out, err = tool(f"--replay-initializer={file}", str(capture))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"INVALID_ARGUMENT: --replay-initializer={file}: ") and said in err


def test_content_is_made_without_the_collector_looking_at_all_that_was_made_before(tmp_path: Path) -> None:
    """Of thousands of storages, it would look at each again and again."""
    path = tmp_path / "sum.opreplay"
    given = torch.ones(3)
    with replayfmt.capture(path, payload="none"):
        given + 1
    seen: list[bool] = []

    def fill(request: Request) -> torch.Tensor:
        seen.append(gc.isenabled())
        return torch.zeros(request.tensor.sizes)

    with Plan(path, initializers=[Initializer("x", fill, op="aten::add")]) as plan:
        plan.execute()
    assert seen and not any(seen) and gc.isenabled()
