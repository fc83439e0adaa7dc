"""Test vectors: the inputs and outputs of single ops, as files that need neither OpReplay nor the program.

`export` takes them from a verified replay, `encoding` defines what can be expressed and how, `folder` writes a
directory completely or not at all. docs/vectors.md describes the files.
"""
