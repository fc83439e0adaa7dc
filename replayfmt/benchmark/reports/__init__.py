"""Results for readers: `rows` as Google Benchmark's JSON and CSV, `console` as a table, with the `machine` they were
measured on, `caveats` about their reliability, and `units`.
"""
