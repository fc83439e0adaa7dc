"""Keys of a session's policies that more than one part of the library knows.

A trimmed capture keeps the environment of the capture it comes from. What its content was computed by is said here.
"""

from __future__ import annotations

TRACED_DEVICE_NS = "traced-device-ns"  # device time of the whole trace that an import read
OPAQUE_RESULTS = "opaque-results"  # OPERATOR[:INDEX], separated by spaces
TRIMMED_FROM = "trimmed-from"  # session id of the capture it all comes from
TRIMMED_SELECTION = "trimmed-selection"  # the flags that selected it; of several trims, in order
TRIMMED_VERIFIED = "trimmed-verified"  # how the replay that gave its content was verified: bitwise, close, none
TRIMMED_ELSEWHERE = (
    "trimmed-elsewhere"  # why that replay need not equal the capture: another machine, nondeterministic ops
)
TRIMMED_SYNTHESIZED = "trimmed-synthesized"  # that replay synthesized content that the capture does not hold: why
