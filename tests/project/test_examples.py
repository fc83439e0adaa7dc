"""opreplay-examples: the programs that documents use come with the tools."""

from __future__ import annotations

import ast
import errno
import json
import sys
from pathlib import Path

import pytest
from opreplay_tools.examples import main

ROOT = Path(__file__).parents[2]
PROGRAMS = {path.name: path.read_bytes() for path in (ROOT / "examples").glob("*.py")}


def ran(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["opreplay-examples", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


def test_they_are_listed_with_what_they_are(monkeypatch, capfd):
    assert ran(monkeypatch) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(PROGRAMS)
    assert all(len(line.split()) > 4 for line in lines)


def test_they_are_written_and_replaced_only_with_force(monkeypatch, capfd, tmp_path):
    folder = tmp_path / "a" / "b"
    assert ran(monkeypatch, str(folder)) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == PROGRAMS
    (folder / "mlp_training.py").write_text("mine")
    for name in PROGRAMS.keys() - {"mlp_training.py"}:
        (folder / name).unlink()
    capfd.readouterr()
    assert ran(monkeypatch, str(folder)) == 1
    error = capfd.readouterr().err
    assert error == f"FAILED_PRECONDITION: {folder}/mlp_training.py: exists already; --force replaces it\n"
    assert [path.name for path in folder.iterdir()] == ["mlp_training.py"], "nothing was written"
    assert ran(monkeypatch, "--force", str(folder)) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == PROGRAMS


def test_a_folder_that_cannot_be_made_is_one_error(monkeypatch, capfd, tmp_path):
    (tmp_path / "file").write_text("")
    assert ran(monkeypatch, str(tmp_path / "file" / "folder")) == 1
    assert capfd.readouterr().err.startswith(f"FAILED_PRECONDITION: {tmp_path}/file/folder: ")


def test_a_full_disk_leaves_no_half_of_a_program(monkeypatch, capfd, tmp_path):
    def write(path, content):
        with path.open("wb") as file:
            file.write(content[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    assert ran(monkeypatch, str(tmp_path)) == 1
    assert capfd.readouterr().err == f"FAILED_PRECONDITION: {tmp_path}: No space left on device\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """As Jupyter would: a cell's last expression is shown, and nothing is printed beside it."""
    notebook = json.loads((ROOT / "examples/first_look.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "outputs are of whoever runs it"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            *statements, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(statements, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), names)
    replayed, kernels, times = (each for each in shown if each is not None)
    assert replayed.verified.startswith("bitwise") and "aten::addmm" in set(kernels["op"])
    assert times["median_real_time"].iloc[0] > 0
    assert (tmp_path / "step.html").stat().st_size > 100_000
    printed = capsys.readouterr()
    assert "aten::" in printed.out and "opreplay-" in printed.out and "\x1b" not in printed.out + printed.err
