"""Running what was prepared: `execute` runs windows with fresh state from `content`, `steps` one record at a time for
`verdicts` on every op, `watching` to observe chosen ops. `isolated` and `copies` run one op apart, `scope_times` takes
the time of scopes.
"""
