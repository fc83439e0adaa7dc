"""What tests of comparisons share: one thread, so that two are another way to run."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from .models import captured


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """For all of them: what one test captures another one replays."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The capture of a model without a fault, made once."""
    folder = tmp_path_factory.mktemp("intact")
    return cache(lambda model: captured(folder / f"{model}.opreplay", model))
