"""Execution traces (ExecutionTraceObserver). `importer` goes from the file to a capture: `nodes` reads every schema
version, `selection` (with `copies`) chooses the nodes that represent the work, `calls` reads them, `memory` determines
which allocation a tensor is on, `content` what is known about values, `writing` writes the capture.
"""
