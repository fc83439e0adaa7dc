"""The attachments of a capture, by role: sources and metadata of kernels, the table of device kernels, bodies of
graphs.

They are read, verified and limited before anything uses them. The table of device kernels belongs to no kernel. The
body of a graph is the ops that were captured into it, as a capture inside of a capture.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayfmt.errors import CaptureFailed, InvalidCapture, OpReplayError

from .codes import KernelKind, RecordKind
from .frames import MAX_NESTING
from .model import Attachment, Kernel
from .validation import nested_deeper, parse_json, some_of

if TYPE_CHECKING:  # recording has no reader to load
    from .reader import CaptureReader

SOURCE, METADATA, BODY, CONFIGURATIONS = "source", "metadata", "body", "configurations"
# How it was found what a kernel writes: from its intermediate code, source or parameters; by comparing what its
# arguments held before and after a call; or not, so that more counts as written than may be.
WRITES_KNOWN_BY = ("ir", "source", "signature", "compared", "assumed")
# What a replay may use, with the longest that it takes of each. Other roles are shown, and used for nothing.
MAX_BYTES = {
    SOURCE: 16 << 20,
    METADATA: 16 << 20,
    BODY: 256 << 20,
    CONFIGURATIONS: 64 << 20,
    "ttir": 64 << 20,
    "ttgir": 64 << 20,
    "llir": 64 << 20,
    "ptx": 64 << 20,
    "cubin": 256 << 20,
    "hsaco": 256 << 20,
    "object": 256 << 20,
}


def attachments_of(reader: CaptureReader, kernel: Kernel) -> list[Attachment]:
    return [reader.attachments[number] for number in kernel.attachments]


def roles_of(reader: CaptureReader, kernel: Kernel) -> tuple[str, ...]:
    """The roles of a kernel's attachments, each once, in its order."""
    return tuple(dict.fromkeys(attachment.role for attachment in attachments_of(reader, kernel)))


def contents_of(reader: CaptureReader, kernel: Kernel) -> dict[str, bytes]:
    """The bytes of a kernel's attachments by role, verified against their hashes; those of unknown roles are left out.

    Raises InvalidCapture for a role that occurs twice, something longer than MAX_BYTES, metadata that is no JSON
    object, and damage. Nothing is read unless all of it may be.
    """
    attachments = [each for each in attachments_of(reader, kernel) if each.role in MAX_BYTES]
    where = f"{reader.path}: {kernel.qualified_name}"
    for role, count in Counter(attachment.role for attachment in attachments).items():
        if count > 1:
            raise InvalidCapture(f"{where} has {count} attachments of the role {role}, expected one")
    for attachment in attachments:
        length, most = reader.payload_info(attachment.payload).raw_bytes, MAX_BYTES[attachment.role]
        if length > most:
            raise InvalidCapture(f"{where} has a {attachment.role} of {length:,} bytes; the limit is {most:,}")
    found = {attachment.role: bytes(reader.payload(attachment.payload)) for attachment in attachments}
    if METADATA in found:
        parse_metadata(found[METADATA], where)
    return found


def how_writes_are_known(reader: CaptureReader, kernel: Kernel) -> str | None:
    """How it was found what a kernel with metadata writes: one of WRITES_KNOWN_BY, as these say, or `body` for a graph.
    None: they do not say, or cannot be read."""
    if kernel.kind is KernelKind.graph:
        return "body"  # a replay refuses a graph whose schema says less than that
    payloads = [each.payload for each in attachments_of(reader, kernel) if each.role == METADATA]
    if len(payloads) != 1 or reader.payload_info(payloads[0]).raw_bytes > MAX_BYTES[METADATA]:
        return None
    try:
        said = parse_metadata(bytes(reader.payload(payloads[0])), kernel.qualified_name).get("writes")
    except InvalidCapture:
        return None
    return said if said in WRITES_KNOWN_BY else None


def parse_metadata(text: bytes, where: str) -> dict[str, Any]:
    """An attachment of the role metadata. Raises InvalidCapture if it is no JSON object, or nested too deep."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InvalidCapture(f"{where}: its metadata is not JSON: {error}") from None
    if not isinstance(value, dict) or nested_deeper(value, MAX_NESTING):
        raise InvalidCapture(f"{where}: its metadata is not a JSON object that is nested at most {MAX_NESTING} deep")
    return value


DEVICE_KERNELS_ROLE = "device_kernels"
MAX_DEVICE_KERNEL_BYTES = 64 << 20
_DEEPEST = 6

_COUNTS = ("registers_per_thread", "shared_memory_bytes", "bytes", "stream", "total_ns", "min_ns", "max_ns")
_FIGURES = ("blocks_per_sm", "warps_per_sm", "occupancy_percent")
_LISTS = ("grid", "block")
_TEXTS = ("device", "direction", "collective_by")
_MEMBERS = {"name", "category", "collective", "count", "untimed", *_COUNTS, *_FIGURES, *_LISTS, *_TEXTS}


# Parts of the names that vendors' libraries give their kernels, in lower case.
_COPIES = ("memcpy", "memset", "memmove", "copybuffer", "fillbuffer")
_PRODUCTS = ("gemm", "gemv", "splitkreduce", "xmma", "nvjet", "cijk_", "maxwell_s", "volta_", "turing_", "ampere_")


def kernel_tier(name: str) -> str:
    """What a device kernel is, from its name: `copy` (and fill), `gemm` (a matrix product of a library), or `other`."""
    lower = name.lower()
    if any(part in lower for part in _COPIES):
        return "copy"
    return "gemm" if any(part in lower for part in _PRODUCTS) else "other"


def device_kernel_rows(reader: CaptureReader) -> list[dict[str, Any]] | None:
    """The rows, each with every member that FORMAT.md names, null where unknown; None if the capture has no table.

    Raises InvalidCapture for a table that is no such JSON, or longer than 64 MiB, and for damage.
    """
    return _rows(reader, DEVICE_KERNELS_ROLE, MAX_DEVICE_KERNEL_BYTES, _problem)


def configuration_rows(reader: CaptureReader) -> list[dict[str, Any]]:
    """What autotuners had to choose from, a row for each distinct launch; none if the capture has no such table. Raises
    InvalidCapture as `device_kernel_rows` does."""
    return _rows(reader, CONFIGURATIONS, MAX_BYTES[CONFIGURATIONS], _problem_of_choice) or []


def _rows(reader: CaptureReader, role: str, most: int, problem_of: Callable[[Any], str]) -> list[dict[str, Any]] | None:
    """The rows of a table that belongs to no kernel."""
    numbers = [n for n, each in enumerate(reader.attachments) if each is not None and each.role == role]
    if not numbers:
        return None
    payload = reader.attachments[numbers[0]].payload
    what = f"the table of {role.replace('_', ' ')}"
    where = f"{reader.path}: attachment {numbers[0]}"
    length = reader.payload_info(payload).raw_bytes
    if length > most:
        raise InvalidCapture(f"{where}: {what} has {length:,} bytes; the limit is {most:,}")
    try:
        table = parse_json(bytes(reader.payload(payload)))
    except ValueError as error:
        raise InvalidCapture(f"{where}: {what} is not JSON: {error}") from None
    rows = table.get("rows") if isinstance(table, dict) and not nested_deeper(table, _DEEPEST) else None
    if not isinstance(rows, list):
        raise InvalidCapture(f"{where}: {what} has no list of rows")
    for number, row in enumerate(rows):
        problem = problem_of(row)
        if problem:
            raise InvalidCapture(f"{where}: row {number} of {what}: {problem}")
    return rows


def _problem_of_choice(row: Any) -> str:
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in CHOICE):
        return f"has no {', '.join(CHOICE)}"
    choices = row.get("configurations")
    if isinstance(row.get("reason"), str) and choices is None:
        return ""
    if not isinstance(choices, dict) or not all(isinstance(each, dict) for each in choices.values()):
        return "has neither configurations nor a reason"
    return ""


CHOICE = ("source_sha256", "function", "launch", "chosen")


def _problem(row: Any) -> str:
    if not isinstance(row, dict) or not set(row) >= _MEMBERS:
        return "is no object with all members"
    if not isinstance(row["name"], str) or not isinstance(row["category"], str):
        return "its name and category are not text"
    if not all(_is_count(row[name]) for name in ("count", "untimed")) or row["count"] < max(1, row["untimed"]):
        return "its counts are no counts"
    for name in _COUNTS:
        if row[name] is not None and not _is_count(row[name]):
            return f"its {name} is not a whole number"
    for name in _FIGURES:
        value = row[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            return f"its {name} is not a number"
    for name in _LISTS:
        if row[name] is not None and not (isinstance(row[name], list) and all(map(_is_count, row[name]))):
            return f"its {name} is not a list of whole numbers"
    for name in _TEXTS:
        if row[name] is not None and not isinstance(row[name], str):
            return f"its {name} is not text"
    if row["collective"] is not None and not isinstance(row["collective"], dict):
        return "its collective is not an object"
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


BODY_SESSION = "00000000-0000-0000-0000-000000000000"  # a body has no session of its own, and the same ops one form
BODY_VERSION = 1
_SHOWN = 4
_IN_BODIES = (RecordKind.op, RecordKind.event_record, RecordKind.event_wait)
_ARGUMENT = re.compile(r"s([1-9][0-9]{0,17})(?:_[0-9]{1,9})?")


def argument_name(storage: int, which: int) -> str:
    """The name of the argument that is the tensor number `which` on a storage of the body."""
    return f"s{storage}_{which}" if which else f"s{storage}"


def storage_of_argument(name: str) -> int:
    """The storage of the body that an argument is on. Raises ValueError for the name of no argument."""
    found = _ARGUMENT.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!a} names no storage of a graph")
    return int(found.group(1))


def open_body(contents: Mapping[str, bytes]) -> CaptureReader:
    """The body among a kernel's attachments by role, for the caller to close. Raises ValueError if there is none that
    can be read, or if it holds anything but ops of operators and of kernels that are no graphs, and events."""
    import tempfile

    from .reader import open_capture

    if BODY not in contents:
        raise ValueError("the capture has no body of it")
    try:
        with tempfile.TemporaryDirectory(prefix="opreplay-") as folder:
            path = Path(folder, "body.opreplay")
            path.write_bytes(contents[BODY])
            try:
                reader = open_capture(path)
            except OpReplayError as error:
                raise ValueError(f"its body cannot be read ({str(error).replace(str(path), 'body')})") from None
    except OSError as error:
        where = os.environ.get("TMPDIR") or "the folder for temporary files"
        raise CaptureFailed(
            f"the body of a graph needs {len(contents[BODY])} bytes of temporary space in {where}: {error.strerror}; "
            "set TMPDIR to a folder with room"
        ) from None
    try:
        _check(reader)
    except BaseException:
        reader.close()
        raise
    return reader


def _check(reader: CaptureReader) -> None:
    if not reader.complete:
        raise ValueError(f"its body is incomplete ({reader.incomplete_reason})")
    for kernel in reader.kernels:
        if kernel is not None and kernel.kind in (KernelKind.graph, KernelKind.collective):
            raise ValueError(f"its body calls {kernel.qualified_name}, a kernel of the kind {kernel.kind.name}")
    try:
        others = {record.kind.name for record in reader.records() if record.kind not in _IN_BODIES}
    except InvalidCapture as error:
        raise ValueError(f"its body cannot be read ({error})") from None
    if others:
        raise ValueError(f"its body holds records of other kinds than ops and events: {', '.join(sorted(others))}")


def body_metadata(reader: CaptureReader, device: str, streams: int, draws: bool, unchecked: str) -> dict[str, Any]:
    """What is said of a graph besides its ops: the device that it was captured on, the number of streams that its ops
    were issued to, whether they draw random numbers, and why it could not be checked that the graph held nothing but
    them ("" if it was)."""
    ops = (record for record in reader.records() if record.kind is RecordKind.op)
    calls = Counter(reader.kernels[record.signature.kernel].qualified_name for record in ops)
    return {
        "kind": "graph",
        "version": BODY_VERSION,
        "device": device,
        "streams": streams,
        "draws": draws,
        "unchecked": unchecked,
        "ops": sum(calls.values()),
        "kernels": dict(sorted(calls.items())),
    }


def only_inside(reader: CaptureReader, fits: Callable[[str], bool]) -> str:
    """A hint at the bodies whose kernels a selection means, for one that matches nothing else: "" if it means none.
    `fits` judges names, without and with overload."""
    found: dict[str, list[str]] = {}
    for kernel in reader.kernels:
        if kernel is None or kernel.kind is not KernelKind.graph:
            continue
        try:
            inside = parse_body_metadata(contents_of(reader, kernel)).get("kernels")
        except (InvalidCapture, ValueError):
            continue
        for name in inside if isinstance(inside, dict) else ():
            if fits(name.rpartition(".")[0]) or fits(name):
                bodies = (str(number) for number in kernel.attachments if reader.attachments[number].role == BODY)
                found.setdefault(
                    f"{kernel.name} (its body: opreplay-dump --attachment={', '.join(bodies)})", []
                ).append(name)
    if not found:
        return ""
    names = sorted({name for inside in found.values() for name in inside})
    return (
        f"{some_of(names, _SHOWN)} {'is' if len(names) == 1 else 'are'} called only inside of {some_of(found, _SHOWN)}"
    )


def parse_body_metadata(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """The metadata among a graph's attachments. Raises ValueError if there are none of this version."""
    try:
        metadata = parse_json(contents[METADATA])
    except (KeyError, ValueError) as error:
        raise ValueError(f"it has no metadata that can be read ({error!r})") from None
    if not isinstance(metadata, dict) or metadata.get("kind") != "graph" or metadata.get("version") != BODY_VERSION:
        raise ValueError(f"its metadata are not those of a graph of version {BODY_VERSION}")
    if type(metadata.get("streams")) is not int or type(metadata.get("draws")) is not bool:
        raise ValueError("its metadata do not say how many streams it uses, or whether it draws")
    if type(metadata.setdefault("unchecked", "it was recorded without")) is not str:
        raise ValueError("its metadata do not say whether it was checked for work that was not recorded")
    return metadata
