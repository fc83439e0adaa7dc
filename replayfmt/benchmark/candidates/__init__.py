"""Judging kernels against a task: `check_script` with the modules `task_*` is the judge, which also stands in every
task's folder as check.py; `judged` runs it with many candidates and ranks them by the whole workload, `end_to_end`
replays the capture with each in place."""
