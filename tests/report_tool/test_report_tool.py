"""opreplay-report: the page it writes, or one error and no page; names from captures stay text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import HOSTILE, Measured, tool


class Page(html.parser.HTMLParser):
    """The elements of a page, their attributes and the text in each kind of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.last = ""
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        self.last = tag

    def handle_endtag(self, tag: str) -> None:
        self.last = ""

    def handle_data(self, data: str) -> None:
        if self.last:
            self.texts[self.last][-1] += data  # which may come in parts

    def scripts(self) -> list[str]:
        """The text of every script of the page, unpacked."""
        found = []
        for text in self.texts["script"]:
            packed = re.fullmatch(r"[A-Za-z0-9+/=]{100,}", text)
            found.append(gzip.decompress(base64.b64decode(text)).decode() if packed else text)
        return found


def written(tmp_path: Path, *arguments: object) -> str:
    out = tmp_path / "report.html"
    assert tool("report", "--force", "-o", out, *arguments) == 0
    return out.read_text(encoding="utf-8")


def test_a_hostile_name_stays_text(hostile: Path, tmp_path: Path) -> None:
    text = written(tmp_path, hostile)
    assert "<img" not in text and "\ud800" not in text
    page = Page(text)
    names = {tag for tag, _attributes in page.elements}
    assert "img" not in names and "iframe" not in names
    handlers = [name for _tag, attributes in page.elements for name in attributes if name.startswith("on")]
    assert not handlers
    shown = " ".join(page.texts["td"] + page.texts["a"] + page.texts["dd"])
    for text in (HOSTILE, "{{ 7 * 7 }}", "'\"`{{7*7}}"):
        assert text in shown
    figures = next(json.loads(each) for each in page.scripts() if each.startswith('{"top-captured"'))
    assert "<img" not in json.dumps(figures["top-captured"]), "plotly reads markup in texts"


@pytest.mark.slow
def test_the_policy_of_the_page_allows_its_own_scripts_and_nothing_from_elsewhere(
    measured: Measured, tmp_path: Path
) -> None:
    page = Page(written(tmp_path, measured.capture))
    (policy,) = (each["content"] for tag, each in page.elements if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "http" not in policy
    (allowed,) = re.findall(r"script-src ([^;]*);", policy)
    run = [each for each in page.scripts() if not each.startswith("{")]
    hashes = ["'sha256-" + base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() + "'" for each in run]
    assert sorted(allowed.split()) == sorted(hashes)
    addresses = [
        value
        for _tag, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data") and value is not None
    ]
    assert all(value.startswith(("#", "data:,")) for value in addresses)


def test_links_of_the_tables_lead_to_rows(measured: Measured, tmp_path: Path) -> None:
    page = Page(written(tmp_path, measured.capture))
    rows = {each["id"] for tag, each in page.elements if tag == "tr" and "id" in each}
    links = {each["href"] for tag, each in page.elements if tag == "a" and "data-find" in each}
    assert links and {str(link).removeprefix("#") for link in links} <= rows


@pytest.mark.slow
def test_a_report_is_made_without_torch(measured: Measured, tmp_path: Path) -> None:
    """In a process of its own, in which importing torch fails."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[0] = 'opreplay-report'\n"
        "from opreplay_tools.report import main; main()"
    )
    arguments = [f"--benchmark={measured.whole}", f"--benchmark={measured.per_op}", f"--energy={measured.energy}",
                 f"--baseline={measured.earlier}", "-o", str(tmp_path / "x.html"), str(measured.capture)]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and "x.html: " in done.stdout
    assert (tmp_path / "x.html").stat().st_size > 1_000_000


@pytest.mark.parametrize("flag", ["--benchmark", "--energy", "--baseline"])
@pytest.mark.parametrize("what", ["missing", "folder", "fifo", "empty", "other", "cut", "list"])
def test_a_file_that_is_no_measurement_is_one_error_and_no_page(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, what: str
) -> None:
    path, out = tmp_path / "given", tmp_path / "report.html"
    content = {"empty": b"", "other": b"\xff\x00", "cut": measured.per_op.read_bytes()[:5000], "list": b"[[1], 2]"}
    if what in content:
        path.write_bytes(content[what])
    elif what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    capsys.readouterr()
    rest = [f"--benchmark={measured.per_op}"] if flag == "--baseline" else []
    assert tool("report", f"{flag}={path}", *rest, "-o", out, measured.capture) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"INVALID_ARGUMENT: {flag}={path}: ") and "expected" in line + "expected" * (
        what in ("missing", "folder", "fifo")
    )
    assert not out.exists() and [each.name for each in tmp_path.iterdir()] in ([], ["given"])


def test_a_page_is_replaced_only_with_force_and_never_one_of_its_sources(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    out.write_text("precious")
    assert tool("report", "-o", out, measured.capture) == 1
    assert "--force" in capsys.readouterr().err and out.read_text() == "precious"
    before = measured.whole.read_bytes()
    assert tool("report", "--force", f"--benchmark={measured.whole}", "-o", measured.whole, measured.capture) == 2
    assert measured.whole.read_bytes() == before
    assert tool("report", "--force", "-o", out, measured.capture) == 0 and out.stat().st_size > 1_000_000


def test_a_baseline_without_a_benchmark_is_wrong_usage(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("report", f"--baseline={measured.earlier}", "-o", tmp_path / "x.html", measured.capture) == 2
    assert "--baseline needs --benchmark=FILE" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["plotly", "itables", "jinja2"])
def test_a_library_that_is_not_installed_is_one_error_that_names_the_extra(
    measured: Measured,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    library: str,
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr("replayfmt.report.page.find_spec", lambda name: None if name == library else _found(name))
    assert tool("report", "-o", tmp_path / "x.html", measured.capture) == 1
    error = capsys.readouterr().err
    assert f"needs {library}" in error and "opreplay[report]" in error
    assert not list(tmp_path.iterdir())


def _found(name: str) -> object:
    import importlib.util

    return importlib.util.find_spec(name)
