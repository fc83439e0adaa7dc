"""Memory is known by its bytes, however the storages on it lie to each other."""

import numpy as np
import torch

from replayfmt.replay.substitution.judging import MemoryLabels


def test_memory_is_found_by_any_byte_in_common_also_where_what_is_known_overlaps() -> None:
    memory = np.zeros(100, np.uint8)

    def part(start: int, stop: int) -> torch.UntypedStorage:
        return torch.from_numpy(memory[start:stop]).untyped_storage()

    known = MemoryLabels([(part(10, 90), "most"), (part(20, 30), "inner"), (part(95, 98), "end")])
    places = ((0, 10), (0, 11), (50, 60), (85, 95), (90, 95), (97, 100), (98, 100))
    assert [known.find(part(*each)) for each in places] == [None, "most", "most", "most", None, "end", None]
    assert known.find(part(22, 23)) in ("most", "inner")
