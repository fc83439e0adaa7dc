"""Reads huge JSON files one entry at a time, and broken ones as far as possible.

A trace is an object with a few small members and one array of very many events. `JsonStream.entries` yields the
members, and the elements of named arrays, one by one, with memory for one chunk and one entry. Errors that real
exporters make are tolerated: trailing commas, bare NaN and Infinity, invalid escapes, quotes in the names of an
execution trace's nodes, bytes that are not UTF-8; an unreadable entry is skipped; a truncated file ends where it was
cut off. Each of these is a Problem, with the byte offset in the (decompressed) JSON.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from replayfmt.errors import InvalidCapture
from replayfmt.format.source import Closing

from .trace_files import Progress, TraceFile

_CHUNK_BYTES = 1 << 18
_LONGEST_ENTRY = 8 << 20  # characters; anything longer is assumed to be damage
_MOST_IN_VAIN = 32 << 20  # characters read in vain before the search inside damaged entries is given up
_NODE_CHARACTERS = 1 << 12  # of a node of an execution trace, usually
_CAREFUL = 32  # entries that are read separately after one that could not be read
_SHOWN_PROBLEMS = 20
_DOUBLE_DIGITS = 16  # with the point, 15 digits: those that a double always holds
# Possessive quantifiers: strings of millions of characters keep no backtracking positions.
_STRING = r'"(?:[^"\\]++|\\.)*+"'
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_STRUCTURE = re.compile(rf'{_STRING}|["{{}}\[\]]', re.DOTALL)
_LONGEST_KEY = 64  # to look for
_FIRST_KEYS = "ph|name|cat|id|op_name"
# PyTorch writes the name of a node as it is: one with quotes ends where the next member begins.
_NODE_NAME = re.compile(r'\{\s*(?:"id": \d+, )?"name": "([^\n]{0,65536}?)", "(?:ctrl_deps|id)": \d')
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*+[}}\]])", re.DOTALL)
_BARE_WORD = re.compile(rf"({_STRING})|(-?)\b(nan|inf|infinity|none|undefined)\b", re.DOTALL | re.IGNORECASE)
_BAD_ESCAPE = re.compile(r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
_WORDS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity", "none": "null", "undefined": "null"}
_NO_SPACE = re.compile(r"[^ \t\r\n]")
_BETWEEN = re.compile(r'\}\s*+,\s*+\{\s*+"[^"\\]{1,64}"')  # where an entry ends and the next one begins


@dataclass(frozen=True)
class JsonProblem:
    """Something wrong with the file, at a byte offset of its JSON."""

    offset: int
    text: str

    def __str__(self) -> str:
        return f"byte {self.offset}: {self.text}"


class LongFloat(float):
    """A number of more digits than a double holds; `text` has them all."""

    text: str


EXACT_US = float(1 << 43)  # microseconds below this are a double of which the nanosecond is exact


def _float(text: str) -> float:
    number = LongFloat(text)
    if len(text) <= _DOUBLE_DIGITS and -EXACT_US < number < EXACT_US:
        return float(text)
    number.text = text
    return number


class JsonStream(Closing):
    """One pass over a trace file. `problems` has the first few of each kind, `problem_counts` their numbers. With
    `exact`, numbers with too many digits for a double, and those from EXACT_US on, are LongFloats."""

    def __init__(self, file: TraceFile, *, exact: bool = False) -> None:
        self._file = file
        self._decoder = json.JSONDecoder(strict=False, parse_float=_float if exact else None)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._place = 0
        self._before = 0  # bytes before the buffer
        self._counted = 0, 0  # a position in the buffer, and the number of bytes before it
        self._careful = 0  # this many entries are still read by their extent
        self._between = ""  # what stood between two entries: many are decoded at once, up to where it stands last
        self._together = False  # whether what is in the buffer was not tried to be
        self._first_key = _FIRST_KEYS  # of the entries: those inside a damaged one may look like entries, too
        self._in_vain = 0  # characters of entries that had no end, or were not JSON
        self._ended = False
        self._not_utf8 = False
        self.problems: list[JsonProblem] = []
        self.problem_counts: Counter[str] = Counter()

    @staticmethod
    def open(
        path: str | PathLike[str], progress: Progress | None = None, *, member: str = "", exact: bool = False
    ) -> JsonStream:
        """A stream over a file's JSON, however it is packed, or over that of an archive's member. Raises the errors of
        TraceFile."""
        return JsonStream(TraceFile(path, progress=progress, member=member), exact=exact)

    @property
    def offset(self) -> int:
        """Byte offset of the next character."""
        place, count = self._counted if self._counted[0] <= self._place else (0, 0)
        count += len(self._text[place : self._place].encode("utf-8", "surrogateescape"))
        self._counted = self._place, count
        return self._before + count

    @property
    def member(self) -> str:
        """The name of the archive's member that is read, "" if the file is not an archive."""
        return self._file.member

    @property
    def complete(self) -> bool:
        """Whether the file was read to its proper end: nothing truncated, nothing skipped."""
        return not any(kind in self.problem_counts for kind in ("cut off", "skipped", "not JSON"))

    def close(self) -> None:
        self._file.close()

    def entries(self, arrays: Collection[str]) -> Iterator[tuple[str, Any]]:
        """(key, value) of the members of the outermost object; (key, element) for each element of the members named in
        `arrays`; ("", element) for each element of an outermost array. Documents that follow each other in one file
        are read as one.

        Raises InvalidCapture if the file does not begin as JSON does.
        """
        first = self._peek()
        if first == "\ufeff":
            self._place += 1
            first = self._peek()
        if first not in ("[", "{"):
            shown = self._text[self._place : self._place + 16]
            what = f"it begins with {shown!r}" if shown else self._file.broken or "it is empty"
            raise InvalidCapture(f"{self._file.path}: not JSON: {what}; expected an object or an array")
        while first in ("[", "{"):
            self._place += 1
            if first == "[":
                yield from (("", element) for element in self._elements())
            elif not (yield from self._members(arrays)):
                break
            first = self._peek()
            if first in ("[", "{"):
                self._note(
                    "another document",
                    "another JSON document begins here; it is read as a part of this trace",
                    self.offset,
                )
            elif first:
                self._note(
                    "skipped",
                    f"the file goes on after its JSON; {self._shown()} and what follows was not read",
                    self.offset,
                )
        if self._file.broken:
            self._note("cut off", f"the file is damaged here: {self._file.broken}", self.offset)

    def _members(self, arrays: Collection[str]) -> Generator[tuple[str, Any], None, bool]:
        """Yield members; returns whether the object's end was reached."""
        while True:
            character = self._separated("}")
            if character in ("", "}"):
                self._place += 1 if character else 0
                return bool(character)
            if character != '"':
                self._note("not JSON", f"expected a member's name, got {self._shown()}", self.offset)
                return False
            found, key = self._value()
            if not found or not isinstance(key, str):
                return False
            if self._peek() != ":":
                self._note("cut off" if not self._peek() else "not JSON", f"nothing follows {key!r}", self.offset)
                return False
            self._place += 1
            if key in arrays and self._peek() == "[":
                self._place += 1
                yield from ((key, element) for element in self._elements())
                if "cut off" in self.problem_counts:
                    return False
                continue
            found, value = self._value()
            if found:
                yield key, value
            elif self._ended and self._place >= len(self._text):
                return False

    def _elements(self) -> Iterator[Any]:
        while True:
            character = self._separated("]")
            if character in ("", "]"):
                self._place += 1 if character else 0
                return
            start = self.offset if character not in '{["-0123456789tfn' else 0
            if start:
                self._note("skipped", f"expected an entry, got {self._shown()}; looked for the next one", start)
                if not self._resynchronize():
                    return
                continue
            if self._together and (several := self._several()):
                yield from several
                if not self._ended:
                    self._fill(_CHUNK_BYTES)  # what is left is the beginning of an entry
                continue
            found, value = self._value(recover=True)
            if found:
                first = next(iter(value), "") if isinstance(value, dict) else ""
                if 0 < len(first) <= _LONGEST_KEY:
                    self._first_key = first
                if between := _BETWEEN.match(self._text, self._place - 1):
                    self._between = between[0]
                yield value
            elif self._ended and self._place >= len(self._text):
                return

    def _several(self) -> list[Any]:
        """The entries from here to the last whole one in the buffer, none if one of them is not JSON."""
        self._together = not self._between
        end = self._text.rfind(self._between, self._place) + 1 if self._between else 0
        if not end:
            return []
        try:
            entries = self._decoder.decode(f"[{self._text[self._place : end]}]")
        except (ValueError, RecursionError):
            return []
        self._place = end
        return entries

    def _separated(self, closing: str) -> str:
        """The next character other than space and comma; "" at the end, which is reported."""
        commas = 0
        while (character := self._peek()) == ",":
            self._place += 1
            commas += 1
        if commas and character == closing:
            self._note("trailing comma", f"a comma before {closing!r}", self.offset - 1)
        if not character:
            self._note("cut off", f"the file ends before the {closing!r} of what was being read", self.offset)
        return character

    def _value(self, *, recover: bool = False) -> tuple[bool, Any]:
        """(True, value) of the next value, or (False, None) after reporting why there is none."""
        if not self._peek():
            return self._broken_off(False)
        if self._careful:
            # Building an error message costs time proportional to the text before it: after an error, entries are read
            # separately.
            self._careful -= 1
            if (node := self._named()) is not None:
                return True, node
            extent = self._extent()
            if extent is not None and (extent < len(self._text) or self._ended):
                return self._apart(extent, recover)
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._place)
                if not isinstance(value, str | list | dict) and not self._ended and len(self._text) - end < 8:
                    if self._too_long():
                        return False, None
                    self._fill(_CHUNK_BYTES)  # the last digits of a number may be in the next chunk
                    continue
                self._place = end
                return True, value
            except ValueError:  # not JSON, or a number of thousands of digits
                if (node := self._named()) is not None:
                    return True, node
                extent = self._extent()
                if extent is not None:
                    break
                if self._ended:
                    return self._broken_off(recover)
                if self._too_long():
                    return False, None
                self._fill(max(_CHUNK_BYTES, len(self._text) - self._place))
            except RecursionError:
                self._note("skipped", "an entry nested too deeply", self.offset)
                self._resynchronize()
                return False, None
        return self._repaired(extent, recover)

    def _named(self) -> dict[str, Any] | None:
        """The node that begins here, if quotes in its name end no string, as they would in JSON."""
        found = _NODE_NAME.match(self._text, self._place)
        if found is None or _WHOLE_STRING.fullmatch(f'"{found[1]}"'):
            return None
        self._careful = _CAREFUL
        first, rest = found.span(1)
        head = self._text[self._place : first] + json.dumps(found[1], ensure_ascii=False)[1:-1]
        length = _NODE_CHARACTERS
        while self._in_vain <= _MOST_IN_VAIN:
            try:
                value, end = self._decoder.raw_decode(head + self._text[rest : rest + length])
            except (ValueError, RecursionError):
                self._in_vain += length
                if rest + length >= len(self._text):
                    break
                length *= 8
            else:
                self._note("invalid name", "quotes in a name that are not escaped; taken as a part of it", self.offset)
                self._place = rest + end - len(head)
                return value
        return None

    def _next_entry(self, start: int, end: int) -> int | None:
        """Where the first entry in a part of the buffer seems to begin."""
        key = self._first_key if self._first_key == _FIRST_KEYS else re.escape(self._first_key)
        found = re.compile(rf'[\]}}"\w,]\s*(\{{)\s*"(?:{key})"\s*:').search(self._text, start, end)
        return found.start(1) if found else None

    def _apart(self, end: int, recover: bool) -> tuple[bool, Any]:
        """The value up to `end`."""
        try:
            value = self._decoder.decode(self._text[self._place : end])
        except ValueError:
            return self._repaired(end, recover)
        except RecursionError:
            self._note("skipped", "an entry nested too deeply", self.offset)
            self._resynchronize()
            return False, None
        self._place = end
        return True, value

    def _too_long(self) -> bool:
        """Whether an entry is longer than any valid one; it is then skipped."""
        if len(self._text) - self._place <= _LONGEST_ENTRY:
            return False
        self._note("skipped", f"an entry of more than {_LONGEST_ENTRY} characters", self.offset)
        if not self._looks_inside(len(self._text)):
            self._place = len(self._text)
        self._resynchronize()
        return True

    def _looks_inside(self, end: int) -> bool:
        """Whether to search an entry that could not be read up to `end` for other entries. If all entries are damaged,
        each contains the next one: the total read in vain is bounded, and damage is skipped from then on."""
        self._in_vain += end - self._place
        return self._in_vain <= _MOST_IN_VAIN

    def _broken_off(self, recover: bool) -> tuple[bool, Any]:
        start = self.offset
        if recover and self._looks_inside(len(self._text)) and self._resynchronize():
            self._note("skipped", "an entry without an end", start)
            return False, None
        self._note("cut off", "the file ends within an entry", start)
        self._place = len(self._text)
        return False, None

    def _extent(self) -> int | None:
        """The end of the value that begins here, by its brackets; None if it is not in the buffer."""
        first = self._text[self._place]
        if first == '"':
            found = _WHOLE_STRING.match(self._text, self._place)
            return found.end() if found else None
        if first not in "{[":
            found = re.compile(r"[,}\]\s]").search(self._text, self._place)
            return found.start() if found else None
        depth = 0
        for found in _STRUCTURE.finditer(self._text, self._place):
            character = found.group()
            if character == '"':
                return None  # an unterminated string
            if character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if not depth:
                    return found.end()
        return None

    def _repaired(self, end: int, recover: bool) -> tuple[bool, Any]:
        """The value up to `end`, with known exporter errors repaired; skipped if that does not help."""
        offset, text = self.offset, self._text[self._place : end]
        self._careful = _CAREFUL
        for kind, repair in (
            ("trailing comma", lambda text: _TRAILING_COMMA.sub(lambda found: found.group(1) or "", text)),
            ("bare word", _with_words),
            ("invalid escape", lambda text: _BAD_ESCAPE.sub(lambda found: found.group(1) or "\\\\", text)),
        ):
            repaired = repair(text)
            if repaired == text:
                continue
            text = repaired
            try:
                value = self._decoder.decode(text)
            except (ValueError, RecursionError):
                continue
            self._note(kind, f"an entry that is not JSON ({kind}) was read as if it were right", offset)
            self._place = end
            return True, value
        self._note("skipped", f"an entry is not JSON: {self._shown()}", offset)
        inside = recover and self._looks_inside(end)
        next_entry = self._next_entry(self._place + 1, end) if inside else None
        self._place = end if next_entry is None else next_entry
        return False, None

    def _resynchronize(self) -> bool:
        """Go to the apparent beginning of the next entry; False if there is none."""
        self._place += 1
        while True:
            found = self._next_entry(self._place, len(self._text))
            if found is not None:
                self._place = found
                return True
            if self._ended:
                self._place = len(self._text)
                return False
            self._place = max(self._place, len(self._text) - 4096)
            self._fill(_CHUNK_BYTES)

    def _peek(self) -> str:
        """The next character other than space; "" at the end."""
        while True:
            text, place = self._text, self._place
            if place < len(text) and text[place] not in " \t\r\n":
                return text[place]
            found = _NO_SPACE.search(text, place)
            self._place = found.start() if found else len(text)
            if found:
                return found.group()
            if self._ended:
                return ""
            self._fill(_CHUNK_BYTES)

    def _fill(self, size: int) -> None:
        data = self._file.read(size)
        self._ended = not data
        text = self._utf8.decode(data, final=self._ended)
        if not self._not_utf8 and not text.isascii() and any("\udc80" <= c <= "\udcff" for c in text):
            self._not_utf8 = True
            wrong = next(i for i, c in enumerate(text) if "\udc80" <= c <= "\udcff")
            at = self._before + len((self._text + text[:wrong]).encode("utf-8", "surrogateescape"))
            self._note("not UTF-8", "bytes that are not UTF-8; they are kept as they are", at)
        if self._place:
            self._before = self.offset
            self._counted = 0, 0
        self._text = self._text[self._place :] + text
        self._place, self._together = 0, True

    def _note(self, kind: str, text: str, offset: int) -> None:
        self.problem_counts[kind] += 1
        if self.problem_counts[kind] <= 3 and len(self.problems) < _SHOWN_PROBLEMS:
            self.problems.append(JsonProblem(offset, text))

    def _shown(self) -> str:
        return repr(self._text[self._place : self._place + 40])


def _with_words(text: str) -> str:
    def word(found: re.Match[str]) -> str:
        if found.group(1):
            return found.group(1)
        replacement = _WORDS[found.group(3).lower()]
        return replacement if replacement == "null" or replacement == "NaN" else found.group(2) + replacement

    return _BARE_WORD.sub(word, text)
