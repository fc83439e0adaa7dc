"""Rules for a storage's row about its first content: the same for the writer's columns and for those of a file.

The column storage_payload holds the id of a payload, a range or a recipe, as the origin says. A range has exactly the
storage's length; a recipe fills it with as many whole elements as it has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codes import ITEM_BYTES, DType, StorageOrigin

_ITEM_SIZES = np.array([ITEM_BYTES[dtype] for dtype in sorted(DType)], np.int64)


@dataclass(frozen=True)
class Referable:
    """What there is to refer to: the number of payloads, the length of each range, dtype and number of elements of each
    recipe, by id from 1."""

    payloads: int
    range_bytes: np.ndarray
    recipe_dtype: np.ndarray
    recipe_elements: np.ndarray


def storages_problem(origin: np.ndarray, payload: np.ndarray, length: np.ndarray, contents: Referable) -> str:
    """What is wrong with some storages, or ""."""
    plain = origin < StorageOrigin.external_file
    embedded = payload[plain]
    if len(embedded) and int(embedded.max()) > contents.payloads:
        return f"storage_payload holds {int(embedded.max())}, allowed 0..{contents.payloads}"
    if ((origin[plain] == StorageOrigin.payload) != (embedded != 0)).any():
        return "storages have a payload exactly if their origin is payload; one here does not"
    if plain.all():
        return ""
    return (
        _other(origin, payload, StorageOrigin.external_file, len(contents.range_bytes))
        or _other(origin, payload, StorageOrigin.initializer, len(contents.recipe_elements))
        or _ranges_problem(origin, payload, length, contents)
        or _recipes_problem(origin, payload, length, contents)
    )


def _other(origin: np.ndarray, payload: np.ndarray, kind: StorageOrigin, count: int) -> str:
    ids = payload[origin == kind]
    if len(ids) and not (int(ids.min()) >= 1 and int(ids.max()) <= count):
        return (
            f"storage_payload holds {int(ids.min())}..{int(ids.max())} where the origin is {kind.name}; "
            f"allowed 1..{count}"
        )
    return ""


def _ranges_problem(origin: np.ndarray, payload: np.ndarray, length: np.ndarray, contents: Referable) -> str:
    rows = origin == StorageOrigin.external_file
    ranges = contents.range_bytes[payload[rows].astype(np.int64) - 1].astype(np.uint64)
    wrong = ranges != length[rows]
    if wrong.any():
        return (
            f"a storage of {int(length[rows][np.argmax(wrong)])} bytes comes from a range of "
            f"{int(ranges[np.argmax(wrong)])}"
        )
    return ""


def _recipes_problem(origin: np.ndarray, payload: np.ndarray, length: np.ndarray, contents: Referable) -> str:
    rows = origin == StorageOrigin.initializer
    recipes = payload[rows].astype(np.int64) - 1
    elements = length[rows].astype(np.int64) // _ITEM_SIZES[contents.recipe_dtype[recipes]]
    wrong = elements != contents.recipe_elements[recipes].astype(np.int64)
    if wrong.any():
        at = int(np.argmax(wrong))
        return (
            f"a storage of {int(length[rows][at])} bytes has room for {int(elements[at])} elements, its recipe has "
            f"{int(contents.recipe_elements[recipes][at])}"
        )
    return ""
