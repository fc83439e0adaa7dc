"""The playbook for agents: playbook.md, one `## opreplay-…` section per tool."""

from __future__ import annotations

import re


def text(tool: str) -> str:
    """The part of the playbook that `tool --agents-md` prints: all of it for opreplay-run, otherwise its section."""
    from importlib.resources import files  # costs more than the rest of most tools' start

    whole = files(__package__).joinpath("playbook.md").read_text(encoding="utf-8")
    if tool == "opreplay-run":
        return whole
    section = re.search(rf"^## {re.escape(tool)}$.*?(?=^## |\Z)", whole, re.MULTILINE | re.DOTALL)
    if section is None:
        raise LookupError(f"playbook.md has no section for {tool}")
    return section.group(0)
