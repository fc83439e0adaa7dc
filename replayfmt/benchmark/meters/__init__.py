"""Instruments that observe a running replay.

A meter (`meter`) measures something between its start and its stop. The clocks (`clocks`) are two of them, and
`registered` lists all meters of a benchmark; a `stopwatch` starts and stops them together. To add one, write its module
and add it to that list: it is read once per timed region, and its reading is in every report, with its unit, or with
the reason why it was not measured. Comparisons of kernels compare only times.

Beside them: a torch.profiler trace (`profiling`), and the device kernels that an op launched (`device_kernels`).
"""
