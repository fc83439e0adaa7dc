"""The page: contents in a template, with the libraries that draw and sort packed into it.

It needs no network and may not use any: a Content-Security-Policy forbids everything but the scripts whose hashes it
names, so that a name from a capture could not run even if it were not escaped. Jinja escapes every text; what scripts
read is compressed and in base64, which no text can end.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from replayfmt.errors import LibraryMissing

from .contents import ReportContents
from .pictures import MissingPicture
from .plotly_figures import plotly_figure

_EXPORTS = re.compile(r"export\s*\{([^{}]*)\}\s*;?")


def make_page(contents: ReportContents, version: str) -> str:
    """The page as text. Raises LibraryMissing, with the extra that has it."""
    environment = _environment()
    here = files(__package__)
    start, page = (here.joinpath(name).read_text(encoding="utf-8") for name in ("start.js", "page.js"))
    scripts = {"plotly": _plotly(), "datatables": _datatables(), "page": page}
    pictures = [each for section in contents.sections for each in section.pictures]
    figures = {each.name: plotly_figure(each) for each in pictures if not isinstance(each, MissingPicture)}
    hashes = " ".join(f"'{_hash(script)}'" for script in (start, *scripts.values()))
    text: str = environment.get_template("page.html").render(
        contents=contents,
        version=version,
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        style=_datatables_style() + here.joinpath("page.css").read_text(encoding="utf-8"),
        start=start,
        packed={name: _packed(script) for name, script in scripts.items()},
        figures=_packed(json.dumps(figures, separators=(",", ":"), allow_nan=False)),
        is_missing=lambda picture: isinstance(picture, MissingPicture),
    )
    return text


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise _missing("jinja2") from None
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return jinja2.Environment(
        loader=jinja2.DictLoader({"page.html": template}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _plotly() -> str:
    return _read("plotly", "package_data/plotly.min.js")


def _datatables() -> str:
    """The module of itables as a script of its own, which leaves what it exports in `DataTables`."""
    module = _read("itables", "html/dt_bundle.js")
    found = list(_EXPORTS.finditer(module))
    if len(found) != 1:
        raise LibraryMissing(
            f"itables carries DataTables in an unknown form ({len(found)} lists of exports): pip install "
            "'itables>=2.9,<3'"
        )
    names = [each.split(" as ") for each in found[0][1].split(",")]
    exported = ", ".join(f"{json.dumps(public.strip())}: {local.strip()}" for local, public in names)
    before, after = module[: found[0].start()], module[found[0].end() :]
    return f"(() => {{\n{before}\nwindow.DataTables = {{{exported}}};\n{after}\n}})();"


def _datatables_style() -> str:
    return _read("itables", "html/dt_bundle.css")


def _read(package: str, path: str) -> str:
    """A file of an installed package, which need not be imported for it."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place, path)
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise _missing(package)


def _missing(package: str) -> LibraryMissing:
    return LibraryMissing(f"a report needs {package}, which is not installed: pip install 'opreplay[report]'")


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
