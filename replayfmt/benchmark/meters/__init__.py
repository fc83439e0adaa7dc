"""Instruments that observe a running replay.

A meter (`meter`) measures something between its start and its stop. The clocks (`clocks`) are two of them, and
`registered` lists all that a benchmark has; a `stopwatch` starts and stops them together. To add one, write its module
and put it into that list: it is read once for each timed region, and what it says is in every report, with its unit,
or with the reason why it was not measured. Comparisons of kernels compare times alone.

Beside them: a torch.profiler trace (`profiling`), and the device kernels that an op launched (`device_kernels`).
"""
