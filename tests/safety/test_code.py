"""Code in captures: nothing of it is used without leave, and with leave nothing that is damaged or out of bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from format.reseal import change_tables
from in_process import Tools

import replayfmt
from replayfmt.errors import InvalidCapture, ReplayRefused, UsageError
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.replay.planning.kernels import OperatorKernel, ResolvedKernel
from replayfmt.replay.resolution import kernel_lookup

from .code_captures import CODE, write


class Negating:
    """A resolver for the tests: what every kernel is replayed with. `seen`: what it was given. `loaded`: the kernels of
    it that were."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Mapping[str, bytes], frozenset[str]]] = []
        self.loaded: list[str] = []

    def __call__(
        self, kernel: Kernel, contents: Callable[[], Mapping[str, bytes]], device_types: frozenset[str]
    ) -> ResolvedKernel | str:
        self.seen.append((kernel.qualified_name, contents(), device_types))
        loads = self.loaded

        class Negate(OperatorKernel):
            def loaded(self) -> ResolvedKernel | str:
                loads.append(kernel.qualified_name)
                return self

        return Negate(torch.ops.aten.neg_.default, True, False)


@pytest.fixture()
def resolver(monkeypatch: pytest.MonkeyPatch) -> Negating:
    negating = Negating()
    monkeypatch.setitem(kernel_lookup.RESOLVERS, KernelKind.native, negating)
    return negating


def refusal(path: Path, *, allow_code: bool = True) -> str:
    """Why a capture of one kernel is refused."""
    with pytest.raises(ReplayRefused, match="nothing was run") as caught:
        replayfmt.Plan(path, allow_code=allow_code)
    (finding,) = caught.value.findings
    return finding


@pytest.mark.guarantee("code-leave")
def test_code_is_refused_without_leave_and_every_kernel_is_listed_with_its_roles(
    tmp_path: Path, resolver: Negating
) -> None:
    path = write(tmp_path / "code.opreplay", kernels=3)
    with pytest.raises(ReplayRefused, match="for 3 reasons; nothing was run") as caught:
        replayfmt.Plan(path)
    assert list(caught.value.findings) == [
        f"native::negate{number}.v1 is a kernel of the kind native: its code is in the capture (source, metadata, "
        f"cubin), and runs only with --allow-code; called once, at ordinal {number + 1}"
        for number in range(3)
    ]
    assert resolver.seen == []


def test_with_leave_a_kernel_gets_its_attachments_and_runs(tmp_path: Path, resolver: Negating) -> None:
    path = write(tmp_path / "code.opreplay", [*CODE, ("from_the_future", b"?")])
    assert replayfmt.run(path, verify="none", allow_code=True).outcome == "ok"
    assert resolver.seen == [("native::negate0.v1", dict(CODE), frozenset({"cpu"}))]
    with replayfmt.open(path) as capture:
        assert capture.ops.by_ordinal[1].replay(allow_code=True).tolist() == [-1.0, 2.0]
        assert capture.ops.by_ordinal[1].results(replay=True, allow_code=True)[0].tolist() == [-1.0, 2.0]
        with pytest.raises(ReplayRefused, match="runs only with --allow-code"):
            capture.ops.by_ordinal[1].replay()


@pytest.mark.parametrize("allow_code", ["yes", None, 2])
def test_leave_is_true_or_false(tmp_path: Path, allow_code: object) -> None:
    path = write(tmp_path / "code.opreplay")
    with pytest.raises(UsageError, match="allow_code=.*expected True or False"):
        replayfmt.Plan(path, allow_code=allow_code)  # type: ignore[arg-type]


def test_a_kind_that_nothing_here_resolves_is_one_clear_finding(tmp_path: Path) -> None:
    path = write(tmp_path / "code.opreplay", kind=KernelKind.native)
    for allow_code in (False, True):
        assert "is a kernel of the kind native; this version does not replay them" in refusal(
            path, allow_code=allow_code
        )


def test_a_kernel_without_its_code_is_refused(tmp_path: Path, resolver: Negating) -> None:
    path = write(tmp_path / "code.opreplay", [])
    for allow_code in (False, True):
        assert "is a kernel of the kind native, and its code is not in the capture" in refusal(
            path, allow_code=allow_code
        )
    assert resolver.seen == []


@pytest.mark.guarantee("code-leave")
def test_a_damaged_attachment_is_refused_before_anything_of_the_kernel_is_used(
    tmp_path: Path, resolver: Negating
) -> None:
    path = write(tmp_path / "code.opreplay", [("source", b"harmless = True"), ("cubin", b"0123456789" * 9)])
    data = path.read_bytes()
    assert data.count(b"0123456789" * 9) == 1
    path.write_bytes(data.replace(b"0123456789" * 9, b"0123456789" * 8 + b"0123456780"))
    assert "with attachments that cannot be used" in refusal(path) and "payload" in refusal(path)
    assert resolver.seen == []


@pytest.mark.guarantee("code-order")
def test_nothing_is_loaded_while_any_of_the_code_is_refused(tmp_path: Path, resolver: Negating) -> None:
    """But with --keep-going, which asks for what can be run."""
    path = write(tmp_path / "code.opreplay", kernels=3, last=[("cubin", b"0123456789" * 9)])
    path.write_bytes(path.read_bytes().replace(b"0123456789" * 9, b"0123456789" * 8 + b"0123456780"))
    with pytest.raises(ReplayRefused, match="for 1 reason; nothing was run") as caught:
        replayfmt.Plan(path, allow_code=True)
    assert len(resolver.seen) == 2 and resolver.loaded == []
    (damaged,) = caught.value.findings
    assert damaged.startswith("native::negate2.v1") and "with attachments that cannot be used" in damaged
    with replayfmt.Plan(path, allow_code=True, keep_going=True):
        assert resolver.loaded == ["native::negate0.v1", "native::negate1.v1"]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (b"", "its metadata is not JSON"),
        (b"{", "its metadata is not JSON"),
        (b"\xff\xfe", "its metadata is not JSON"),
        (b"[" * 100_000, "its metadata is not"),
        (b"[]", "its metadata is not a JSON object"),
        (b"{}" + b" {}", "its metadata is not JSON"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested at most 64 deep"),
    ],
)
def test_metadata_that_is_no_flat_json_object_is_refused(
    tmp_path: Path, resolver: Negating, metadata: bytes, said: str
) -> None:
    path = write(tmp_path / "code.opreplay", [("source", b"pass"), ("metadata", metadata)])
    assert said in refusal(path)
    assert resolver.seen == []


def test_metadata_that_is_just_nested_deep_enough_is_given_to_the_kernel(tmp_path: Path, resolver: Negating) -> None:
    metadata = b'{"a":' * 64 + b"1" + b"}" * 64
    replayfmt.Plan(write(tmp_path / "code.opreplay", [("metadata", metadata)]), allow_code=True).close()
    assert [seen["metadata"] for _name, seen, _types in resolver.seen] == [metadata]


@pytest.mark.guarantee("code-leave")
@pytest.mark.parametrize("role", ["source", "metadata"])
def test_a_source_beyond_the_limit_is_refused_before_it_is_read(
    tmp_path: Path, resolver: Negating, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    path = write(tmp_path / "code.opreplay", [(role, b" " * ((16 << 20) + 1))])
    reader = replayfmt.open(path).reader
    monkeypatch.setattr(type(reader), "payload", lambda *_given: pytest.fail("read"))
    assert f"has a {role} of 16,777,217 bytes; the limit is 16,777,216" in refusal(path)
    assert resolver.seen == []


def test_two_attachments_of_one_known_role_are_refused(tmp_path: Path, resolver: Negating) -> None:
    path = write(tmp_path / "code.opreplay", [("source", b"a"), ("source", b"b")])
    assert "has 2 attachments of the role source, expected one" in refusal(path)
    assert resolver.seen == []


@pytest.mark.guarantee("code-leave")
def test_roles_that_are_not_known_are_given_to_nobody(tmp_path: Path, resolver: Negating) -> None:
    path = write(tmp_path / "code.opreplay", [("pickle", b"a"), ("pickle", b"b"), ("source", b"c")])
    replayfmt.Plan(path, allow_code=True).close()
    assert [seen for _name, seen, _types in resolver.seen] == [{"source": b"c"}]


@pytest.mark.guarantee("code-leave")
def test_metadata_that_names_a_module_imports_nothing(
    tmp_path: Path, resolver: Negating, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marking.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    metadata = json.dumps({"module": "marking", "import": "marking", "__import__": "marking", "target": "marking:f"})
    path = write(tmp_path / "code.opreplay", [("source", b"import marking"), ("metadata", metadata.encode())])
    assert "--allow-code" in refusal(path, allow_code=False)
    assert replayfmt.run(path, verify="none", allow_code=True).outcome == "ok"
    assert not (tmp_path / "imported").exists() and not (tmp_path / "ran").exists()


@pytest.mark.guarantee("code-leave")
@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("run", "--keep-going"),
        ("benchmark", "--benchmark-min-time=1x"),
        ("benchmark", "--per-op", "--benchmark-min-time=1x"),
        ("trim", "--ops=0:2"),
        ("trim", "--ops=0:2", "--vectors=vectors"),
        ("trim", "--ops=0:2", "--script=script.py", "--script-data=data.safetensors"),
    ],
    ids=" ".join,
)
def test_no_tool_runs_code_without_leave(
    tmp_path: Path, resolver: Negating, tools: Tools, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "code.opreplay")
    tool, *flags = arguments
    out = ["out.opreplay"] if arguments == ("trim", "--ops=0:2") else []
    ran = tools(tool, *flags, path, *out)
    assert ran.code == 1 and "--allow-code" in ran.out + ran.err
    assert resolver.seen == [] and not (tmp_path / "ran").exists()


def test_the_flag_lets_code_run(tmp_path: Path, resolver: Negating, tools: Tools) -> None:
    path = write(tmp_path / "code.opreplay", kernels=2)
    ran = tools("run", "--allow-code", "--verify=none", path)
    assert (ran.code, ran.err) == (0, "") and len(resolver.seen) == 2
    ran = tools("benchmark", "--allow-code", "--verify=none", "--benchmark-min-time=1x", path)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(("count", "fits"), [(1024, True), (1025, False), (1 << 20, False)])
def test_a_kernel_cannot_have_attachments_without_end(tmp_path: Path, count: int, fits: bool) -> None:
    path = write(tmp_path / "code.opreplay")

    def edit(tables: tuple) -> None:
        columns = tables[1]
        for name in ("attachment_role", "attachment_name", "attachment_payload"):
            columns[name] = np.repeat(columns[name][:1], count)
        columns["kernel_attachments"][0] = count
        columns["kernel_attachment"] = np.arange(1, count + 1, dtype=np.uint32)

    change_tables(path, edit)
    if fits:
        with replayfmt.open(path) as capture:
            assert len(capture.kernels[0].attachments) == count
        return
    with pytest.raises(InvalidCapture, match=f"a kernel has {count} attachments; the limit is 1024"):
        replayfmt.open(path)


def test_an_attachment_that_is_not_there_is_refused_when_the_capture_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "code.opreplay")

    def edit(tables: tuple) -> None:
        tables[1]["kernel_attachment"][0] = 4

    change_tables(path, edit)
    with pytest.raises(InvalidCapture, match=r"kernel_attachment holds 2\.\.4, allowed 1\.\.3"):
        replayfmt.open(path)
