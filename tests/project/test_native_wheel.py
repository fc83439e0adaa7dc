"""A wheel that carries the libraries in C++: who installs it needs no compiler and no cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import replayfmt
from replayfmt.native import building
from tests.native_recorder import require_native_recorder

from .test_wheel import ROOT, copy_of_the_tree, run

SOURCES = sorted(path.name for path in (ROOT / "replayfmt" / "native").glob("*.cpp"))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m replayfmt.native` makes: a library has the same name and content in the cache."""
    require_native_recorder()
    directory = tmp_path_factory.mktemp("libraries")
    for source in SOURCES:
        shutil.copy(building.library(source)._name, directory)
    return directory


def wheel_of(tree: Path, directory: Path, **environment: str) -> Path:
    output = directory / "dist"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output, tree, cwd=tree, **environment)
    (built,) = output.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_that_carries_libraries_records_where_there_is_no_compiler(libraries: Path, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    wheel = wheel_of(tree, tmp_path, OPREPLAY_NATIVE_LIBRARIES=str(libraries))
    assert wheel.stem.split("-")[2:4] == ["py3", "none"] and wheel.stem.split("-")[4].startswith("linux_")
    installed = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(*pip, "--target", installed, wheel, cwd=tmp_path)

    (tmp_path / "program.py").write_text("import torch\ntorch.ones(2).sin()\n")
    capture = ("-m", "opreplay_tools.capture", "--recorder=native", "-o", "one.opreplay", "program.py")
    cache = tmp_path / "cache"
    left_out = ("CXX", "OPREPLAY_NATIVE", "OPREPLAY_RECORDER")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in left_out},
        "PATH": "",
        "PYTHONPATH": str(installed),
        "XDG_CACHE_HOME": str(cache),
    }
    loads = "import sys; from replayfmt.dump.expansion import InCpp; InCpp(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", loads], cwd=tmp_path, env=environment, check=True, timeout=600)
    done = subprocess.run(
        [sys.executable, *capture], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    policies = replayfmt.open(tmp_path / "one.opreplay").session.policies
    assert policies["recorder"] == policies["thread-watch"] == "native" and not cache.exists()

    plain = wheel_of(tree, tmp_path / "plain")  # after the other one: nothing of it is left
    assert plain.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(plain) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_a_directory_without_libraries_is_no_wheel(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "bdist_wheel"],
        cwd=tree,
        env={**os.environ, "OPREPLAY_NATIVE_LIBRARIES": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0 and "OPREPLAY_NATIVE_LIBRARIES: no libraries in " in done.stderr
