"""Running what was prepared: `execute` runs windows with fresh state from `content`; `ready` keeps what is the same in
every run, and `private_maps` finds out whether a file's map still is. `steps` runs one record at a time, for `verdicts`
on every op and for `watching` chosen ones. `isolated` and `copies` run one op on its own, `scope_times` times scopes.
"""
