"""What is written in C++, because it must run in threads that never enter Python.

The sources lie beside this module. `building` compiles one at its first use, with the compiler that is there and the
headers of the installed PyTorch, keeps the library in the user's cache, and loads it. Where that is not possible, one
line on stderr says why, the capture goes on without, and its session says so. `watching` is the Python side of
`thread_watch.cpp`.
"""
