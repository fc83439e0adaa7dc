"""From other tools' trace files to captures: what each call was, as far as the trace says, and what had to be assumed.

`operators`, `types` and `arguments` turn what a trace prints of a call into an operator's arguments; `synthesis` writes
calls into a capture; `report` says for each what is exact, inferred or missing. The readers of single trace formats
stand on these. Nothing here knows recording or replay.
"""
