"""Profiler traces. `importer` goes from the file to a capture: `events` reads events into columns, `links` and `tree`
determine launchers, callers and the calls that represent the work, `graphs` and `captures` do so for graph launches,
`scopes` for annotations, `windows` the part that is imported, `strays` for work without an operator. `arguments` and
`calls` read the calls, `writing` writes them.
"""
