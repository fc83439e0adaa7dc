"""Converts other tools' trace files to captures: each call as far as the trace records it, and what had to be assumed.

`importing` detects a file's kind (`sniffing`) and calls its importer: `kineto`, `execution_trace` or `tracelens`, which
are all built on `common`; `ranks` finds out which file of an archive or a directory belongs to which rank. Nothing here
depends on recording or replay.
"""
