"""Operations on whole captures: `verify` goes through every frame, `check` reports on it, `recover` makes a valid
capture of one that was never closed, `add_digests` gives external files digests.
"""
