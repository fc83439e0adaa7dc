"""Assigns an initializer to each storage whose content is neither in the capture nor in a file it refers to.

The assignment is made for all storages when the plan is made. Integers are also made then, so that invalid ones are
found before the first op; floating-point content is made from a seed when its storage is needed, and is the same every
time. What an initializer returns is checked before anything uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash

from replayfmt.errors import OpReplayError, ReplayRefused, first_line
from replayfmt.format.codes import RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import Recipe
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import some_of
from replayfmt.initializers import Call, Demand, Initializer, Registry, Request, Role, TensorInfo, Use
from replayfmt.initializers.demands import Conflict, Unsatisfiable, combine, contradiction, pull_back
from replayfmt.initializers.operator_rules import is_integral
from replayfmt.pytorch.accelerators import undrawn
from replayfmt.pytorch.collectives import LEFT_OUT, are_left_out
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, byte_tensor, host_view, make_view, new_storage, undispatched

from .content_uses import ContentUses, FoundUse, IndexRanges, ValueRange
from .external_files import ExternalFiles
from .kernels import ResolvedKernel
from .scan import MissingContent, Scan

_HOST_DEVICE = torch.device("cpu")


def captured_content(reader: CaptureReader, scan: Scan, files: ExternalFiles, info: TensorInfo) -> torch.Tensor | None:
    """A captured tensor with its content, on the host; None if an op produced it or may have written to it, or if its
    content was not captured."""
    if not info.storage:
        return None
    born = reader.storage(info.storage)
    if scan.is_written(info.storage):
        return None
    storage = new_storage(born.bytes, _HOST_DEVICE)
    if born.origin is StorageOrigin.payload:
        reader.read_payload_into(born.payload, host_view(storage))
    elif born.origin is StorageOrigin.external_file and files.problem(born.payload) is None:
        files.read_into(born.payload, host_view(storage), 0)
    else:
        return None
    return make_view(storage, info.dtype, info.sizes, info.strides, info.offset)


class UnusableContent(Exception):
    """An initializer returned something that cannot be used; the message is a phrase."""


def call_initializer(initializer: Initializer, request: Request) -> Any:
    """The result of an initializer. Raises UnusableContent if it raises."""
    # Draws from PyTorch's generator are the same every time, and do not advance the replay's generators.
    with undrawn([torch.default_generator]):
        torch.default_generator.manual_seed(request.seed & (1 << 63) - 1)
        try:
            return initializer.fill(request)
        except Unsatisfiable as error:
            raise UnusableContent(str(error)) from error
        except Exception as error:
            raise UnusableContent(
                f"initializer {initializer.name} failed: {type(error).__name__}: {first_line(error)}"
            ) from error


def content_by_label(initializer: Initializer, request: Request, content: Any) -> dict[str, torch.Tensor]:
    """The result of an initializer, by label. Raises UnusableContent if it is not what was requested."""
    if not initializer.joint:
        content = {request.label: content}
    if not isinstance(content, Mapping) or set(content) != set(request.wanted):
        got = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise UnusableContent(
            f"initializer {initializer.name} gave {got}; a joint one returns a mapping with exactly "
            f"{sorted(request.wanted)}"
        )
    return dict(content)


def check_content(
    initializer: Initializer,
    request: Request,
    label: str,
    info: TensorInfo,
    content: Any,
    demand: Demand | Conflict | None,
) -> None:
    """Check that content is what was requested. Raises UnusableContent."""
    name = f"initializer {initializer.name} for {label} of {request.call.name}"
    if not isinstance(content, torch.Tensor) or content.layout is not torch.strided:
        raise UnusableContent(f"{name} gave {type(content).__name__}, expected a tensor")
    if content.dtype is not info.dtype or tuple(content.shape) != info.sizes:
        raise UnusableContent(
            f"{name} gave {content.dtype}{list(content.shape)}, expected {info.dtype}{list(info.sizes)}"
        )
    if not isinstance(demand, Demand) or not is_integral(content.dtype) or not content.numel():
        return
    values = content.numpy(force=True)  # torch has no min for uint16, uint32 and uint64
    low, high = int(values.min()), int(values.max())
    if (demand.low is not None and low < demand.low) or (demand.high is not None and high > demand.high):
        raise UnusableContent(
            f"{name} gave values from {low} to {high}, but it is {demand.why}: expected {demand.low} to {demand.high}"
        )


_NOBODY = Call(-1, "", "", {}, (), "", {})
_SHOWN_STORAGES = 6
# The captured content of a tensor, on the host; None if the capture does not have it, or it was written before its use.
ContentLookup = Callable[[TensorInfo], torch.Tensor | None]


@dataclass(frozen=True)
class Initialized:
    """What one initializer fills: a storage, or `tensor` of it, as `argument` of the op at `ordinal` (-1: of no op)."""

    storage: int
    version: int
    bytes: int
    tensor: TensorInfo
    initializer: str
    op: str
    argument: str
    ordinal: int
    why: str


@dataclass
class ChosenInitializer:
    """The initializer chosen for one import of content, and the content if it has already been made."""

    initializer: Initializer
    request: Request
    filled: Initialized
    content: torch.Tensor | None = None


@dataclass
class _Sought:
    """Content that is needed, and what is known about it. `dtype` is None if its uses do not agree on one; `whole` is
    the request for the whole storage, once one was made."""

    entrance: MissingContent
    found: list[FoundUse]
    demand: Demand | Conflict | None
    recipe: Recipe | None
    dtype: torch.dtype | None
    whole: Request | None = None

    @property
    def role(self) -> Role | None:
        """The role of the content, None if its uses do not determine it."""
        return self.demand.role if isinstance(self.demand, Demand) else None

    @cached_property
    def kind(self) -> _SoughtKind:
        """What alone decides which initializers fit."""
        uses = (
            (each.op, each.overload, each.argument, each.label, each.view.dtype)
            for each in self.found
            if _is_direct(each) and each.view is not None
        )
        return self.dtype, self.role, tuple(dict.fromkeys(uses))


_SoughtKind = tuple[torch.dtype | None, Role | None, tuple[tuple[str, str, str, str, torch.dtype], ...]]


def _is_direct(use: FoundUse) -> bool:
    """Whether an op reads the storage's own elements, as an initializer for the operator fills them."""
    return use.view is not None and not use.steps and use.followed


def _fits(initializer: Initializer, dtype: torch.dtype | None, role: Role | None, uses: Sequence[Any]) -> bool:
    """Whether an initializer is for content of this kind."""
    if initializer.whole:
        return dtype is not None and initializer.matches_content(dtype, role)
    return any(initializer.names(*names) and initializer.matches_content(of, role) for *names, of in uses)


class Synthesis:
    """Fills storages whose content was not captured. `findings` lists those that cannot be filled, and what to do about
    it."""

    def __init__(
        self,
        reader: CaptureReader,
        scan: Scan,
        kernels: tuple[ResolvedKernel | str | None, ...],
        registry: Registry,
        captured_content: ContentLookup,
    ) -> None:
        self._reader = reader
        self._registry = registry
        self._captured_content = captured_content
        self._choices: dict[tuple[int, int], ChosenInitializer] = {}
        self._refused: dict[tuple[int, int], str] = {}
        self._notes: list[str] = []
        self._shared: dict[Any, Any] = {}
        self._constants: dict[int, Demand] = {}
        self.findings: list[str] = []
        self._unsaved_states = _unsaved_states(scan)
        entrances = scan.entrances()
        self._wanted = {(each.storage, each.version): each for each in entrances}
        if entrances:
            self._content_uses = ContentUses(reader, scan, kernels, {each.storage for each in entrances})
            with undispatched():
                self._choose(entrances)

    @property
    def initialized(self) -> list[Initialized]:
        """Everything that is filled, in capture order."""
        return [self._choices[key].filled for key in self._wanted if key in self._choices]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: those of initializers, and which of the user's initializers were not needed."""
        used = {id(choice.initializer) for choice in self._choices.values()}
        unused = tuple(
            f"initializer {each.name}, for {each.wanted}, filled nothing: the capture has no such "
            "use, has its content, or another initializer came first"
            for each in self._registry.users
            if id(each) not in used
        )
        if not self.reason:
            return unused
        return (
            *dict.fromkeys(self._notes),
            *unused,
            "values that the program read and branched on are the captured ones, whatever the replay computes",
        )

    @cached_property
    def reason(self) -> str:
        """Why results cannot equal the captured ones; "" if they can."""
        storages = {choice.filled.storage for choice in self._choices.values()}
        parts = []
        if storages:
            parts.append(f"the content of {len(storages)} storage{'s' if len(storages) > 1 else ''} was synthesized")
        if self._unsaved_states:
            one = self._unsaved_states == 1
            states = "a random generator's state" if one else f"{self._unsaved_states} states of random generators"
            parts.append(f"{states}, which the capture lacks, {'was' if one else 'were'} seeded")
        if are_left_out():
            parts.append(LEFT_OUT)
        return " and ".join(parts)

    def chosen(self, storage: int) -> ChosenInitializer | None:
        """What was chosen for the first content of a storage; None if nothing was, or it needs none."""
        return self._choices.get((storage, 0))

    def missing(self, storage: int, version: int) -> str | None:
        """Why a storage cannot be filled; None if it can be, or need not be."""
        return self._refused.get((storage, version))

    def fill(self, storage: int, version: int, target: torch.UntypedStorage) -> None:
        """Fill a storage. Does nothing if it needs no content. Raises ReplayRefused if its initializer fails."""
        choice = self._choices.get((storage, version))
        if choice is None:
            return
        content = choice.content
        if content is None:
            try:
                content = self._make(choice)
            except UnusableContent as wrong:
                raise ReplayRefused(f"{self._reader.path}: {wrong}", (str(wrong),)) from wrong.__cause__
        view = choice.filled.tensor
        length = view.elements * view.dtype.itemsize
        if length < target.nbytes():
            byte_tensor(target).zero_()
        make_view(target, view.dtype, view.sizes, view.strides, view.offset).copy_(content)

    def _choose(self, entrances: list[MissingContent]) -> None:
        """Offer everything that is still unassigned to one initializer after another, in order: otherwise a later
        initializer that fills several arguments together could take content from an earlier one. Later initializers fit
        what is known by then."""
        self._find_constants(entrances)
        wrong: dict[tuple[int, int], str] = {}
        sought: dict[tuple[int, int], _Sought] = {}
        for key, entrance in self._wanted.items():
            try:
                sought[key] = self._seek(entrance)
            except UnusableContent as error:
                wrong[key] = str(error)
        kinds = {each.kind for each in sought.values()}
        for initializer in self._registry:
            fitting = {kind for kind in kinds if _fits(initializer, *kind)}
            for key, each in list(sought.items()) if fitting else ():
                if key not in self._choices and each.kind in fitting:
                    try:
                        self._offer(initializer, each)
                    except UnusableContent as error:
                        wrong[key] = str(error)
                if key in self._choices or key in wrong:
                    del sought[key]
        wrong |= {key: self._nothing_matches(each.found, each.demand, each.dtype) for key, each in sought.items()}
        self._refuse({key: wrong[key] for key in self._wanted if key in wrong})

    def _refuse(self, wrong: Mapping[tuple[int, int], str]) -> None:
        """Report what cannot be filled, with one finding per reason."""
        refusals: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for (storage, version), reason in wrong.items():
            entrance, found = self._wanted[storage, version], self._content_uses.of(storage)
            first = found[0].ordinal if found else entrance.ordinal
            refusals[self._subject(entrance, found), reason].append((storage, first))
            self._refused[storage, version] = f"the content of storage {storage} is not in the capture: {reason}"
        policy = self._reader.session.policies.get("payload", "not recorded")
        for (subject, reason), places in refusals.items():
            self.findings.append(
                f"{_named([storage for storage, _first in places])} ({subject}, first at ordinal "
                f"{places[0][1]}): {reason}; or capture with payload=full (this is payload={policy})"
            )

    def _demand(self, storage: int) -> Demand | Conflict | None:
        """The combined demand of all uses of a storage, None if one of them is not understood."""
        return self._constants.get(storage) or _demanded(storage, self._content_uses.of(storage))

    def _find_constants(self, entrances: list[MissingContent]) -> None:
        """Find a constant for integers from which indices are computed in ways that cannot be traced back: 1, else 0,
        if propagating it forward through all ops shows that it is valid for every use."""
        unsure: set[int] = set()
        decided: dict[int, ValueRange] = {}
        for entrance in entrances:
            found = self._content_uses.of(entrance.storage)
            demand = _demanded(entrance.storage, found)
            if demand is None and _only_computed(found):
                unsure.add(entrance.storage)
            elif isinstance(demand, Demand) and demand.low is not None and demand.high is not None and _integers(found):
                decided[entrance.storage] = ValueRange(demand.low, demand.high)
        for number in (1, 0) if unsure else ():
            contents = decided | dict.fromkeys(unsure, ValueRange(number, number))
            if IndexRanges(self._reader, self._content_uses.calls, contents, self._content_uses.asking(unsure)).holds:
                why = f"used in arithmetic, and {number} is valid for every use"
                self._constants = dict.fromkeys(unsure, Demand(Role.bounded, number, number, why=why))
                return

    def _subject(self, entrance: MissingContent, found: list[FoundUse]) -> str:
        if not found:
            return f"{self._reader.storage(entrance.storage).bytes} bytes"
        first, tensor = found[0], found[0].tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"{dtype}{list(tensor.sizes)}, {first.label} of {first.op}"

    def _seek(self, entrance: MissingContent) -> _Sought:
        """Collect what is known about content that is needed. Raises UnusableContent if its recipe is impossible."""
        found, demand = self._content_uses.of(entrance.storage), self._demand(entrance.storage)
        recipe = self._recipe(entrance)
        return _Sought(entrance, found, demand, recipe, self._dtype(entrance, found, recipe))

    def _offer(self, initializer: Initializer, sought: _Sought) -> None:
        """Assign an initializer that fits, if it accepts. Raises UnusableContent if what it makes is not valid."""
        if initializer.whole:
            assert sought.dtype is not None
            request = sought.whole = sought.whole or self._whole_request(sought, sought.dtype)
        else:
            use = self._match(initializer, sought.found, sought.role)
            if use is None:
                return
            request = self._request(sought, initializer, use)
        try:
            if initializer.accepts is None or initializer.accepts(request):
                self._take(initializer, request, sought)
        except OpReplayError as error:
            raise UnusableContent(f"initializer {initializer.name}: {error}") from error

    def _match(self, initializer: Initializer, found: list[FoundUse], role: Role | None) -> Use | None:
        """The first use that matches an initializer for an operator."""
        for each in found:
            if (
                _is_direct(each)
                and each.view is not None
                and initializer.names(each.op, each.overload, each.argument, each.label)
                and initializer.matches_content(each.view.dtype, role)
            ):
                return self._content_uses.use(each)
        return None

    def _dtype(self, entrance: MissingContent, found: list[FoundUse], recipe: Recipe | None) -> torch.dtype | None:
        """The dtype of a storage as a whole, None if its uses do not agree on one."""
        if recipe is not None:
            return TORCH_DTYPE.get(recipe.dtype)
        dtypes = {each.tensor.dtype for each in found if each.tensor.storage == entrance.storage}
        if not found:
            return torch.uint8
        return next(iter(dtypes)) if len(dtypes) == 1 else None

    def _recipe(self, entrance: MissingContent) -> Recipe | None:
        recipe = self._reader.recipes[entrance.recipe] if entrance.recipe else None
        if recipe is not None:
            problem = contradiction(recipe)
            if problem is not None:
                raise UnusableContent(f"its recipe contradicts itself: {problem}")
        return recipe

    def _whole_request(self, sought: _Sought, dtype: torch.dtype) -> Request:
        entrance, found = sought.entrance, sought.found
        born = self._reader.storage(entrance.storage)
        info = TensorInfo(
            entrance.storage, dtype, (born.bytes // dtype.itemsize,), (1,), 0, str(self._reader.devices[born.device])
        )
        first = self._content_uses.use(found[0]) if found else None
        return self._asked(
            sought, _NOBODY if first is None else first.call, {"storage" if first is None else first.label: info}
        )

    def _request(self, sought: _Sought, initializer: Initializer, use: Use) -> Request:
        assert use.view is not None
        wanted = {use.label: use.view}
        if initializer.joint:
            wanted |= self._companions(initializer, use, sought.entrance.version)
        return self._asked(sought, use.call, wanted)

    def _asked(self, sought: _Sought, call: Call, wanted: Mapping[str, TensorInfo]) -> Request:
        demand = sought.demand if isinstance(sought.demand, Demand) else None
        return Request(
            call,
            wanted,
            tuple(map(self._content_uses.use, sought.found)),
            demand,
            sought.recipe,
            sought.entrance.version,
            self._seed(sought.entrance, sought.recipe),
            self.content,
            self._notes,
            self._registry.options,
            self._shared,
        )

    def _companions(self, initializer: Initializer, use: Use, version: int) -> Mapping[str, TensorInfo]:
        """The other arguments of a call that a joint initializer fills: those without content and without an
        initializer so far."""
        companions: dict[str, TensorInfo] = {}
        for storage, each in self._content_uses.direct_at(use.call.ordinal):
            free = (storage, version) in self._wanted and (storage, version) not in self._choices
            if free and each.view is not None and initializer.names(each.op, each.overload, each.argument, each.label):
                companions[each.label] = each.view
        return companions

    def _seed(self, entrance: MissingContent, recipe: Recipe | None) -> int:
        if recipe is not None:
            return recipe.seed
        return int(xxhash.xxh3_64_intdigest(f"storage {entrance.storage} version {entrance.version}".encode()))

    def _take(self, initializer: Initializer, request: Request, sought: _Sought) -> None:
        """Assign an initializer to a request; makes the content if it has to exist now. Raises UnusableContent."""
        entrance, made, choices = sought.entrance, dict[str, torch.Tensor](), dict[tuple[int, int], ChosenInitializer]()
        eager = initializer.joint or is_integral(request.tensor.dtype)
        if eager and not (initializer.whole and not request.uses):
            made = content_by_label(initializer, request, call_initializer(initializer, request))
        for label, info in request.wanted.items():
            if (info.storage, entrance.version) not in self._wanted:
                continue
            own = sought.demand if info.storage == entrance.storage else self._demand(info.storage)
            if label in made:
                check_content(initializer, request, label, info, made[label], own)
            born = self._reader.storage(info.storage)
            why = own.why if isinstance(own, Demand) else ""
            filled = Initialized(
                info.storage,
                entrance.version,
                born.bytes,
                info,
                initializer.name,
                request.call.name,
                label,
                request.call.ordinal,
                why,
            )
            choices[info.storage, entrance.version] = ChosenInitializer(initializer, request, filled, made.get(label))
        self._choices |= choices

    def _make(self, choice: ChosenInitializer) -> torch.Tensor:
        content = content_by_label(
            choice.initializer, choice.request, call_initializer(choice.initializer, choice.request)
        )
        label, info = choice.request.label, choice.request.tensor
        check_content(choice.initializer, choice.request, label, info, content[label], None)
        return content[label]

    def content(self, info: TensorInfo) -> torch.Tensor | None:
        """A captured tensor's content on the host, as far as it is known before anything runs; initializers use it to
        read the other tensors of their op."""
        choice = self._choices.get((info.storage, 0))
        if choice is None:
            return self._captured_content(info)
        if choice.content is None:
            return None
        storage = new_storage(choice.filled.bytes, _HOST_DEVICE)
        self.fill(info.storage, 0, storage)
        return make_view(storage, info.dtype, info.sizes, info.strides, info.offset).clone()

    def _nothing_matches(
        self, found: list[FoundUse], demand: Demand | Conflict | None, dtype: torch.dtype | None
    ) -> str:
        """Why no initializer matches a storage, and which one to write."""
        unknown = next((each for each in found if _own_demand(each) is None), None)
        if isinstance(demand, Conflict):
            why, example = demand.why, found[0]
        elif unknown is not None:
            how = "" if unknown.followed and not unknown.steps else "what was computed from it is "
            why, example = f"{how}an argument of {unknown.op} for which no safe value is known", unknown
        elif dtype is None:
            why, example = "ops read it as different dtypes", found[0]
        else:
            return f"there is no initializer for {dtype}; give one with --replay-initializer=FILE.py"
        direct = next((each for each in [example, *found] if each.view is not None), None)
        if direct is None:
            return f"{why}; give one with --replay-initializer=FILE.py that is for its dtype"
        return (
            f"{why}; write to FILE.py what it holds and add --replay-initializer=FILE.py: "
            f"from replayfmt.initializers import register; @register({direct.op!r}, argument={direct.argument!r}); "
            "def content(request): return torch.zeros(request.tensor.sizes, dtype=request.tensor.dtype)"
        )


def _unsaved_states(scan: Scan) -> int:
    """How many states of random generators the capture refers to but does not contain."""
    return sum(
        int(scan.signature_calls[number])
        for number, signature in scan.occurring(RecordKind.generator_state)
        if any(node.name == "payload" and node.kind is ValueKind.none for node in signature.args)
    )


def _own_demand(found: FoundUse, *, integral: bool = True) -> Demand | None:
    """What a use demands of the content itself, None if unknown. `integral`: the content are integers."""
    if found.demand is None or (not found.followed and found.demand.role is not Role.number):
        return None
    return pull_back(found.demand, found.steps, integral=integral) if found.followed else found.demand


def _integers(found: list[FoundUse]) -> bool:
    return all(is_integral(each.tensor.dtype) for each in found)


def _only_computed(found: list[FoundUse]) -> bool:
    """Whether the demand on what the op reads is known for all uses, even if the demand on the original content is
    not."""
    return _integers(found) and all(
        each.demand is not None and each.demand.role in (Role.number, Role.index, Role.bounded) for each in found
    )


def _demanded(storage: int, found: list[FoundUse]) -> Demand | Conflict | None:
    """The combined demand of all uses, None if one of them is not understood. Floating-point content satisfies those
    that go with the ones before: it seldom decides which memory is read."""
    floating = any(each.tensor.storage == storage and not is_integral(each.tensor.dtype) for each in found)
    demands = [_own_demand(each, integral=not floating) for each in found]
    known = [each for each in demands if each is not None]
    if len(known) < len(demands) and not floating:
        return None
    if not floating:
        return combine(known) if known else Demand(Role.number)
    together = known[0] if known else Demand(Role.number)
    for each in known[1:]:
        both = combine([together, each])
        together = together if isinstance(both, Conflict) else both
    return together


def _named(storages: list[int]) -> str:
    """`storages 4, 9 and 12 have no content in the capture`."""
    if len(storages) == 1:
        return f"storage {storages[0]} has no content in the capture"
    return f"{len(storages)} storages ({some_of(storages, _SHOWN_STORAGES)}) have no content in the capture"
