"""Common parts of all trace readers.

`trace_files` and `json_stream` read files, `arguments` interprets a trace's description of a call, `operators` finds
its operator, `results` its results. `synthesis` writes calls into a capture, `report` says for each what is exact,
inferred or missing.
"""
