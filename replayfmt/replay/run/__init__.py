"""Running what was prepared: `execute` runs windows with fresh state from `content`. `steps` runs one record at a time:
for verdicts on every op, and for one op on its own. `run_twice` finds results that no replay reproduces.
"""
