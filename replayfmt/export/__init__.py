"""From captures to what other tools read: TraceLens EventReplay IR with a script that replays it.

Reads captures; knows nothing of recording or replay.
"""
