"""Tests of the project as a whole: its imports, its wheel, its documents, its files."""
