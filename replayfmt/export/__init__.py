"""From captures to other tools' formats: TraceLens EventReplay IR with a script that replays it.

Reads captures; does not depend on recording or replay.
"""
