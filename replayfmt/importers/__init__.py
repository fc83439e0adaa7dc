"""From other tools' trace files to captures: each call as far as the trace records it, and what had to be assumed.

`importing` looks into a file (`sniffing`) and imports it by its kind: `kineto`, `execution_trace` or `tracelens`, which
all stand on `common`; `ranks` tells which file of an archive or a directory is which rank's. Nothing here knows
recording or replay.
"""
