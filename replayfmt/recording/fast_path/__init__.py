"""Calls that were seen before, recorded by code made for them: `sites` keeps an inline cache for each call,
`templates` writes the code that a shape of call shares.
"""
