"""Test vectors: what single ops take and give, as files that need neither OpReplay nor the program.

`export` takes them out of a verified replay, `encoding` says what can be expressed and how, `folder` writes a directory
whole or not at all. docs/vectors.md describes the files.
"""
