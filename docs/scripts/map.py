"""Draws docs/map.svg: the packages of replayfmt, with their folders, in layers that follow from the imports.

`make map` runs it. A package is above everything that it imports; a line goes to each package that it needs and does
not reach through another one. Within a package, its folders are in layers in the same way. Nothing else is shown, so
the picture changes only when the layout does.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "map.svg"
LIBRARY = "replayfmt"
TOOLS = "tools"

Graph = dict[str, set[str]]


def imported(path: Path, package: list[str]) -> set[str]:
    """The full names of what a module imports. `package`: the packages around the module, outermost first."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names.update(".".join([*base, alias.name]) for alias in node.names)
    return names


def modules() -> dict[str, set[str]]:
    """Every module of the library and the tools, by its full name, with what it imports."""
    found = {}
    for folder in (LIBRARY, TOOLS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            package = parts[:-1]
            name = ".".join(package if parts[-1] == "__init__" else parts)
            found[name] = imported(path, package)
    return found


def is_folder(name: str) -> bool:
    return any((ROOT / name.replace(".", "/")).glob("*.py"))


def part(name: str, parent: str) -> str | None:
    """The part of `parent` that a name is in: a folder or a module directly in it."""
    if not name.startswith(parent + "."):
        return None
    child = name[len(parent) + 1 :].split(".")[0]
    path = ROOT / parent.replace(".", "/") / child
    return child if path.is_dir() or path.with_suffix(".py").exists() else None


def graph(parent: str, every: dict[str, set[str]]) -> Graph:
    """Which parts of a package import which others."""
    edges: Graph = {}
    for name, imports in every.items():
        source = part(name, parent)
        if source is None or source == "__main__":
            continue
        targets = {part(each, parent) for each in imports}
        edges.setdefault(source, set()).update(each for each in targets if each not in (None, source))
    return edges


def reach(edges: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(edges.get(start, ()))
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting.extend(edges.get(each, ()))
    return found


def layers(edges: Graph) -> list[list[str]]:
    """The parts from the bottom up: each one above those that it imports. Parts in a circle stand side by side."""
    reached = {each: reach(edges, each) for each in edges}
    level: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in level:
            below = [each for each in reached[name] if name not in reached.get(each, ())]
            level[name] = 1 + max(map(height, below), default=-1)
        return level[name]

    rows: list[list[str]] = []
    for name in sorted(edges):
        while len(rows) <= height(name):
            rows.append([])
        rows[height(name)].append(name)
    return rows


def needed(edges: Graph) -> Graph:
    """The edges that no longer path replaces."""
    return {
        name: {each for each in targets if not any(each in reach(edges, other) for other in targets - {each})}
        for name, targets in edges.items()
    }


WIDTH, CHARACTER, LINE, PAD, GAP = 1180, 6.7, 17, 8, 34
STYLE = (
    "text{font:12px sans-serif;fill:#222}.name{font-weight:bold}.box{fill:#f4f6f9;stroke:#7a8aa0}"
    ".edge{stroke:#9aa7b8;fill:none}"
)


def draw() -> str:
    """The picture, as SVG."""
    every = modules()
    packages = graph(LIBRARY, every)
    packages = {  # api and __init__ are what users import; version is a number
        name: {each for each in targets if each in packages} for name, targets in packages.items()
    }
    packages[TOOLS] = {
        target
        for name, imports in every.items()
        if name.split(".")[0] == TOOLS
        for target in (part(each, LIBRARY) for each in imports)
        if target is not None and target in packages
    }
    inner = {
        name: [
            [each for each in row if is_folder(f"{LIBRARY}.{name}.{each}")]
            for row in reversed(layers(graph(f"{LIBRARY}.{name}", every)))
        ]
        for name in packages
        if name != TOOLS and is_folder(f"{LIBRARY}.{name}")
    }
    texts = {name: [" · ".join(row) for row in inner.get(name, ()) if row] for name in packages}
    boxes: dict[str, tuple[float, float, float, float]] = {}
    y = float(PAD)
    for row in reversed(layers(packages)):
        widths = {name: max(map(len, [name + "  ", *texts[name]])) * CHARACTER + 2 * PAD for name in row}
        gap = max((WIDTH - sum(widths.values())) / (len(row) + 1), PAD)
        x, tallest = gap, 0.0
        for name in row:
            height = (1 + len(texts[name])) * LINE + 2 * PAD
            boxes[name] = (x, y, widths[name], height)
            x += widths[name] + gap
            tallest = max(tallest, height)
        y += tallest + GAP
    width = max(x + w for x, _y, w, _h in boxes.values()) + PAD
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, WIDTH):.0f} {y - GAP + PAD:.0f}">',
        "<title>The packages of replayfmt and what they import</title>",
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for name, targets in sorted(needed(packages).items()):
        x, top, w, h = boxes[name]
        for target in sorted(targets):
            tx, ty, tw, _th = boxes[target]
            x0, y0, x1, y1 = x + w / 2, top + h, tx + tw / 2, ty
            lines.append(
                f'<path class="edge" d="M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + GAP:.0f} {x1:.0f} {y1 - GAP:.0f} '
                f'{x1:.0f} {y1:.0f}"/>'
            )
    for name, (x, top, w, h) in boxes.items():
        lines.append(f'<rect class="box" x="{x:.0f}" y="{top:.0f}" width="{w:.0f}" height="{h:.0f}" rx="4"/>')
        for number, text in enumerate([name, *texts[name]]):
            style = ' class="name"' if number == 0 else ""
            lines.append(
                f'<text{style} x="{x + PAD:.0f}" y="{top + PAD + LINE * number + 12:.0f}">{escape(text)}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
