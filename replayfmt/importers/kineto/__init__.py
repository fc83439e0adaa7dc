"""Profiler traces. `importer` goes from the file to a capture: `events` reads events into columns, `tree` determines
launchers, callers and the calls that represent the work, `graphs` does so for graph launches, `device_work` has what
ran on devices, with or without an operator, `calls` resolves the operators, and `writing` writes the capture.
"""
