"""The wheel: built from the tree, compared with it, installed into an empty environment; its tools run from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("capture", "run", "benchmark", "dump", "check")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, without anything that would lead Python back into the tree. Returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **environment},
        text=True,
        timeout=600,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def copy_of_the_tree(directory: Path) -> Path:
    """What wheels are built from: setuptools packs whatever an old build/ in the tree still holds."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "opreplay.py"):
        shutil.copy(ROOT / name, directory)
    for name in ("replayfmt", "tools", "docs", "schema", "examples"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_of_the_tree(tmp_path_factory.mktemp("source"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", source, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel, and takes the dependencies from the one the tests run in."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A directory named in a .pth file joins sys.path without its own .pth files: the editable install stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        environment / "bin/python",
        "install",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        wheel,
        cwd=environment,
    )
    return environment / "bin"


@pytest.mark.slow
def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    library = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "replayfmt").rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".toml", ".txt", ".html", ".css", ".js"}
    }
    tools = {f"opreplay_tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    tools |= {f"opreplay_tools/playbook/{path.name}" for path in (ROOT / "tools/playbook").glob("*.md")}
    tools |= {f"opreplay_tools/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    programs = {f"opreplay_tools/programs/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert packed == library | tools | programs | {"replayfmt/py.typed", "opreplay.py"}
    assert {"opreplay_tools/playbook/opreplay.md", "opreplay_tools/docs/failures.md"} <= packed


@pytest.mark.slow
def test_nothing_top_level_has_a_name_that_others_use(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"replayfmt", "opreplay_tools", "opreplay.py"}


@pytest.mark.slow
def test_the_installed_library_is_the_wheel_and_not_the_tree(installed: Path, tmp_path: Path) -> None:
    code = "import replayfmt, opreplay_tools; print(replayfmt.__file__, opreplay_tools.__file__)"
    where = run(installed / "python", "-c", code, cwd=tmp_path)
    assert all(Path(name).is_relative_to(installed.parent) for name in where.split())


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_an_installed_tool_tells_its_version_and_its_flags(installed: Path, tmp_path: Path, tool: str) -> None:
    assert run(installed / f"opreplay-{tool}", "--version", cwd=tmp_path).startswith(f"opreplay-{tool}, version ")
    assert "--agents-md" in run(installed / f"opreplay-{tool}", "--help", cwd=tmp_path)
    assert f"# opreplay-{tool}\n" in run(installed / f"opreplay-{tool}", f"--agents-md={tool}", cwd=tmp_path)
    assert "# When something fails" in run(installed / f"opreplay-{tool}", "--agents-md=failures", cwd=tmp_path)


@pytest.mark.slow
def test_installed_tools_capture_check_dump_and_run(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import torch\ntorch.randn(4, 4).mm(torch.ones(4, 4)).sum().item()\n")
    run(installed / "opreplay-capture", "-o", "one.opreplay", "program.py", cwd=tmp_path)
    run(installed / "opreplay-check", "one.opreplay", cwd=tmp_path)
    assert '"op":"aten::mm"' in run(installed / "opreplay-dump", "--format=jsonl", "one.opreplay", cwd=tmp_path)
    run(installed / "opreplay-run", "one.opreplay", cwd=tmp_path)


def test_what_readme_installs_is_what_these_tests_install() -> None:
    """Its install commands need an index, so no test runs them: `.` is the wheel of the tests above."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.partition("  #")[0].split() for line in readme.splitlines() if line.startswith("pip install ")]
    assert commands == [["pip", "install", "."], ["pip", "install", "'.[torch]'"]]


@pytest.mark.slow
def test_an_installed_dump_reads_a_golden_capture(installed: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "golden" / "step-1.0.opreplay", tmp_path)
    rows = run(installed / "opreplay-dump", "--format=jsonl", "step-1.0.opreplay", cwd=tmp_path)
    assert '"kind":"op"' in rows and "replayfmt" not in os.listdir(tmp_path)
