"""vLLM on CPUs: schedules of its attention kernel, slots of new tokens, and handles of oneDNN's matrix products.

A schedule and a handle hold addresses of this process, so nothing but the library itself can make them: its operators
are called with what the call says. What they point to lives as long as the plan that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from replayfmt.errors import UsageError

from ..demands import random_of
from ..initializer import Initializer, Request
from .attention import Batch, batch_for, cache_shape

_ATTENTION = "_C::cpu_attention_with_kv_cache"
_SCHEDULE = "_C::get_scheduler_metadata"
_SLOTS = "_C::compute_slot_mapping_kernel_impl"
_PRODUCT = "_C::onednn_mm"
_LIVING = "what handles and schedules point to"
_PREPARED_SHAPES = 32  # how many kernels a handle caches; what vLLM asks for
_GUESSED_CONTEXT = 1024  # tokens, where neither cache nor table is an argument


def _operator(name: str) -> torch._ops.OpOverload | None:
    """The operator of the library that made the call; None if this build of the library lacks it."""
    packet = getattr(torch.ops._C, name, None)
    return None if packet is None else packet.default


def _keep(request: Request, *objects: Any) -> None:
    request.shared.setdefault(_LIVING, []).extend(objects)


def _schedule(request: Request) -> torch.Tensor:
    """The library's own schedule for the batch that the call's other arguments describe."""
    content = _make_schedule(request)
    if content is None or content.shape != request.tensor.sizes:
        found = "none is made" if content is None else f"one has {content.numel()} bytes"
        raise UsageError(
            f"{request.call.name}: the captured schedule has {request.tensor.elements} bytes, and here "
            f"{found}: another build of the library, or another batch; an initializer for "
            "scheduler_metadata (--replay-initializer) can say what it should be"
        )
    _keep(request, content)
    return content


def _make_schedule(request: Request) -> torch.Tensor | None:
    call, schedule = request.call, _operator("get_scheduler_metadata")
    query, cache, shape = call.tensor("query"), call.tensor("key_cache"), cache_shape(request)
    lengths, starts = request.known("seq_lens"), request.known("query_start_loc")
    if schedule is None or query is None or cache is None or shape is None or lengths is None or starts is None:
        return None
    window, kind = call.integer("sliding_window_size", -1), call.arguments.get("kv_cache_dtype", "auto")
    made = schedule(
        len(lengths),
        query.sizes[1],
        cache.sizes[1],
        query.sizes[2],
        lengths,
        query.dtype,
        starts,
        bool(call.arguments.get("causal", True)),
        window,
        "vec" if query.sizes[2] % 32 == 0 and shape[1] % 32 == 0 else "vec16",  # that every processor has
        False,
        None,
        kind,
    )
    return made if isinstance(made, torch.Tensor) else None


def _can_schedule(request: Request) -> bool:
    return _operator("get_scheduler_metadata") is not None and cache_shape(request) is not None


def _step_lengths(request: Request) -> Mapping[str, torch.Tensor]:
    """Contexts and query starts of a step whose cache is not an argument."""
    batch = _step(request)
    assert batch is not None  # _has_step was called first
    values = {"seq_lens": batch.key_lengths, "query_start_loc": np.concatenate(([0], np.cumsum(batch.query_lengths)))}
    return {label: torch.from_numpy(values[label]).to(info.dtype) for label, info in request.wanted.items()}


def _step(request: Request) -> Batch | None:
    lengths = request.call.tensor("seq_lens")
    count = lengths.elements if lengths is not None else 0
    return batch_for(request, count, count, _GUESSED_CONTEXT) if count else None


def _has_step(request: Request) -> bool:
    starts, lengths = request.call.tensor("query_start_loc"), request.call.tensor("seq_lens")
    return starts is not None and lengths is not None and 0 < lengths.elements == starts.elements - 1


def _new_slots(request: Request) -> Mapping[str, torch.Tensor]:
    """Each token's sequence and position, and a table with blocks of its own for every sequence."""
    batch, table = _slot_batch(request), request.call.tensor("block_table")
    assert batch is not None and table is not None  # _has_slots was called first
    contexts = np.concatenate(
        [np.arange(context - new, context) for context, new in zip(batch.key_lengths, batch.query_lengths, strict=True)]
    )
    random = random_of(request.seed)
    made: dict[str, torch.Tensor] = {}
    for label, info in request.wanted.items():
        if label == "query_start_loc":
            values = np.concatenate(([0], np.cumsum(batch.query_lengths)))
        elif label == "positions":
            values = np.concatenate((contexts, np.zeros(info.elements - len(contexts), np.int64)))
        elif label == "block_table":
            values = random.permutation(table.elements).reshape(table.sizes)
        else:
            values = np.full(info.sizes, -1)  # it writes -1 where there is no slot
        made[label] = torch.from_numpy(values).to(info.dtype).reshape(info.sizes)
    return made


def _slot_batch(request: Request) -> Batch | None:
    call = request.call
    starts, positions, table = call.tensor("query_start_loc"), call.tensor("positions"), call.tensor("block_table")
    block = call.integer("block_size")
    if starts is None or positions is None or table is None or len(table.sizes) != 2 or not block or block < 1:
        return None
    return batch_for(request, starts.elements - 1, positions.elements, table.sizes[1] * block)


def _has_slots(request: Request) -> bool:
    table, starts = request.call.tensor("block_table"), request.call.tensor("query_start_loc")
    if table is None or starts is None or len(table.sizes) != 2:
        return False
    return 0 < starts.elements - 1 <= table.sizes[0] and _slot_batch(request) is not None


def _handle(request: Request) -> torch.Tensor:
    """A matrix product with a weight of its own, for the sizes of the call."""
    given, result, create = request.call.tensor("a"), request.call.tensor("c"), _operator("create_onednn_mm_handler")
    assert given is not None and result is not None and create is not None  # _has_product was called first
    weight = torch.empty((result.sizes[-1], given.sizes[-1]), dtype=torch.float32)
    weight.normal_(0, 0.02, generator=request.generator)
    transposed = weight.to(given.dtype).t()
    _keep(request, transposed)
    return torch.tensor(create(transposed, _PREPARED_SHAPES), dtype=torch.int64).reshape(request.tensor.sizes)


def _has_product(request: Request) -> bool:
    given, result = request.call.tensor("a"), request.call.tensor("c")
    return (
        _operator("create_onednn_mm_handler") is not None
        and request.tensor.elements == 1
        and given is not None
        and result is not None
        and len(given.sizes) == len(result.sizes) == 2
    )


# fmt: off
CPU_ENGINES = (
    Initializer("cpu attention schedule", _schedule, op=_ATTENTION, arguments=("scheduler_metadata",),
                accepts=_can_schedule, description="the library's own schedule for the batch"),
    Initializer("cpu attention step", _step_lengths, op=_SCHEDULE, arguments=("seq_lens", "query_start_loc"),
                joint=True, accepts=_has_step,
                description="a decode step's contexts, unless the annotation says others"),
    Initializer("new slots", _new_slots, op=_SLOTS,
                arguments=("query_start_loc", "positions", "block_table", "slot_mapping"), joint=True,
                accepts=_has_slots, description="tokens of one batch, blocks of each sequence its own"),
    Initializer("oneDNN handle", _handle, op=_PRODUCT, arguments=("handler_tensor",), accepts=_has_product,
                description="a matrix product of the call's sizes with its own weight"),
)
# fmt: on
