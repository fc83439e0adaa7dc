"""Whether the replay did what was captured: `comparison` of digests and host reads, `structure` of results with the
captured shapes, `run_twice` for results that no replay reproduces.
"""
