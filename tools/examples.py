"""opreplay-examples: programs to try the tools on, and kernels to put in place of others."""

from __future__ import annotations

import ast
from pathlib import Path

import click

from replayfmt.errors import CaptureFailed, OutputExists

from .command import console_script, say, tool

# In a wheel the programs are beside this file, in a clone where people look for them.
_FOLDERS = (Path(__file__).parent / "programs", Path(__file__).resolve().parents[1] / "examples")


@tool(
    "opreplay-examples",
    ("opreplay-examples", "Which programs there are:"),
    ("opreplay-examples examples", "Write them to a folder:"),
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.argument("folder", metavar="[DIR]", type=click.Path(file_okay=False, path_type=Path), required=False)
def cli(folder: Path | None, force: bool) -> None:
    """Write example programs to the folder DIR, or list them.

    Exits with 0 if they were written, 1 if they were not: a file exists already, or the folder cannot be written.
    """
    programs = sorted(next(each for each in _FOLDERS if each.is_dir()).glob("*.py"))
    if folder is None:
        width = max(len(program.name) for program in programs)
        for program in programs:
            say(f"{program.name:{width}}  {_first_line(program)}")
        return
    taken = [str(folder / program.name) for program in programs if (folder / program.name).exists()]
    if taken and not force:
        raise OutputExists(f"{taken[0]}: exists already; --force replaces it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for program in programs:
            _write(folder / program.name, program.read_bytes())
    except OSError as error:
        raise CaptureFailed(f"{folder}: {error.strerror}") from error
    say(f"{folder}: {len(programs)} programs")


def _write(path: Path, content: bytes) -> None:
    """The whole of a file, or what was there before."""
    partial = Path(f"{path}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _first_line(program: Path) -> str:
    documented = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
    assert documented is not None, program
    return documented.partition("\n")[0]


main = console_script(cli)

if __name__ == "__main__":
    main()
