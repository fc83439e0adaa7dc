"""Timing a replay: measure (the loop), stopwatch, scopes, statistics, caveats, report and console, profiling.

`measure.measure(plan, options)` gives a `Run`, `report.make_report(run, plan)` its rows. Imports format, pytorch and
replay; nothing imports it but the tools.
"""
