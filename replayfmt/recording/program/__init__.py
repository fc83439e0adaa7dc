"""The process under capture: what `opreplay-capture` runs, and what may happen to it.

`supervisor` runs it from before its first line to after its last, with `running` as `python script.py` would. `threads`
(with `thread_states`) has every thread participate, `children` sees processes that never record (`interpreters` tells
Python programs among them), `termination` and `replacement` close the file on SIGTERM and `exec`. `requests` starts and
ends captures of a running process. `marks` and `module_scopes` make scopes of calls, `torch_first` has torch imported
in time.
"""
