"""The packages, the page of the package index, and wheels that carry the libraries in C++ (docs/recorders.md);
pyproject.toml says everything else.

OPREPLAY_NATIVE_LIBRARIES names a directory that `python -m replayfmt.native` filled. Without it the wheel is a plain
one.
"""

import os
import re
import shutil
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LIBRARIES = os.environ.get("OPREPLAY_NATIVE_LIBRARIES", "")


class BuildPy(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        carried = Path(self.build_lib, "replayfmt", "native", "built")
        shutil.rmtree(carried, ignore_errors=True)  # what an earlier wheel of this tree carried
        if LIBRARIES:
            found = sorted(Path(LIBRARIES).glob("*.so"))
            if not found:
                raise SystemExit(f"OPREPLAY_NATIVE_LIBRARIES: no libraries in {LIBRARIES}")
            carried.mkdir()
            for library in found:
                shutil.copyfile(library, carried / library.name)


class BdistWheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not LIBRARIES

    def get_tag(self):
        # Any Python can use it: one for which it carries nothing builds, as with a plain wheel.
        return ("py3", "none", super().get_tag()[2])


def page():
    """README.md as it reads outside the repository: its links lead there, and its pictures come from there."""
    home = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    text = Path("README.md").read_text(encoding="utf-8")
    link = re.compile(r"(!?)(\[[^\[\]]*\]\()(?![a-z]+:|#)")
    return link.sub(lambda at: f"{at[1]}{at[2]}{home}/{'raw' if at[1] else 'blob'}/main/", text)


# tools/, examples/ and docs/ are installed under names of our own; package-dir in pyproject.toml maps them.
PACKAGES = [*find_packages(include=["replayfmt", "replayfmt.*"]), "opreplay_tools"]
PACKAGES += ["opreplay_tools.docs", "opreplay_tools.programs"]

setup(
    packages=PACKAGES,
    py_modules=["opreplay"],
    long_description=page(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
)
