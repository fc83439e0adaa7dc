"""docs/serving.md does what it says."""

from pathlib import Path

from project.test_documents import does_what_it_says


def test_the_page_about_serving_does_what_it_says(tmp_path: Path) -> None:
    does_what_it_says("docs/serving.md", tmp_path)
