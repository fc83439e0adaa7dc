"""Converts other tools' trace files to captures: each call as far as the trace records it, and what had to be
assumed.

`importing` detects a file's kind, finds out which file of an archive or a directory belongs to which rank, and calls
the importer of the kind: `kineto`, `execution_trace` or `tracelens`, which are all built on `common`.
"""
