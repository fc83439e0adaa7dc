"""Documents cannot lie: what README.md, the pages of --agents-md and guides show is run, links lead somewhere, and no
document is longer than it may be.

In these documents a block marked `console` holds commands after `$ ` prompts, each followed by what it prints (`…`
where lines are left out); a block marked `python` is run as it stands. Blocks of one document run in order, in one
directory with a copy of examples/. Documents that use the same captures share a directory; there a command that an
earlier document has run word for word is not run again. Blocks marked `sh` are not run here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from opreplay_tools.__main__ import TOOLS
from opreplay_tools.command import TOPICS

from .test_tree import ROOT, tracked

FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\((?P<target>[^()\s]+)\)")


@dataclass
class Step:
    """One thing a document tells its reader to do, and the output it promises."""

    kind: str
    text: str
    output: list[str] = field(default_factory=list)


def steps(text: str) -> list[Step]:
    """The commands and programs of a document, in order."""
    found: list[Step] = []
    for block in FENCE.finditer(text):
        kind = block["kind"].strip()
        if kind == "python":
            found.append(Step("python", block["text"]))
        elif kind == "console":
            for line in block["text"].splitlines():
                if line.startswith("$ "):
                    found.append(Step("console", line[2:]))
                elif found and found[-1].kind == "console" and not found[-1].output and found[-1].text.endswith("\\"):
                    found[-1].text += "\n" + line
                elif line.strip() not in {"", "…", "..."}:
                    found[-1].output.append(line)
    return found


def shape(line: str) -> str:
    """A line of output without what differs from run to run and from machine to machine: numbers, PyTorch's build,
    units, width."""
    line = re.sub(r"\b[0-9a-f]{12,}\b", "#", line)
    line = re.sub(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?:\+cpu|\+cu\d+)?", "#", line)
    line = re.sub(r"# ?(?:ns|µs|us|ms|s|B|KiB|MiB|GiB|kB|MB|GB|[kMG]?/s)\b", "# unit", line)
    return re.sub(r"[\s─━-]+", " ", line).strip(" …")


PLAYBOOK = ("opreplay", *(tool for tool in TOOLS if tool not in ("capture", "energy", "examples")))
TOGETHER = {
    # The first page asks for nothing but the tools: it writes the examples that the others use.
    "playbook": [f"tools/playbook/{name}.md" for name in ("opreplay", "capture", *PLAYBOOK[1:])]
    + ["docs/queries.md", "docs/failures.md", "README.md", "docs/tour.md"],
    "guides": [f"docs/{name}.md" for name in ("measuring", "comparing", "power", "tables", "reporting")],
    "comparing": ["docs/comparing-captures.md", "docs/comparing-replays.md"],
    "kernel tasks": ["docs/kernel-tasks.md"],
    "probe files": ["docs/probe-files.md"],
}
ELSEWHERE = {
    "docs/probing.md",
    "docs/serving.md",
    "docs/initializers.md",
    "docs/vectors.md",
    "docs/running-processes.md",
}


@pytest.mark.slow
@pytest.mark.parametrize("documents", TOGETHER.values(), ids=TOGETHER)
def test_documents_do_what_they_say(documents: list[str], tmp_path: Path, commands: Path) -> None:
    printed: dict[str, str] = {}
    for document in documents:
        does_what_it_says(document, tmp_path, printed, commands)


def test_every_document_with_commands_is_run() -> None:
    run = {document for documents in TOGETHER.values() for document in documents} | ELSEWHERE
    shown = {
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix == ".md" and "tests" not in path.parts and steps(path.read_text(encoding="utf-8"))
    }
    # This one's Python is an example of a program to trace, not of ours.
    assert shown - {"docs/execution-traces.md"} == run


def does_what_it_says(
    document: str, tmp_path: Path, printed: dict[str, str] | None = None, commands: Path | None = None
) -> None:
    """Run what a document asks its reader to do, and compare what that prints. `printed`: commands that were run in
    this directory, and what they printed. `commands`: a folder with commands that start sooner."""
    printed = {} if printed is None else printed
    if "/playbook/" not in document and not (tmp_path / "examples").exists():
        shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    path = [*([] if commands is None else [str(commands)]), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": ":".join(path), "COLUMNS": "100"}
    done = steps((ROOT / document).read_text(encoding="utf-8"))
    assert done, f"{document} shows no command"
    for number, step in enumerate(done, 1):
        if step.kind == "python":
            block = f"{Path(document).stem}{number}.py"
            (tmp_path / block).write_text(step.text)
            step.text = f"python {block}"
        if step.text not in printed:
            ran = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", step.text],
                cwd=tmp_path,
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=600,
            )
            assert ran.returncode == 0, f"{document}: `{step.text}` gave exit code {ran.returncode}\n{ran.stdout}"
            assert "Traceback" not in ran.stdout, f"{document}: `{step.text}`\n{ran.stdout}"
            printed[step.text] = ran.stdout
        # A line shown shortened (it ends in …) has to be the beginning of a real one.
        shapes = [shape(line) for line in printed[step.text].splitlines()]
        missing = [
            line
            for line in step.output
            if not any(s.startswith(shape(line)) if line.endswith("…") else s == shape(line) for s in shapes)
        ]
        assert not missing, f"{document}: `{step.text}` does not print {missing}, but\n{printed[step.text]}"


def test_the_setup_commands_of_the_readme_exist() -> None:
    (setup,) = (
        block["text"]
        for block in FENCE.finditer((ROOT / "README.md").read_text(encoding="utf-8"))
        if block["kind"].strip() == "sh setup"
    )
    commands = [line.split("#")[0].split() for line in setup.splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]
    for command in commands:
        subprocess.run([*command, "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
def test_the_demo_runs_and_fits_a_hundred_columns(tmp_path: Path, commands: Path) -> None:
    done = subprocess.run(
        ["make", "demo", f"BIN={commands}", f"DEMO={tmp_path}", "--old-file=.venv/.installed"],
        cwd=ROOT,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    output = done.stdout.replace(str(commands), ".venv/bin").replace(str(tmp_path), "build/demo")
    assert [line for line in output.splitlines() if len(line) > 100] == []
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    for tool in ("capture", "run", "benchmark", "dump", "report"):
        assert f".venv/bin/opreplay-{tool}" in output
    assert "BM_replay/scope:execute" in output and "bitwise" in output
    (shown,) = (block["text"] for block in FENCE.finditer(readme()) if block["kind"].strip() == "text demo")
    head, *rows = shown.splitlines()
    # The columns are as wide as their figures; on a busy machine there is one more before the last, for verdicts.
    columns = " +".join(map(re.escape, head.split()[:-1]))
    table = re.search(rf"^ *{columns} .*\n((?:.+\n)*)", output, re.MULTILINE)
    assert table, output
    assert len(re.findall(r"^ *\d[\d-]* ", table[1], re.MULTILINE)) == len(rows)  # a long name goes on in the next line
    assert said_by(ROOT / "docs/memory.svg") == said_by(tmp_path / "pictures/memory.svg")


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def said_by(picture: Path) -> list[str]:
    """The texts of a picture that matplotlib drew: beside the paths of their letters they stand in comments."""
    texts = re.findall(r"<!-- (.*?) -->", picture.read_text(encoding="utf-8"))
    assert texts
    return texts


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_every_local_link_leads_somewhere() -> None:
    wrong = []
    for document in (path for path in tracked() if path.suffix == ".md"):
        for link in LINK.finditer(FENCE.sub("", document.read_text(encoding="utf-8"))):
            name, _, anchor = link["target"].partition("#")
            if re.match(r"[a-z]+:", name):
                continue
            path = document.parent / name if name else document
            if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
                wrong.append(f"{document.relative_to(ROOT)}: {link['target']}")
    assert not wrong


def test_documents_are_as_long_as_their_readers_bear() -> None:
    most = {"README.md": 10, "AGENTS.md": 6, "SECURITY.md": 8, "tools/playbook/opreplay.md": 6}
    most |= {f"tools/playbook/{tool}.md": 4 for tool in TOOLS}
    most |= {f"docs/{name}.md": 6 for name in TOPICS}
    # What is not read from end to end: tables of rows, and how recorders work.
    longer = {"docs/rows.md", "docs/recorders.md", "docs/exactness.md"}
    documents = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")} - longer
    sizes = {name: (ROOT / name).stat().st_size for name in documents | set(most)}
    assert {name: size for name, size in sizes.items() if size > most.get(name, 8) * 1024} == {}


def test_what_a_document_promises_is_found_in_it() -> None:
    text = (
        "```console\n$ echo a \\\n    b\na 12.5 ms\n…\n$ true\n```\n"
        "```sh setup\nmake demo\n```\n"
        "```python\nx = 1\n```\n"
    )
    assert steps(text) == [
        Step("console", "echo a \\\n    b", ["a 12.5 ms"]),
        Step("console", "true"),
        Step("python", "x = 1\n"),
    ]
    assert shape("  BM_replay   12.5 ms ") == shape("BM_replay 3 µs") == "BM_replay # unit"
    assert shape("1.2M/s") == shape("322.4k/s") == shape("17/s") == "# unit"
