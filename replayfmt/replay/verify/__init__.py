"""Whether the replay did what was captured: `comparison` checks digests and host reads, `structure` the layout of
results, `run_twice` finds results that no replay reproduces.
"""
