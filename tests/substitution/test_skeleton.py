"""--kernel-skeleton: the file runs, passes the check as it is, and nothing of a hostile capture becomes code."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from keyword import iskeyword
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import replayfmt
from replayfmt.dump.kernel_skeleton import OperatorSkeleton, kernel_skeleton
from replayfmt.errors import UsageError
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan
from replayfmt.replay.substitution.loading import check_binding, replacement_of

from .conftest import Captured, Tool


def program() -> None:
    x = torch.randn(4, 6)
    layer = torch.nn.Conv2d(1, 2, 3)
    with torch.no_grad():
        layer(torch.randn(1, 1, 5, 5)).relu_().sum().item()
        torch.mm(x, x.t()).add_(1.0, alpha=2)
        torch.max(x, 1)
        torch.split(x, 2)
        torch.cat([x, x], 1)
        x.to(torch.float64).clone(memory_format=torch.contiguous_format)
        torch.nn.functional.gelu(x, approximate="tanh")
        torch._foreach_add_([x, torch.ones(2)], 1.0)
        x[:, torch.tensor([0, 1])] = 0.0
        torch.nn.functional.dropout(x, 0.5)
        torch.mul(x, 2.0, out=torch.empty(4, 6))
        torch.arange(2, 9, 3)
        torch.sort(x, stable=True)
        x.random_(2, 5)


@pytest.mark.slow
def test_the_skeleton_of_every_kernel_of_a_capture_passes_the_check_unchanged(
    captured: Captured, tmp_path: Path
) -> None:
    path = captured(program)
    requests = []
    with open_capture(path) as reader:
        called = reader.summary.kernel_calls
        for number in range(1, len(reader.kernels)):
            file = tmp_path / f"kernel{number}.py"
            text = kernel_skeleton(reader, number)
            file.write_text(text)
            tree = ast.parse(text)
            function = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)][-1]
            requests.append(f"{number}={file}:{function}")
        calls = sum(called.values())
    assert len(requests) > 20
    with Plan(path, substitutions=requests) as plan:
        result = plan.execute(verify="bitwise")
        assert result.outcome == "ok"
        assert plan.substitution is not None and plan.substitution.report is not None
        assert sum(check.calls for check in plan.substitution.report.checks) == calls
        assert all(check.distance.different == 0 for check in plan.substitution.report.checks)


@pytest.mark.slow
def test_the_tool_prints_it_and_needs_no_torch(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path = captured(program)
    with open_capture(path) as reader:
        number = next(i for i, kernel in enumerate(reader.kernels) if kernel and kernel.name == "aten::add_")
        text = kernel_skeleton(reader, number)
    code, out, err = tool("dump", f"--kernel-skeleton={number}", path)
    assert (code, out, err) == (0, text, "")
    run = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['opreplay-dump', sys.argv[1], sys.argv[2]]; "
        "from opreplay_tools.dump import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, f"--kernel-skeleton={number}", str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout == text


FILLED = {
    "aten::mm": "torch.mm(self, mat2)",
    "aten::add_.Tensor": "self.add_(other, alpha=alpha)",
    "aten::clamp": "torch.clamp(self, min, max)",
    "aten::split": "torch.split(self, split_size, dim)",
    "aten::index_put_": "self.index_put_(indices, values, accumulate)",
    "aten::max.dim": "torch.max(self, dim, keepdim)",
    "aten::_foreach_mul": "torch._foreach_mul(self, scalar)",
}


def filled(text: str, body: str) -> str:
    """A skeleton with another last line."""
    lines = text.rstrip().split("\n")
    assert lines[-1].startswith("    return original(")
    return "\n".join([*lines[:-1], f"    return {body}"]) + "\n"


def test_a_skeleton_by_name_with_its_line_filled_in_stands_for_the_operator(
    captured: Captured, tool: Tool, tmp_path: Path
) -> None:
    def calls() -> None:
        x = torch.randn(4, 6)
        torch.mm(x, x.t()).add_(1.0, alpha=2)
        x.clamp(min=0.1)
        x.split(2)
        x[torch.tensor([0, 1])] = torch.zeros(6)
        x.max(1)
        torch._foreach_mul([x, torch.ones(2)], 2.0)

    path = captured(calls)
    flags = []
    for number, (name, body) in enumerate(FILLED.items()):
        code, text, err = tool("dump", f"--kernel-skeleton={name}", path)
        assert (code, err) == (0, ""), name
        file = tmp_path / f"filled{number}.py"
        file.write_text(filled(text, body))
        flags.append(f"--replay-kernel-substitution={name}={file}")
    code, out, err = tool("run", *flags, path)
    assert (code, err) == (0, "") and f"substituted: {len(FILLED)} calls of {len(FILLED)} signatures, each" in out


def test_a_name_of_several_overloads_is_asked_about(captured: Captured, tool: Tool) -> None:
    def calls() -> None:
        x = torch.ones(2, 2)
        torch.mm(x, x, out=torch.empty(2, 2))
        torch.mm(x, x)

    path = captured(calls)
    code, out, err = tool("dump", "--kernel-skeleton=aten::mm", path)
    assert (code, out) == (2, "") and "calls 2 overloads of it; name one of aten::mm.default, aten::mm.out" in err
    code, out, _err = tool("dump", "--kernel-skeleton=aten::mm.out", path)
    assert code == 0 and "A replacement for aten::mm.out, " in out and "def mm(" in out


LIBRARY = """import torch

with_ = torch.library.Library("skeleton_late", "DEF")
with_.define("half(Tensor x, float by=2.0) -> Tensor")
with_.impl("half", lambda x, by=2.0: x / by, "CPU")
"""


@pytest.mark.slow
def test_the_skeleton_of_a_librarys_operator_loads_before_the_library_does(tmp_path: Path) -> None:
    """In processes of their own: what is registered once stays registered."""
    (tmp_path / "late_library.py").write_text(LIBRARY)
    (tmp_path / "program.py").write_text(
        "import late_library, torch, replayfmt\nwith replayfmt.capture('c.opreplay'):\n"
        "    torch.ops.skeleton_late.half(torch.randn(3))\n"
    )
    command = "import sys; sys.argv = ['opreplay-run', *sys.argv[1:]]; from opreplay_tools.run import main; main()"

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )

    assert python("program.py").returncode == 0
    with open_capture(tmp_path / "c.opreplay") as reader:
        text = kernel_skeleton(reader, "skeleton_late::half")
    assert "opreplay-run --allow-import=MODULE --replay-kernel-substitution=skeleton_late::half" in text
    (tmp_path / "mine.py").write_text(text)
    flag = "--replay-kernel-substitution=skeleton_late::half=mine.py"
    refused = python("-c", command, flag, "c.opreplay")
    assert refused.returncode == 1 and refused.stderr.startswith("FAILED_PRECONDITION: ")
    assert "--allow-import=MODULE" in refused.stderr
    done = python(
        "-c", command, "--op-library=skeleton_late=late_library", "--allow-import=skeleton_late", flag, "c.opreplay"
    )
    assert done.returncode == 0 and "each checked against the original kernel" in done.stdout, done.stderr


def test_it_says_what_has_to_be_written_and_returned_and_what_is_called(captured: Captured) -> None:
    path = captured(program)
    with open_capture(path) as reader:
        texts = {
            kernel.qualified_name: kernel_skeleton(reader, number)
            for number, kernel in enumerate(reader.kernels)
            if kernel
        }
    add = texts["aten::add_.Tensor"]
    assert "def add_(\n    self: Tensor,\n    other: Tensor,\n    *,\n    alpha: bool | int | float" in add
    assert '"""aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)' in add
    assert "It must write self, and no other argument." in add and "It returns self itself." in add
    assert "aten::add_.Tensor(float32[4,4], float, alpha: int)" in add and "The capture calls it once" in add
    assert "return original(self, other, alpha=alpha)" in add
    assert "It must not write its arguments." in texts["aten::mm.default"]
    assert "It returns Tensor on the memory of self, where the original's is." in texts["aten::t.default"]
    assert ") -> tuple[Tensor, Tensor]:" in texts["aten::max.dim"]
    assert "Result 1 is Tensor, in memory of its own." in texts["aten::max.dim"]
    assert ") -> list[Tensor]:" in texts["aten::split.Tensor"]
    nothing = texts["aten::_foreach_add_.Scalar"]
    assert ") -> None:" in nothing and "It returns nothing." in nothing
    assert 'getattr(torch.ops.aten.random_, "from")' in texts["aten::random_.from"]
    assert "    from_: int," in texts["aten::random_.from"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("0", "has the kernels 1 to"),
        ("-1", "has the kernels 1 to"),
        ("999", "has the kernels 1 to"),
        ("x", "calls no operator of that name; opreplay-dump --signatures"),
        ("", "calls no operator of that name"),
        ("aten::one", "did you mean aten::ones"),
        ("aten::ones.out", "did you mean aten::ones"),
    ],
)
def test_a_kernel_that_is_not_there_is_wrong_use(captured: Captured, tool: Tool, number: str, said: str) -> None:
    code, out, err = tool("dump", f"--kernel-skeleton={number}", captured(lambda: torch.ones(2)))
    assert (code, out) == (2, "") and said in err


@pytest.mark.parametrize("flags", [["--summary"], ["--signatures"], ["--ops=1:2"], ["--format=jsonl"], ["--jq=."]])
def test_it_goes_with_no_other_flag(captured: Captured, tool: Tool, flags: list[str]) -> None:
    code, out, err = tool("dump", "--kernel-skeleton=1", *flags, captured(lambda: torch.ones(2)))
    assert (code, out) == (2, "") and "goes with no other flag" in err


class FakeReader:
    """As much of a reader as a skeleton needs."""

    path = 'x""".opreplay'

    def __init__(self, kernel: Kernel) -> None:
        self.kernels = (None, kernel)
        self.signatures = (None,)
        self.record_frames: list[Any] = []
        self.record_count = 0


def skeleton(kernel: Kernel) -> str:
    reader: Any = FakeReader(kernel)
    return kernel_skeleton(reader, 1)


HOSTILE = [
    Kernel("aten::mm", "default", 'aten::mm(Tensor self, str x="\\"\\"\\"; import os; os.abort()") -> Tensor'),
    Kernel("aten::mm", "default", "aten::mm(Tensor self, str x='''\"\"\"\nimport os''') -> Tensor"),
    Kernel("aten::mm", "default", "aten::mm(Tensor self, int x=__import__('os').abort()) -> Tensor"),
    Kernel("aten::mm", "default", "aten::mm(Tensor self, int x=1 if 1 else 2) -> Tensor"),
    Kernel("aten::mm", "default", "aten::mm(Tensor self, Tensor[__import__('os')] x) -> Tensor"),
    Kernel("aten::mm", "default", "aten::mm(Tensor self=None): import os; def f() -> Tensor"),
    Kernel("aten::mm", "default", "aten::mm(Tensor original, Tensor torch, Tensor Tensor) -> Tensor"),
    Kernel("aten::mm\nimport os", "default", "aten::mm\nimport os(Tensor self) -> Tensor"),
    Kernel('aten::mm"""', "default", "aten::mm(Tensor self) -> Tensor"),
    Kernel("aten::original", "default", "aten::original(Tensor self) -> Tensor"),
    Kernel("aten::class", "default", "aten::class(Tensor self) -> Tensor"),
    Kernel("aten::torch", "import", "aten::torch.import(Tensor self) -> Tensor"),
    Kernel("aten::mm", "default", "aten::mm(Tensor class=None) -> Tensor"),
    Kernel("aten::mm", "default", 'aten::mm(Tensor self, Device d="cpu\\"); import os #") -> Tensor'),
]


@pytest.mark.parametrize("kernel", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_capture_says_never_becomes_code(kernel: Kernel) -> None:
    try:
        text = skeleton(kernel)
    except UsageError as error:
        assert "no skeleton can be written" in str(error)
        return
    _harmless(text)


def _harmless(text: str) -> None:
    """Imports, a function that looks into the registry and calls one name, and one that calls that, with arguments
    that are names: nothing else is code."""
    tree = ast.parse(text)
    docstring, *body = tree.body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
    future, imported, tensor, original, function = body
    assert ast.unparse(future) == "from __future__ import annotations"
    assert (ast.unparse(imported), ast.unparse(tensor)) == ("import torch", "from torch import Tensor")
    assert isinstance(original, ast.FunctionDef) and isinstance(function, ast.FunctionDef)
    assert ast.unparse(original.args) == "*args: object, **kwargs: object"
    _said, registered, called = original.body
    asked = registered.value if isinstance(registered, ast.Expr) else None
    assert isinstance(asked, ast.Call) and ast.unparse(asked.func) == "torch._C._dispatch_find_schema_or_throw"
    assert all(isinstance(each, ast.Constant) for each in asked.args)
    assert isinstance(called, ast.Return) and isinstance(called.value, ast.Call)
    assert ast.unparse(called.value).endswith("(*args, **kwargs)")
    for node in ast.walk(called.value.func):
        assert isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Load)
        assert not isinstance(node, ast.Call) or ast.unparse(node.func) == "getattr"
    for default in [*function.args.defaults, *filter(None, function.args.kw_defaults)]:
        if not isinstance(default, ast.Attribute | ast.Call):
            ast.literal_eval(default)
        elif isinstance(default, ast.Attribute):
            assert ast.unparse(default).startswith("torch.") and "(" not in ast.unparse(default)
        else:
            assert ast.unparse(default) in ("float('inf')", "float('-inf')", "float('nan')")
    text_of_function, returned = function.body
    assert isinstance(text_of_function, ast.Expr) and isinstance(text_of_function.value, ast.Constant)
    assert isinstance(returned, ast.Return) and isinstance(returned.value, ast.Call)
    target = original.name
    assert ast.unparse(returned.value.func) == target
    names = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
    assert target not in names | {function.name}
    if function.args.kwarg is not None:
        names.add(function.args.kwarg.arg)
    passed = set()
    for value in (*returned.value.args, *(keyword.value for keyword in returned.value.keywords)):
        if isinstance(value, ast.Call):  # words.pop("from", from_)
            assert function.args.kwarg is not None and ast.unparse(value.func) == f"{function.args.kwarg.arg}.pop"
            word, value = value.args
            assert isinstance(word, ast.Constant) and iskeyword(word.value)
        passed.add(ast.unparse(value))
    assert passed == names


@pytest.mark.slow
@settings(max_examples=300)
@example("", "...")
@example("", "1e999")
@given(st.text(alphabet="Tensorintstr[]?()!*=,.\"'\\ \n{}:aN0;->_", max_size=60), st.text(max_size=12))
def test_any_schema_at_all_makes_harmless_text_or_an_error(arguments: str, default: str) -> None:
    for schema in (f"aten::mm({arguments}) -> Tensor", f"aten::mm(Tensor x, str y={default!r}, int z={default}) -> ()"):
        try:
            text = skeleton(Kernel("aten::mm", "default", schema))
        except UsageError:
            continue
        _harmless(text)


def test_names_of_a_capture_file_stay_in_their_docstring() -> None:
    text = skeleton(Kernel("aten::mm", "default", "aten::mm(Tensor self) -> Tensor"))
    assert 'x\\"\\"\\".opreplay' in text
    _harmless(text)


def test_kernels_of_other_kinds_or_without_their_source_have_no_skeleton() -> None:
    with pytest.raises(UsageError, match="is a collective kernel, of which no skeleton can be written"):
        skeleton(Kernel("c10d::add", "default", "", KernelKind.collective))
    for kind in (KernelKind.triton, KernelKind.inductor_cpp):
        reader: Any = FakeReader(Kernel("triton::add", "v1", "triton::add.v1(Tensor x) -> ()", kind))
        with pytest.raises(UsageError, match="the capture has no source of it"):
            kernel_skeleton(reader, 1, allow_code=True)
        with pytest.raises(UsageError, match="it is code, whose language stays; leave out --language=cpp"):
            kernel_skeleton(reader, 1, "cpp", allow_code=True)


def test_a_schema_of_another_operator_is_not_believed() -> None:
    with pytest.raises(UsageError, match="it is the schema of aten::neg.default"):
        skeleton(Kernel("aten::zeros_like", "default", "aten::neg(Tensor self) -> Tensor"))


@pytest.mark.slow
def test_almost_every_operator_of_pytorch_has_a_skeleton_that_binds() -> None:
    """All overloads of two namespaces: the text compiles, and takes what the operator takes, with its defaults."""
    made = refused = 0
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace not in ("aten", "quantized") or (namespace == "aten" and hash_of(rest) % 6):
            continue
        base, _, overload = rest.partition(".")
        try:
            found = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except AttributeError:
            continue
        kernel = Kernel(f"{namespace}::{base}", overload or "default", str(found._schema))
        reader: Any = FakeReader(kernel)
        try:
            text = OperatorSkeleton(reader, 1, kernel, parse_operator_schema(kernel.schema)).text()
        except ValueError:
            refused += 1
            continue
        scope: dict[str, Any] = {}
        exec(compile(text, "skeleton", "exec"), scope)
        function = [value for value in scope.values() if getattr(value, "__code__", None)][-1]
        check_binding(replacement_of(function, "skeleton").signature, found._schema, name)
        made += 1
    assert made > 400 and not refused


def hash_of(text: str) -> int:
    """A sum that is the same in every process, to choose a part of the operators by."""
    return sum(text.encode())


@pytest.mark.slow
def test_the_schema_reader_agrees_with_pytorchs_own() -> None:
    for schema in torch._C._jit_get_all_schemas():
        text = str(schema)
        names = [argument.name for argument in schema.arguments]
        if "..." in text or len(set(names)) < len(names):
            with pytest.raises(ValueError):
                parse_operator_schema(text)
            continue
        mine = parse_operator_schema(text)
        assert (mine.name, mine.overload) == (schema.name, schema.overload_name)
        assert [(a.name, a.keyword_only, a.type.written, a.default is not None) for a in mine.arguments] == [
            (a.name, a.kwarg_only, bool(a.alias_info and a.alias_info.is_write), a.has_default_value())
            for a in schema.arguments
        ]
        assert len(mine.returns) == len(schema.returns)


# ------------------------------------------------------------------------------------------------------ --signatures


def test_signatures_are_printed_with_their_calls_for_people_and_programs(captured: Captured, tool: Tool) -> None:
    def calls() -> None:
        for size in (2, 3, 2):
            torch.ones(size).neg()

    path = captured(calls)
    code, out, err = tool("dump", "--signatures", path)
    assert (code, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["calls", "first", "at", "kernel", "signature"]
    assert [line.split(None, 3)[0::3] for line in lines if "neg" in line] == [
        ["2", "aten::neg.default(float32[2])"],
        ["1", "aten::neg.default(float32[3])"],
    ]
    _code, out, _err = tool("dump", "--signatures", "--kernel=aten::neg", "--jq", "[.kind, .calls, .signature]", path)
    assert out.splitlines() == [
        '["signature",2,"aten::neg.default(float32[2])"]',
        '["signature",1,"aten::neg.default(float32[3])"]',
    ]
    _code, whole, _err = tool("dump", "--signatures", "--format=jsonl", path)
    with open_capture(path) as reader:
        assert sum(row["calls"] for row in map(_row, whole.splitlines())) == sum(reader.summary.kernel_calls.values())
        last = max(row["first"] for row in map(_row, whole.splitlines()))
    _code, out, _err = tool("dump", "--signatures", "--format=jsonl", f"--ops={last}:", path)
    assert _row(out.splitlines()[0])["first"] >= last


def _row(line: str) -> Any:
    return json.loads(line)


@pytest.mark.parametrize("flags", [["--summary"], ["--scope=execute"]])
def test_signatures_go_without_a_scope_and_without_the_summary(
    captured: Captured, tool: Tool, flags: list[str]
) -> None:
    def scoped() -> None:
        with replayfmt.scope("execute"):
            torch.ones(2)

    code, out, err = tool("dump", "--signatures", *flags, captured(scoped))
    assert (code, out) == (2, "") and "INVALID_ARGUMENT" in err
