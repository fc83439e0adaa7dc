"""The list of what no dispatch mode keeps, in docs/exactness.md: written from a sweep, read by the tests."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .modes import MODES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
_BEGIN, _END = "<!-- found:begin -->\n", "<!-- found:end -->\n"
# What of two tensors' elements differs depends on the processor, too.
_VALUES = ("rounding", "sign of zero", "payload of NaN", "values")
_ROW = re.compile(r"^\| `(?P<entry>[^`]+)` \|(?P<cells>.*)\|$", re.MULTILINE)

Found = dict[tuple[str, str], set[tuple[str, str]]]  # by entry and mode: places and kinds


def of_the_mode(rows: Iterable[Mapping[str, Any]]) -> Found:
    """What differed under a dispatch mode that does nothing, too."""
    found: Found = defaultdict(set)
    for row in rows:
        for each in row["differences"]:
            if each["cause"] == "mode":
                found[row["entry"], row["mode"]].add((each["place"], each["kind"]))
    return found


def documented() -> Found:
    """What the document lists."""
    found: Found = {}
    for row in _ROW.finditer(_section()):
        for mode, cell in zip(MODES, row["cells"].split("|"), strict=True):
            parts = [part.split(": ") for part in cell.strip().split("; ") if part]
            if parts:
                found[row["entry"], mode] = {(place, kind) for place, kinds in parts for kind in kinds.split(", ")}
    return found


def documented_version() -> str:
    """The PyTorch that the document's list was made with."""
    version = re.search(r"PyTorch (\S+)", _section())
    assert version is not None
    return version[1]


def families(differences: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Places and kinds, the kinds that depend on the processor as one."""
    return {(place, "values" if kind in _VALUES else kind) for place, kind in differences}


def document(rows: Mapping[tuple[str, str], Mapping[str, Any]], torch_version: str, capability: str) -> None:
    """Write the list anew."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    DOCUMENT.write_text(before + _BEGIN + _listed(rows, torch_version, capability) + _END + after, encoding="utf-8")


def _section() -> str:
    return DOCUMENT.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]


def _listed(rows: Mapping[tuple[str, str], Mapping[str, Any]], torch_version: str, capability: str) -> str:
    found = of_the_mode(rows.values())
    left_out: Counter[str] = Counter()
    compared = []
    for mode in MODES:
        of_mode = [row for (_, each), row in rows.items() if each == mode and row["cases"]]
        for row in of_mode:
            left_out.update(row["left_out"])
        count = sum(row["compared"] for row in of_mode)
        compared.append(f"{count:,} cases of {len(of_mode):,} entries in `{mode}`")
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in left_out.most_common()) or "none"
    names = sorted({entry for entry, _ in found})
    lines = [
        f"Found with PyTorch {torch_version} on a processor with {capability}, by comparing",
        f"{', '.join(compared)}.",
        f"Cases left out: {reasons}.",
        "",
    ]
    counted = {name for (name, _), kinds in found.items() if any(kind != "version" for _, kind in kinds)}
    lines += [f"{len(counted)} entries differ in some mode:", "", *_table(found, sorted(counted)), ""]
    others = sorted(set(names) - counted)
    lines += [f"{len(others)} entries differ in nothing but `version`:", "", *_table(found, others)]
    return "\n".join(lines) + "\n"


def _table(found: Found, names: Iterable[str]) -> list[str]:
    lines = [f"| entry | {' | '.join(MODES)} |", f"| --- |{' --- |' * len(MODES)}"]
    for name in names:
        cells = [_cell(found.get((name, mode), set())) for mode in MODES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _cell(differences: Iterable[tuple[str, str]]) -> str:
    kinds: dict[str, list[str]] = defaultdict(list)
    for place, kind in sorted(differences):
        kinds[place].append(kind)
    return "; ".join(f"{place}: {', '.join(of_place)}" for place, of_place in kinds.items())
