"""The documents as a site, and the picture of the packages: both are made from what is there."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replayfmt

from .test_tree import ROOT


@pytest.mark.slow
def test_the_map_is_the_one_that_the_imports_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/scripts"))
    drawing = importlib.import_module("map")
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.draw(), "the layout has changed: make map"


@pytest.mark.slow
def test_the_site_is_built_without_a_network_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs (the extra docs) is not installed")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert built.returncode == 0, built.stderr
    assert "--keep-going" in (tmp_path / "site/tools/run.html").read_text(encoding="utf-8")
    python = (tmp_path / "site/python.html").read_text(encoding="utf-8")
    assert [name for name in replayfmt.__all__ if f'id="{name.lower()}"' not in python] == ["__version__"]
    loaded = [
        page.name
        for page in (tmp_path / "site").rglob("*.html")
        if re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', page.read_text(encoding="utf-8"))
    ]
    assert not loaded, "these load something from the network"
