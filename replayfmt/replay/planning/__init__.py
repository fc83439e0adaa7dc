"""What can be known before the first op runs, piece by piece; preparation.py beside this package goes through it.

`devices` maps devices, `allowed_imports` and `resolve` find `kernels`, `external_files` opens files, `scan` passes once
over the records with the `effects` of each signature and the `sources` of content, `identity` determines which tensor
ids can share one variable, `window_cuts` where windows end. `findings` lists the reasons against a replay, `memory` the
memory it takes, `overview` what the capture holds, `slices` which records some ops need.
"""
