"""A hook of mkdocs: the pages of the site that are not files in docs/.

Documents from elsewhere in the repository (README.md is the first page), a page for each tool (its page of the
playbook, then its options, from click), and the Python interface, from its docstrings. Links between documents are made
to fit; a link to a file that the site does not have becomes plain text.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from opreplay_tools.__main__ import TOOLS
from opreplay_tools.command import groups

import replayfmt

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    "README.md": "index.md",
    "schema/FORMAT.md": "format.md",
    "benchmarks/README.md": "benchmarks.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    **{f"tools/playbook/{name}.md": f"tools/{name}.md" for name in ("opreplay", *TOOLS)},
}
ORIGINS = {page: document for document, page in DOCUMENTS.items()}
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def cell(text: str) -> str:
    """Text of a command or docstring, in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def options(tool: str) -> str:
    """The options of a tool under the headings of its help."""
    command = import_module(f"opreplay_tools.{TOOLS[tool]}").cli
    text = ["", "## Options", ""]
    with command.make_context(command.name, [], resilient_parsing=True) as context:
        usage = " ".join(piece for piece in command.collect_usage_pieces(context))
        text += [f"`{command.name} {usage}`", ""]
        for heading, parameters in groups(command.get_params(context), command.first):
            text += [f"### {heading}", "", "| option | |", "| --- | --- |"]
            for parameter in parameters:
                record = parameter.get_help_record(context)
                if record is not None:
                    text.append(f"| `{cell(record[0])}` | {cell(record[1])} |")
            text.append("")
    return "\n".join(text)


# Public packages that are callable: where the function is.
FUNCTION_OF_PACKAGE = {"benchmark": "replayfmt.benchmark.convenience", "compare": "replayfmt.compare.comparison"}


def python() -> str:
    """The public names of the library with their signatures and docstrings."""
    text = ["# Python", "", inspect.getdoc(replayfmt) or "", ""]
    for name in replayfmt.__all__:
        item = getattr(replayfmt, name)
        if inspect.ismodule(item):
            item = getattr(import_module(FUNCTION_OF_PACKAGE[name]), name)
        if not callable(item):
            continue
        text += described(name, item, 2)
        if inspect.isclass(item):
            for member, value in vars(item).items():
                if member.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
                    continue
                text += described(f"{name}.{member}", value, 3)
    return "\n".join(text)


class _AsWritten(str):
    """An annotation, printed without quotes."""

    __repr__ = str.__str__


def signature(item: Callable[..., object]) -> str:
    """The signature of a function or class, without self."""
    written = inspect.signature(item)
    parameters = [
        each.replace(annotation=_AsWritten(each.annotation)) if isinstance(each.annotation, str) else each
        for name, each in written.parameters.items()
        if name != "self"
    ]
    returned = written.return_annotation
    return str(
        written.replace(
            parameters=parameters, return_annotation=_AsWritten(returned) if isinstance(returned, str) else returned
        )
    )


def described(name: str, item: Any, level: int) -> list[str]:
    """A heading, the signature and the docstring of a public name."""
    lines = ["#" * level + f" `{name}`", ""]
    if not isinstance(item, property) and not (inspect.isclass(item) and issubclass(item, Exception)):
        lines += ["```python", name + signature(item), "```", ""]
    return [*lines, inspect.getdoc(item) or "", ""]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the anchors that GitHub gives them."""
    config.mdx_configs["toc"] = {
        "slugify": lambda text, _separator: re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
    }
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    for document, page in DOCUMENTS.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        tool = page.removeprefix("tools/").removesuffix(".md")
        if page.startswith("tools/") and tool in TOOLS:
            text += options(tool)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "python.md", content=python()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them."""
    here = page.file.src_uri
    origin = ORIGINS.get(here, f"docs/{here}")

    def fitting(link: re.Match[str]) -> str:
        target, hash_, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", target) or not target:
            return link[0]
        document = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        wanted = DOCUMENTS.get(document, document.removeprefix("docs/") if document.startswith("docs/") else None)
        if wanted is None or files.get_file_from_path(wanted) is None:
            return link["text"].strip("[]") if (ROOT / document).exists() else link[0]
        return f"{link['text']}({posixpath.relpath(wanted, posixpath.dirname(here) or '.')}{hash_}{anchor})"

    return "".join(part if part.startswith("```") else LINK.sub(fitting, part) for part in FENCE.split(markdown))
