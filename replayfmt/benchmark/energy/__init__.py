"""Energy: windows of repeated work (`running` runs them, `windows` is their file), a log of sampled power (`power_log`
reads it as people have it), the integral of one over the other (`integration`), and the report that adds single kernels
up and compares the sum with the whole model (`report`). All but `running` work without torch, on any machine, later.
"""
