"""Running what was prepared: `execute` runs windows with fresh state from `content`, of which `ready` is what stays as
it is from one run to the next; `private_maps` tells whether a file's map did. `steps` runs one record at a time for
`verdicts` on every op, `watching` to observe chosen ops. `isolated` and `copies` run one op apart, `scope_times` takes
the time of scopes.
"""
