"""Whether the module that is kept of a kernel is what was compiled, or what Triton's interpreter runs.

Triton compiles a kernel once for arguments of a kind, and looks again neither at attributes of modules, variables of
enclosing functions and default values, nor at functions that took the place of others. The interpreter reads a
function's text when it is first called. What the module is made of is read when a launch is recorded, so it may say
something else than what ran. Its first intermediate code, which Triton keeps, tells.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from .functions import is_callable_of_triton, same_code
from .sources import StandaloneSource, load_source

_CHANGED = (
    "a variable of an enclosing function or of another module, a default value, or a function that it uses has "
    "changed since then"
)
# Places in the source, which a module of its own has others of, and names of functions, which have the module's.
_PLACE = re.compile(r" loc\((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\")*\))*\)")
_SYMBOL = re.compile(r'@(?:"[^"]*"|[\w$.]+)')


def compiled_difference(source: StandaloneSource, compiled: Any) -> str:
    """Why the module of a kernel cannot stand for what Triton compiled of it, or ""."""
    from triton import knobs

    if knobs.compilation.override or getattr(compiled.metadata, "ir_override", None):
        return "code that was put in the place of what Triton makes of its source (TRITON_KERNEL_OVERRIDE, ir_override)"
    made = compiled.asm.get("source")
    if made is None:
        return "Triton kept no intermediate code of it to compare its source with"
    try:
        again = _first_code(source, compiled)
    except Exception as error:  # Triton's compiler refuses it, or this version of Triton is not known
        return f"its source cannot be compared with what was compiled: {type(error).__name__}: {_first_line(error)}"
    return (
        "" if _plain(str(made)) == _plain(again) else f"its source, as it is now, is not what was compiled: {_CHANGED}"
    )


def _first_code(source: StandaloneSource, compiled: Any) -> str:
    """The intermediate code that Triton makes of the module's kernel, as for a compiled kernel."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    module = vars(load_source(source.text, source.name))
    made, target = compiled.src, compiled.metadata.target
    constants = {
        path: module[str(source.name_of(value))] if is_callable_of_triton(value) else value
        for path, value in made.constants.items()
    }
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(compiled.metadata._asdict())
    kernel = type(made)(module[source.name], made.signature, constants, made.attrs)
    given = {
        "target": target,
        "options": options,
        "codegen_fns": backend.get_codegen_implementation(options),
        "module_map": backend.get_module_map(),
        "context": context,
    }
    taken = inspect.signature(kernel.make_ir).parameters  # which differ between versions of Triton
    return str(kernel.make_ir(**{name: value for name, value in given.items() if name in taken}))


def _plain(code: str) -> str:
    """Intermediate code without places, its functions numbered."""
    lines = [line for line in code.splitlines() if not line.startswith("#loc")]
    numbers: dict[str, str] = {}
    text = _PLACE.sub("", "\n".join(lines))
    return _SYMBOL.sub(lambda found: numbers.setdefault(found[0], f"@{len(numbers)}"), text)


def interpreted_difference(source: StandaloneSource) -> str:
    """Why the module of a kernel cannot stand for what Triton's interpreter runs, or "". Raises AttributeError for a
    version of Triton that is not known."""
    for name, decorated in source.decorated.items():
        if source.functions[name].constexpr:
            continue  # it runs as Python compiled it
        running, called = decorated.rewrite(), source.functions[name].name
        again = type(decorated.rewriter)(decorated.fn, **decorated.kwargs).rewrite_ast()
        if not same_code(running.__code__, again.__code__):
            return f"the text of {called} has changed since it was first called"
        if not _defaults(running) == _defaults(again) == _defaults(decorated.fn):
            return f"a default value of {called} has changed since it was defined or first called"
    return ""


def _defaults(function: Any) -> list[str]:
    found = [each.default for each in inspect.signature(function).parameters.values()]
    return [repr(getattr(value, "value", value)) for value in found]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
