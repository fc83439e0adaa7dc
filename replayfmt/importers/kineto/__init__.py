"""Profiler traces. `importer` goes from the file to a capture: `events` are read into columns, `links` and `tree` say
who launched and called whom and which calls represent the work, `graphs` and `captures` do so for graph launches,
`scopes` for annotations, `strays` for work without an operator. `arguments` and `calls` read the calls, `writing`
writes them.
"""
