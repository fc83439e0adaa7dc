"""Execution traces (ExecutionTraceObserver). `importer` goes from the file to a capture: `nodes` reads every schema
version, `selection` (with `copies`) chooses those that represent the work, `calls` reads them, `memory` tells which
allocation a tensor is on, `content` what is known of values, `writing` writes the capture.
"""
