"""What recordings say: one module for each kind of evaluation, each a function that returns a result.

A result has `tables` (one row for the whole first), `notes` (what a reader must know to understand the figures) and
what its picture needs. Each name of a column ends in its unit. What the recording does not tell is an `Unmeasured`
with the reason, never 0. `tables` makes text and JSON of any of them; `block_times` is what `schedule` and `warps`
share."""
