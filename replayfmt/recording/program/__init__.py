"""The process under capture, and what may happen to it.

`running` runs a program as `python script.py` would. `threads` makes every thread participate, as `thread_attachment`
says. `children` notes child processes, which never record. `process` closes the file on SIGTERM and `exec`, and makes
sure that torch is imported first. `marks` and `module_scopes` turn calls into scopes.
"""
