"""From captures to other tools' formats: TraceLens EventReplay IR with a script that replays it, tables, timelines.

`replay_zip` and what it uses write calls for machines without OpReplay; `tables` writes rows for spreadsheets and data
frames, and needs no PyTorch; `perfetto` writes timelines. Reads captures; does not depend on recording or replay.
"""
