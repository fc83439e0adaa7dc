"""The process under capture: how `opreplay-capture` runs it, and what may happen to it.

`supervisor` captures it from before its first line to after its last, and `running` runs it as `python script.py`
would. `threads` (with `thread_states`) makes every thread participate, `children` notes child processes, which never
record (`interpreters` recognizes Python programs among them), `termination` and `replacement` close the file on SIGTERM
and `exec`. `requests` starts and ends captures of a running process. `marks` and `module_scopes` turn calls into
scopes, `torch_first` makes sure that torch is imported first.
"""
