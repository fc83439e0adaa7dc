"""Common parts of the readers of all traces.

`trace_files` and `json_stream` read files, `types`, `values` and `arguments` what a trace prints of a call, `operators`
(with `schema_types`) finds the operator it was, `results` what it returned. `synthesis` writes calls into a capture,
`report` says for each what is exact, inferred or missing.
"""
