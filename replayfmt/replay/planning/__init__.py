"""What can be known before the first op runs, piece by piece; preparation.py beside this package goes through it.

`devices` maps devices and watches their memory, `external_files` opens files, `kernels` defines what a replay needs of
a kernel and what its calls do, `scan` passes once over the records and determines where windows end, `records` says
what records hold and which of them some ops need. `content_uses` finds what ops ask of content that was not captured,
and `synthesis` assigns an initializer to it. `findings` lists the reasons against a replay.
"""
