"""The page about probes does what it says."""

from pathlib import Path

import pytest
from project.test_documents import does_what_it_says


@pytest.mark.slow
def test_the_page_about_probes_does_what_it_says(tmp_path: Path) -> None:
    does_what_it_says("docs/probing.md", tmp_path)
