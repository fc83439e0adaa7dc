"""The parts written in C++, because they must run in threads that never enter Python, or at memory speed.

The sources are in this folder. `building` loads the library that the package ships for the installed PyTorch. If there
is none, it compiles one at first use with the installed compiler and keeps it in the user's cache. If that is not
possible, one line on stderr says why, the capture continues without the library, and its session says so. `watching` is
the Python side of `thread_watch.cpp`, `hook` that of `recorder.cpp`; `replayfmt.pytorch.tensors.digests` has that of
`block_statistics.cpp`, and `replayfmt.dump.expansion` that of `row_expansion.cpp`. Without the last two, digests and
dumps are the same but take longer. These two need no PyTorch, and fit every one.
"""

from __future__ import annotations

RECORDER_KEY = "Fake"  # the native recorder's dispatch key: kKey in watched.h
