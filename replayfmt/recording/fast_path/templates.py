"""Source code of the fast path: one function per shape of call, compiled once and instantiated per site.

A shape says how many arguments there are, which of them are tensors or lists of tensors, which the same tensor, which
constants, and what the results are: new storages, views of an argument's storage, the argument itself, or None. The
code is straight-line, because a loop over arguments costs more than everything it would do.

The generated function takes (args, kwargs) of a call. It returns MISS, having done nothing, unless the call is the very
one the site was made for: same constants, tensors of the same metadata, on storages the capture knows and that need no
care. Then it runs the operator, records it and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ..frames import FAST_PATH_FILE
from ..stream.in_flight import sections

MISS = object()

# Kinds of arguments. ZERO is a float that is zero, whose sign counts; TENSORS a list of tensors and Nones.
TENSOR, TENSORS, CONSTANT, NUMBER, ZERO, NOTHING = "tensor", "tensors", "constant", "number", "zero", "nothing"
# Kinds of results, beside TENSORS and NOTHING: a new storage, a view of an argument's storage, an argument itself.
NEW, VIEW, SAME = "new", "view", "same"
# Flags of complex tensors.
COMPLEX, CONJUGATED = "complex", "*"


@dataclass(frozen=True)
class Place:
    """One argument or result, or an item of a list among them. `name` is its variable; `other` that of the argument
    that is the same tensor (for a result: or has its storage), "" for none. `full`: it covers its storage without a
    hole, so its offset is known where the storage's length is. `flags`: COMPLEX, with CONJUGATED where its lazy bit is
    set."""

    name: str
    kind: str
    other: str = ""
    items: tuple[Place, ...] = ()
    full: bool = False
    flags: str = ""

    def flat(self) -> Iterator[Place]:
        """Itself, or the items of a list."""
        if self.kind == TENSORS:
            yield from self.items
        else:
            yield self


@dataclass(frozen=True)
class CallShape:
    """What a site's code depends on. `single`: one result, not a tuple of them; `written`: names of arguments whose
    writes are noted for digests; `known`: the results' metadata follows from that of the arguments, so it need not be
    compared."""

    arguments: tuple[Place, ...]
    keywords: tuple[Place, ...]
    results: tuple[Place, ...]
    single: bool
    written: tuple[str, ...]
    known: bool

    def inputs(self) -> list[Place]:
        """Every tensor among the arguments, in order."""
        return [place for top in self.arguments for place in top.flat() if place.kind == TENSOR]

    def distinct(self) -> list[Place]:
        """Every tensor among the arguments, once."""
        return [place for place in self.inputs() if not place.other]

    def outputs(self) -> list[Place]:
        """Every result that is a tensor, in order."""
        return [place for top in self.results for place in top.flat() if place.kind in (NEW, VIEW, SAME)]

    def made(self) -> list[Place]:
        """Every result that is a tensor object of its own."""
        return [place for place in self.outputs() if place.kind != SAME]


_compiled: dict[CallShape, CodeType] = {}


class Factory:
    """Makes the functions of one capture's sites. What all sites share is global to the code, so that calls of
    different sites touch the same few objects; what is a site's own is in its closure."""

    def __init__(self, shared: dict[str, Any]) -> None:
        """`shared`: clock, begin, contexts, ident, rows, threads, ended, lock, next_storage, next_tensor, Tracker,
        tell_death, live, enter, view, finish, raised, failed, interrupt, interrupted, same_settings, has_function."""
        self._globals = {"__name__": __name__, "MISS": MISS, **shared}
        self._makers: dict[CallShape, Callable[..., Any]] = {}

    def make(self, shape: CallShape, own: dict[str, Any]) -> Callable[..., Any]:
        """The function of a site, from what is its own."""
        maker = self._makers.get(shape)
        if maker is None:
            code = _compiled.get(shape)
            if code is None:
                source, unlocked = _source(shape)
                code = _compiled[shape] = compile(source, FAST_PATH_FILE, "exec")
                sections[_inner(_inner(code))] = unlocked
            namespace = self._globals
            exec(code, namespace)
            maker = self._makers[shape] = namespace.pop("make")
        return maker(*(own[name] for name in _own(shape)))


def _inner(code: CodeType) -> CodeType:
    """The one function that code defines."""
    (inner,) = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return inner


def _source(shape: CallShape) -> tuple[str, frozenset[int]]:
    """The code of a shape: a function `make` of what a site has of its own. With it the lines that make a row without
    the lock."""
    recognized = _recognize(shape)
    finish = "return finish(kernel, args, kwargs, r, start, end)"
    accepted = _accept(shape, finish)
    recorded = _record(shape)
    call = "op(*args, **kwargs)" if shape.keywords else "op(*args)"
    lines = [f"def make({', '.join(_own(shape))}):"]
    lines += ["    def run(args, kwargs):", "        try:"]
    lines += [f"            {line}" for line in recognized]
    # Nothing has run yet, so whatever goes wrong here (a full disk, too) is met again and handled on the complete path.
    lines += ["        except BaseException as error:"]
    lines += ["            if not interrupt(error): return MISS", "            interrupted(args, kwargs, None)"]
    lines += ["            raise"]
    lines += [
        "        start = clock()",
        f"        try: r = {call}",
        "        except BaseException:",
        "            raised(kernel, args, kwargs, start, clock())",
        "            raise",
        "        try:",
        "            end = clock()",
        "            context = contexts[ident()]",
    ]
    lines += [f"            {line}" for line in accepted]
    # With several threads the settings, the ids and the row of one op must come in one piece.
    lines += ["            if threads:"]
    asking = len(lines)
    lines += ["                with lock:", "                    if ended: return r"]
    lines += ["                    same_settings(kernel.name)"]
    lines += [f"                    {line}" for line in recorded]
    lines += ["                return r"]
    unlocked = frozenset((asking, *range(len(lines) + 1, len(lines) + 1 + len(recorded))))
    lines += [f"            {line}" for line in recorded]
    lines += [
        "            return r",
        "        except BaseException as error:",
        "            if failed(error): return r",
        "            interrupted(args, kwargs, r)",
        "            raise",
        "    return run",
    ]
    return "\n".join(lines), unlocked


def _own(shape: CallShape) -> list[str]:
    """The names of what a site has of its own."""
    names = ["op", "pack", "code", "kernel"]
    if shape.distinct():
        names.append("check")
    if shape.made() and not shape.known:
        names.append("check_results")
    names += [
        f"c_{place.name}" for place in (*shape.arguments, *shape.keywords) if place.kind in (CONSTANT, NUMBER, ZERO)
    ]
    names += [f"m_{place.name}" for place in (*shape.distinct(), *shape.made())]
    names += [f"n_{place.name}" for place in (*shape.distinct(), *shape.made()) if place.full]
    return names


def _tuple(names: list[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _recognize(shape: CallShape) -> list[str]:
    """Whether the call is the site's; resolves its tensors to `t_*`."""
    names = [place.name for place in shape.arguments]
    lines = [f"{_tuple(names)} = args" if names else "if args: return MISS"]
    if shape.keywords:
        lines.append(f"if len(kwargs) != {len(shape.keywords)}: return MISS")
        lines += [f"{place.name} = kwargs[{place.name[2:]!r}]" for place in shape.keywords]
    else:
        lines.append("if kwargs: return MISS")
    for place in (*shape.arguments, *shape.keywords):
        if place.kind == TENSORS:
            lines.append(f"if type({place.name}) is not list: return MISS")
            lines.append(f"{_tuple([item.name for item in place.items])} = {place.name}")
        for item in place.flat():
            if item.other:
                lines.append(f"if {item.name} is not {item.other}: return MISS")
            elif item.kind != TENSOR:
                lines.append(f"if {_differs(item)}: return MISS")
    distinct = shape.distinct()
    if distinct:
        # A subclass's attributes are its own, and may be code of the program.
        lines.append(f"if has_function({', '.join(place.name for place in distinct)}): return MISS")
        # The comparison asks for strides, and what a nested tensor throws then would end the process.
        lines.append(f"if {' or '.join(f'{place.name}.is_nested' for place in distinct)}: return MISS")
        lines.append(f"if not check({', '.join(place.name for place in distinct)}): return MISS")
    for place in distinct:
        name = place.name
        lines += [
            f"s = {name}.untyped_storage()",
            f"k_{name} = getattr(s, '_opreplay', None)",
            f"if k_{name} is None: k_{name} = enter(s, {name}.dtype)",
        ]
        if place.flags:
            conjugated = place.flags.endswith(CONJUGATED)
            lines.append(f"if {name}.is_neg() or {name}.is_conj() is not {conjugated}: return MISS")
        elif not place.full:
            lines.append(f"if k_{name}.imports and {name}.is_neg(): return MISS")
        if place.full:
            lines.append(f"if k_{name}.size != n_{name} or len(s) != n_{name}: return MISS")
        else:
            lines += [f"if k_{name}.size != len(s): return MISS", f"o = {name}.storage_offset()"]
        lines += _resolved(place, f"k_{name}")
    return lines


def _resolved(place: Place, tracker: str) -> list[str]:
    """Sets `t_*` to the tensor id of a view at offset `o` of a storage."""
    name, offset = place.name, "0" if place.full else "o"
    at = ("", "") if place.full else (f" and {tracker}.offset == o", f" and {tracker}.offset2 == o")
    return [
        f"if {tracker}.meta == m_{name}{at[0]}: t_{name} = {tracker}.tensor",
        f"elif {tracker}.meta2 == m_{name}{at[1]}: t_{name} = {tracker}.tensor2",
        "else:",
        f"    v = {tracker}.views",
        f"    t_{name} = None if v is None else v.get((m_{name}, {offset}))",
        f"    if t_{name} is None: t_{name} = view({tracker}, m_{name}, {offset})",
    ]


def _differs(place: Place) -> str:
    value, constant = place.name, f"c_{place.name}"
    # Types first: comparing a tensor would run an operator.
    if place.kind == NOTHING:
        return f"{value} is not None"
    if place.kind == NUMBER:
        return f"type({value}) is not type({constant}) or {value} != {constant}"
    if place.kind == ZERO:
        return f"type({value}) is not float or repr({value}) != repr({constant})"
    return f"{value} is not {constant} and (type({value}) is not type({constant}) or {value} != {constant})"


def _accept(shape: CallShape, finish: str) -> list[str]:
    """Whether the results are what they were; otherwise the complete path finishes."""
    lines = []
    names = [place.name for place in shape.results]
    if not shape.single and names:
        lines.append(f"{_tuple(names)} = r")
    elif names:
        lines.append(f"{names[0]} = r")
    for top in shape.results:
        if top.kind == TENSORS:
            lines.append(f"if len({top.name}) != {len(top.items)}: {finish}")
            if top.items:
                lines.append(f"{_tuple([item.name for item in top.items])} = {top.name}")
        for place in top.flat():
            if place.kind == NOTHING:
                lines.append(f"if {place.name} is not None: {finish}")
            elif place.kind == SAME:
                lines.append(f"if {place.name} is not {place.other}: {finish}")
    made = shape.made()
    if made and not shape.known:
        lines.append(f"if not check_results({', '.join(place.name for place in made)}): {finish}")
    for place in made:
        name = place.name
        if place.kind == NEW:
            lines += [
                f"s_{name} = {name}.untyped_storage()",
                f"if len(s_{name}) != n_{name} or getattr(s_{name}, '_opreplay', None) is not None: {finish}",
            ]
        elif not shape.known:
            lines.append(f"if getattr({name}.untyped_storage(), '_opreplay', None) is not k_{place.other}: {finish}")
    return lines


def _record(shape: CallShape) -> list[str]:
    """Ids for what is new, and the row."""
    lines: list[str] = []
    made: list[str] = []
    slots = [f"t_{place.other or place.name}" for place in shape.inputs()]
    for place in shape.outputs():
        name = place.name
        if place.kind == SAME:
            slots.append(f"t_{place.other}")
            continue
        slots.append(f"t_{name}")
        if place.kind == NEW:
            lines += [
                f"g_{name} = next_storage(); t_{name} = next_tensor()",
                f"k = Tracker(s_{name}, tell_death)",
                f"k.id = g_{name}; k.size = n_{name}; k.meta = m_{name}; k.tensor = t_{name}; "
                "k.offset = k.meta2 = k.imports = 0; "
                "k.views = k.state = k.written = None",
                f"s_{name}._opreplay = live[g_{name}] = k",  # whole, whatever a signal handler raises in between
            ]
            made += [f"g_{name}", "0"]
            continue
        lines.append(f"k = k_{place.other}")
        offset = "0"
        if not place.full:
            offset = f"o_{name}"
            lines.append(f"o = o_{name} = {name}.storage_offset()")
        at = "" if place.full else " and k.offset == o", "" if place.full else " and k.offset2 == o"
        lines += [
            f"if k.meta == m_{name}{at[0]}: t_{name} = k.tensor",
            f"elif k.meta2 == m_{name}{at[1]}: t_{name} = k.tensor2",
            f"elif not k.meta2: t_{name} = k.tensor2 = next_tensor(); k.offset2 = {offset}; k.meta2 = m_{name}",
            "else:",
            "    v = k.views",
            "    if v is None: v = k.views = {}",
            f"    t_{name} = v.get((m_{name}, {offset}))",
            f"    if t_{name} is None: t_{name} = v[m_{name}, {offset}] = next_tensor()",
        ]
        made += ["k.id", offset] if len(shape.made()) == 1 else [f"k_{place.other}.id", offset]
    for name in shape.written:
        lines += [
            f"if k_{name}.written is None: k_{name}.written = {{t_{name}}}",
            f"else: k_{name}.written.add(t_{name})",
        ]
    row = ", ".join(["code", "context", "start - begin", "end - start", *slots, *made])
    lines.append(f"rows(pack({row}))")
    return lines
