"""Timing a replay: measure (the loop), scopes, statistics; meters, single ops, comparisons and reports in packages.

`measure.measure(plan, options)` gives a `Run`, `reports.rows.make_report(run, plan)` its rows. Imports format,
pytorch and replay; nothing imports it but the tools.
"""
