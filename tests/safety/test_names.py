"""Names and texts of a capture: none becomes code, none causes an import, none reaches another attribute."""

from __future__ import annotations

import builtins
import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failure.table import recorded
from format.reseal import rename_kernel
from in_process import Tools
from replay.rewriting import rewrite

from replayfmt.errors import OpReplayError, ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.model import Node, Signature
from replayfmt.replay.plan import Plan

MARK = "opreplay_hostile_marker"


@dataclass
class Seen:
    """What was compiled and imported while it watched."""

    sources: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def clean(self) -> None:
        """Nothing of the file was among it."""
        assert not [source for source in self.sources if MARK in source]
        assert not [name for name in self.modules if MARK in name]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Watches everything that is compiled, executed, evaluated or imported."""
    seen = Seen()

    def watch(name: str, keep: Callable[..., Any]) -> None:
        original = getattr(builtins, name)

        def watching(first: Any, *args: Any, **kwargs: Any) -> Any:
            keep(first)
            if name in ("exec", "eval") and not args and not kwargs:
                frame = sys._getframe(1)
                args = (frame.f_globals, frame.f_locals)
            return original(first, *args, **kwargs)

        monkeypatch.setattr(builtins, name, watching)

    for name in ("compile", "exec", "eval"):
        watch(name, lambda source: seen.sources.append(source if isinstance(source, str) else ""))
    watch("__import__", lambda name: seen.modules.append(name))
    original = importlib.import_module

    def importing(name: str, package: str | None = None) -> Any:
        seen.modules.append(name)
        return original(name, package)

    monkeypatch.setattr(importlib, "import_module", importing)
    yield seen


TEXTS = [
    f"{MARK}",
    f"'; import os; os._exit(7) #{MARK}",
    f'"""\n{MARK}()\n"""',
    f"%s%d{{}}{MARK}",
    f"\\'{MARK}\x00\x1b[31m",
    f"{MARK}\n    import {MARK}\n",
    f"__import__('{MARK}')",
    f"{MARK}‮\ud7ff",
]


@pytest.mark.guarantee("generated-code")
@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_no_text_of_a_capture_gets_into_generated_code(tmp_path: Path, seen: Seen, text: str) -> None:
    """Strings that operators take, scopes' names and the values around them are passed as objects, never as source."""
    x = torch.ones(4)
    source = recorded(tmp_path, lambda: torch.div(x, 2, rounding_mode="trunc").add_(1))

    def change(signature: Signature) -> Signature:
        args = tuple(
            replace(node, constant=text)
            if node.kind is ValueKind.string and node.constant in ("trunc", "execute", "first_use")
            else node
            for node in signature.args
        )
        return replace(signature, args=args)

    path = rewrite(source, tmp_path / "hostile.opreplay", signature=change)
    with Plan(path, keep_going=True) as plan:
        for verify in ("auto", "none"):
            result = plan.execute(verify=verify, keep_going=True)  # type: ignore[arg-type]
            assert result.verdicts is not None
            (failed,) = [each for each in result.verdicts if each.verdict == "failed"]
            assert failed.op == "aten::div.Tensor_mode" and "rounding_mode" in failed.reason
    with Plan(path) as plan, pytest.raises(OpReplayError):
        plan.execute(on_scope=lambda event, name, path, ordinal: None)
    assert any("def " in source for source in seen.sources), "a replay compiles its own code"
    seen.clean()


@pytest.mark.guarantee("generated-code")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["self=1, {}", "self); {}(", "{}", "*self", "self\n", "self ", "ſelf", "", "__class__", "lambda", "out"]
)
def test_no_name_of_an_argument_gets_into_generated_code(tmp_path: Path, seen: Seen, name: str) -> None:
    source = recorded(tmp_path, lambda: torch.ones(3).exp())

    def change(signature: Signature) -> Signature:
        if signature.kind is not RecordKind.op or len(signature.args) != 1:
            return signature
        return replace(signature, args=(replace(signature.args[0], name=name.format(MARK)),))

    path = rewrite(source, tmp_path / "hostile.opreplay", signature=change)
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    assert "does not take the arguments" in refused.value.findings[0]
    with Plan(path, keep_going=True) as plan:
        plan.execute(keep_going=True)
    seen.clean()


SETTINGS: list[tuple[str, Any]] = [
    ("default_dtype", MARK),
    ("default_dtype", "nn"),
    ("default_dtype", "__class__"),
    ("default_dtype", "int64"),
    ("autocast.cpu", MARK),
    ("__class__", 1),
    ("num_threads", -1),
    ("num_threads", 10**9),
    ("num_threads", "1"),
    ("quantized_engine", "nonsense"),
    ("float32_matmul_precision", f"{MARK}"),
    ("sdp_priority_order", f"{MARK}"),
    (f"{MARK}", True),
    ("num_threads", 2**63 - 1),
    ("sdp_priority_order", "99999999999999999999"),
]


@pytest.mark.guarantee("settings")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=range(len(SETTINGS)))
def test_settings_take_known_names_and_values_and_are_put_back(
    tmp_path: Path, seen: Seen, name: str, value: Any
) -> None:
    from replayfmt.pytorch.environment import read_settings

    source = recorded(tmp_path, lambda: torch.ones(3).exp())
    with Plan(source) as plan:
        before_settings = dict(plan.reader.session.settings)
    path = rewrite(source, tmp_path / "hostile.opreplay", session={"settings": {**before_settings, name: value}})
    before = read_settings()
    with pytest.raises(OpReplayError) as caught, Plan(path) as plan:
        plan.execute()
    assert "setting" in " ".join((str(caught.value), *getattr(caught.value, "findings", ())))
    assert read_settings() == before
    seen.clean()


VALUES: list[Any] = [True, 0, -1, 2**63 - 1, float("nan"), "1", "tf32", "-1,9", "\0", "x" * 10_000, None]


def test_no_value_of_any_setting_is_more_than_one_error() -> None:
    from replayfmt.pytorch.environment import SETTINGS, apply_settings, preserved_settings, read_settings

    before, refused = read_settings(), 0
    for name in SETTINGS:
        for value in VALUES:
            with preserved_settings():
                try:
                    apply_settings({name: value})
                except ReplayRefused as error:
                    assert f"the setting {name} = " in str(error)
                    refused += 1
            assert read_settings() == before, (name, value)
    assert refused > 100


@pytest.mark.guarantee("no-imports")
def test_nothing_is_imported_because_a_capture_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the namespace's name is there, and so is one that the table of known libraries names."""
    for name in ("opreplay_trap", "torchvision", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write({name!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torchvision", "vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    source = recorded(tmp_path, lambda: torch.ones(3).exp())
    for namespace, advice in (
        ("opreplay_trap", "--allow-import=MODULE"),
        ("torchvision", "--allow-import=torchvision"),
        ("_moe_C", "--allow-import=vllm"),
    ):
        path = rewrite(
            source,
            tmp_path / f"{namespace}.opreplay",
            kernel=lambda kernel, to=namespace: (
                replace(kernel, name=f"{to}::exp") if kernel.name == "aten::exp" else kernel
            ),
        )
        with pytest.raises(ReplayRefused) as refused:
            Plan(path)
        assert advice in refused.value.findings[0]
    assert not (tmp_path / "sprung").exists()
    for wrong in ("", "a b", "x;y", "-m", "a..b", "os.path:join", "=a", "a=", "a.b=c"):
        with pytest.raises(UsageError, match="--allow-import="):
            Plan(source, allow_imports=[wrong])


@pytest.mark.guarantee("no-imports")
@pytest.mark.slow
def test_an_allowed_module_is_imported_and_its_operators_are_replayed(tmp_path: Path, tools: Tools) -> None:
    """In processes of their own, so that nothing has imported it."""
    (tmp_path / "demo_operators.py").write_text(
        "import torch\n"
        "library = torch.library.Library('opreplay_demo', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "library.impl('twice', lambda x: x * 2, 'CompositeExplicitAutograd')\n"
    )
    (tmp_path / "program.py").write_text(
        "import torch, replayfmt, demo_operators\n"
        "with replayfmt.capture('demo.opreplay'):\n"
        "    kept = torch.ops.opreplay_demo.twice(torch.ones(3))\n"
    )
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, timeout=600)
    path = tmp_path / "demo.opreplay"
    done = tools("run", path)
    assert done.code == 1 and "opreplay_demo::twice.default does not exist" in done.err
    run = subprocess.run(
        [Path(sys.executable).with_name("opreplay-run"), "--allow-import=demo_operators", "demo.opreplay"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0 and "verified: bitwise" in run.stdout, run.stderr


@pytest.mark.guarantee("terminal")
@pytest.mark.slow
def test_names_cannot_steer_the_terminal(tmp_path: Path, tools: Tools) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\n‮\x9b31mexecute"
    source = recorded(tmp_path, lambda: torch.ones(3).exp())

    def change(signature: Signature) -> Signature:
        args = tuple(
            Node(node.kind, node.name, hostile) if node.constant == "execute" else node for node in signature.args
        )
        return replace(signature, args=args)

    session = {"torch_version": hostile, "cpu": hostile, "cpu_capability": hostile, "host": hostile, "argv": (hostile,)}
    runs = rewrite(source, tmp_path / "runs.opreplay", signature=change, scope=lambda _name: hostile, session=session)
    path = rewrite(
        source,
        tmp_path / "hostile.opreplay",
        signature=change,
        scope=lambda _name: hostile,
        kernel=lambda kernel: (
            replace(kernel, schema=f"aten::exp({hostile}) -> Tensor") if kernel.name == "aten::exp" else kernel
        ),
    )
    named = tmp_path / "named.opreplay"
    shutil.copyfile(runs, named)
    rename_kernel(named, "aten::exp", name=f"aten::{hostile}")
    commands: list[tuple[Any, ...]] = [
        ("run", path),
        ("run", "--keep-going", path),
        ("run", "--keep-going", "--format=jsonl", path),
        ("benchmark", path),
        ("dump", path),
        ("dump", "--summary", path),
        ("dump", "--signatures", path),
        ("check", path),
        ("trim", "--ops=0:1", path, tmp_path / "none.opreplay"),
        ("dump", "--jq", ".", path),
        ("dump", "--format=jsonl", path),
        ("export", path, tmp_path / "none.zip"),
        ("run", named),
        ("dump", named),
        ("check", named),
        ("export", named, tmp_path / "other.zip"),
    ]
    fine: list[tuple[Any, ...]] = [
        ("run", runs),
        ("run", "--format=jsonl", runs),
        ("benchmark", "--benchmark-min-time=1x", runs),
        ("benchmark", "--benchmark-min-time=1x", f"--scope={hostile}", runs),
        ("benchmark", "--per-op", "--benchmark-min-time=1x", "--verbose", runs),
        *(
            ("benchmark", "--benchmark-min-time=1x", f"--benchmark-format={form}", f"--scope={hostile}", runs)
            for form in ("json", "csv")
        ),
        *(
            ("benchmark", "--per-op", "--benchmark-min-time=1x", f"--benchmark-format={form}", runs)
            for form in ("json", "csv")
        ),
        ("dump", "--jq", ".", runs),
        ("dump", "--jq", "[.name, .torch_version]", runs),
        ("trim", "--ops=0:3", runs, tmp_path / "trimmed.opreplay"),
    ]
    for command in (*commands, *fine):
        done = tools(*command)
        assert done.code == 0 or command not in fine, (command, done)
        for text in (done.out, done.err):
            assert not [line for line in text.split("\n") if not line.isprintable()], (command, text)


def test_a_very_long_name_does_not_flood_the_terminal(tmp_path: Path, tools: Tools) -> None:
    def change(signature: Signature) -> Signature:
        if signature.kind is not RecordKind.op:
            return signature
        return replace(signature, args=tuple(replace(node, name="x" * 100_000) for node in signature.args))

    path = rewrite(recorded(tmp_path, lambda: torch.arange(3.0).exp()), tmp_path / "long.opreplay", signature=change)
    refused = tools("run", path)
    assert refused.code == 1 and refused.findings
    assert all(len(line) < 5_000 for line in refused.err.splitlines())


@pytest.mark.guarantee("allowed-functions")
def test_leave_to_import_a_library_is_no_leave_to_call_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may have functions that write files; only naming it for the very namespace lets a capture call them."""
    (tmp_path / "callable_trap.py").write_text(
        f"def save(x):\n    open({str(tmp_path / 'sprung')!r}, 'w').write('written')\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    source = recorded(tmp_path, lambda: torch.ones(3).exp())
    path = rewrite(
        source,
        tmp_path / "hostile.opreplay",
        kernel=lambda kernel: (
            replace(
                kernel,
                name="callable_trap::save",
                overload="callable",
                schema="callable_trap::save.callable(Tensor x) -> Any",
            )
            if kernel.name == "aten::exp"
            else kernel
        ),
        signature=lambda one: (
            replace(one, args=(replace(one.args[0], name="x"),))
            if one.kind is RecordKind.op and len(one.args) == 1
            else one
        ),
    )
    for allowed in ([], ["callable_trap"], ["another=callable_trap"]):
        with pytest.raises(ReplayRefused) as refused:
            Plan(path, allow_imports=allowed)
        assert "--allow-import=callable_trap=MODULE" in refused.value.findings[0]
    assert not (tmp_path / "sprung").exists()
    with Plan(path, allow_imports=["callable_trap=callable_trap"]) as plan:
        plan.execute()
    assert (tmp_path / "sprung").exists()
