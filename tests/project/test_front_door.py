"""What someone meets first: the page of the package index, the source distribution, the name that is imported, and what
GitHub and agents read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from .test_tree import tracked
from .test_wheel import ROOT, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"
INSTALLED = {re.sub(r"[-_.]+", "-", each.name).lower() for each in metadata.distributions()}
GATE = GITHUB / "actions/benchmark-gate/action.yml"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for path in tracked():
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=tree)
    return out


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(distributions: Path) -> None:
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in tracked()} <= packed
    made = {name for name in packed if name.startswith(("build/", ".venv")) or name.endswith((".so", ".pyc"))}
    assert not made


@pytest.mark.slow
def test_the_page_of_the_index_has_links_that_hold_there(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        page = Parser().parsestr(archive.read(name).decode())
    home = PROJECT["urls"]["Homepage"]
    links = re.findall(r"\]\(([^)\s]+)\)", page.get_payload())
    assert len(links) > 30 and all(link.startswith("https://") for link in links)
    leading = [link.removeprefix(f"{home}/blob/main/").partition("#")[0] for link in links if "/blob/main/" in link]
    assert all((ROOT / each).exists() for each in leading)
    assert f"]({home}/raw/main/docs/memory.svg)" in page.get_payload()
    assert page.get_all("Project-URL") and page["Description-Content-Type"] == "text/markdown"


def test_reading_a_capture_asks_for_no_pytorch_to_be_installed() -> None:
    assert not [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    assert PROJECT["optional-dependencies"]["torch"] == ["torch>=2.11"]


@pytest.mark.slow
def test_readers_need_nothing_that_is_not_installed_with_them(tmp_path: Path) -> None:
    """Dump, check, trim and report, where nothing but the dependencies and what those need can be imported."""
    allowed, wanted = set(), [re.split(r"[^\w.-]", each)[0] for each in PROJECT["dependencies"]]
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name not in allowed:
            allowed.add(name)
            needed = (metadata.requires(name) or []) if name in INSTALLED else []
            wanted += [re.split(r"[^\w.-]", each)[0] for each in needed if "extra ==" not in each]
    hidden = [
        package
        for package, distributions in metadata.packages_distributions().items()
        if package not in ("replayfmt", "opreplay", "opreplay_tools", "_distutils_hack")
        and not {re.sub(r"[-_.]+", "-", each).lower() for each in distributions} & (allowed | {"opreplay"})
    ]
    assert {"torch", "pandas", "matplotlib", "transformers"} <= set(hidden)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n")
    capture = ROOT / "tests/golden/step-1.0.opreplay"
    for tool in (
        ("dump", "--format=jsonl", capture),
        ("dump", "--findings", capture),
        ("dump", "--jq=.kind", capture),
        ("check", capture),
        ("trim", "--payload=none", capture, "trimmed.opreplay"),
        ("report", "-o", "page.html", capture),
    ):
        path = f"{tmp_path}{os.pathsep}{ROOT}"
        done = subprocess.run(
            [sys.executable, "-m", "replayfmt", *map(str, tool)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (tool, done.stderr)


@pytest.mark.slow
def test_the_distributions_name_can_be_imported(tmp_path: Path) -> None:
    script = (
        "import sys, opreplay\n"
        "from opreplay import ReplayRefused, open as open_capture\n"
        "assert 'torch' not in sys.modules\n"
        "import replayfmt\n"
        "assert ReplayRefused is replayfmt.ReplayRefused and open_capture is replayfmt.open\n"
        "assert opreplay.capture is replayfmt.capture and set(opreplay.__all__) <= set(dir(opreplay))\n"
        "try:\n    import opreplay.errors\nexcept ImportError: pass\nelse: raise SystemExit('twice')\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", sorted(GITHUB.glob("workflows/*.yml"))),
        ("vendor.github-actions", [GATE]),
        (
            "vendor.github-issue-forms",
            sorted(set(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}),
        ),
        ("vendor.github-issue-config", [GITHUB / "ISSUE_TEMPLATE/config.yml"]),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_what_github_reads_fits_its_schema(schema: str, files: list[Path], tmp_path: Path) -> None:
    assert files
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    run(*check, *files, cwd=tmp_path)


def test_workflows_name_what_is_there() -> None:
    text = "\n".join(path.read_text() for path in GITHUB.rglob("*.yml"))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z]+)", text)) <= targets
    actions = re.findall(r"uses: \./after/(\S+)", text)
    assert actions and all((ROOT / each / "action.yml").exists() for each in actions)
    (tested,) = (path for path in GITHUB.glob("workflows/tests.yml"))
    pairs = yaml.safe_load(tested.read_text())["jobs"]["compat"]["strategy"]["matrix"]["include"]
    pythons = {str(each["python"]) for each in pairs}
    named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    assert pythons <= named, "a Python that is tested is one that the index names"
    developed = re.findall(r"^torch==([0-9.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    supported = {f"{torch}:311" for torch in developed} | {
        f"{each['torch']}:{str(each['python']).replace('.', '')}" for each in pairs
    }
    (carried,) = re.findall(r"for pair in (.+); do", (ROOT / ".ci/libraries").read_text())
    assert set(carried.split()) == supported, "a release carries what is tested"


def test_the_version_stands_once_and_is_cited() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "verdict", "code"), [("1000%", "passed", 0), ("0.001%", None, None)])
def test_the_gate_of_the_action_runs_as_in_a_workflow(
    tmp_path: Path, allowed: str, verdict: str | None, code: int | None, commands: Path
) -> None:
    """Its shell step, with the environment that GitHub gives it."""
    tools = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    (tmp_path / "program.py").write_text(
        "import torch\nx = torch.randn(64, 64)\nfor _ in range(5): x = (x @ x).tanh()\n"
    )
    run("opreplay-capture", "-o", "x.opreplay", "program.py", cwd=tmp_path, PATH=tools)
    run(
        "opreplay-benchmark",
        "--benchmark-min-time=6x",
        "--benchmark-out=base.json",
        "x.opreplay",
        cwd=tmp_path,
        PATH=tools,
    )
    (step,) = yaml.safe_load(GATE.read_text())["runs"]["steps"]
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": tools,
            "CAPTURE": "x.opreplay",
            "BASELINE": "base.json",
            "FAIL_ABOVE": allowed,
            "ARGUMENTS": "--benchmark-min-time=6x",
            "OUT": str(tmp_path / "gate.json"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
        },
        capture_output=True,
        text=True,
    )
    said = (tmp_path / "output").read_text()
    assert said in {f"verdict={each}\n" for each in ("passed", "slower", "cannot be judged")}
    assert verdict is None or said == f"verdict={verdict}\n"
    expected = {"passed": 0, "slower": 1, "cannot be judged": 4}[said.strip().partition("=")[2]]
    assert done.returncode == expected and (code is None or code == expected), done.stdout + done.stderr


def test_agents_find_their_way_in_a_screen() -> None:
    skill, index = (ROOT / "SKILL.md").read_text(), (ROOT / "docs/llms.txt").read_text()
    head = yaml.safe_load(skill.split("---")[1])
    assert set(head) == {"name", "description"} and len(head["description"]) < 1024
    assert len(skill) < 1500 and len(index) < 1500
    for text in (skill, index):
        assert "opreplay --agents-md" in text
