"""`python -m replayfmt TOOL …`, `python -m opreplay_tools TOOL …`: the tools, where their commands are not on PATH."""

from __future__ import annotations

import sys
from importlib import import_module

from .command import say

# The short name of each tool, and its module. `python -m opreplay_tools.MODULE` runs it, too.
TOOLS = {
    "capture": "capture",
    "run": "run",
    "benchmark": "benchmark",
    "dump": "dump",
    "check": "check",
    "trim": "trim",
    "import": "importer",
    "export": "export",
}
_USAGE = f"""Usage: python -m replayfmt TOOL [ARGUMENTS]

TOOL is {", ".join(TOOLS)}: what opreplay-TOOL is. `TOOL --help` says what it does.
"""


def main() -> None:
    """Run the tool that the first argument names, with the other arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name in ("-h", "--help"):
        print(_USAGE, end="")
        sys.exit(0)
    if name not in TOOLS:
        said = "name a tool" if name is None else f"there is no tool {name!r}"
        say(f"INVALID_ARGUMENT: {said}", err=True)
        print(f"\n{_USAGE}", end="", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"opreplay-{name}", *sys.argv[2:]]
    import_module(f".{TOOLS[name]}", __package__).main()


if __name__ == "__main__":
    main()
