"""What is written in C++, because it must run in threads that never enter Python, or at the speed of memory.

The sources lie beside this module. `building` loads the library that the package carries for the installed PyTorch, or
compiles one at its first use, with the compiler that is there, and keeps it in the user's cache. Where that is not
possible, one line on stderr says why, the capture goes on without, and its session says so. `watching` is the Python
side of `thread_watch.cpp`, `hook` that of `recorder.cpp`, `block_statistics` that of `block_statistics.cpp`: without
the last one, digests are the same and take longer.
"""
