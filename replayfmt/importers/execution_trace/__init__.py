"""Execution traces (ExecutionTraceObserver). `importer` goes from the file to a capture: `nodes` reads every schema
version, `selection` chooses the nodes that represent the work, `calls` reads them, and `allocations` determines which
allocation a tensor is on and what is known about its content.
"""
