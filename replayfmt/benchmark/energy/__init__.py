"""Energy: windows of repeated work (`running` runs them, `windows` is their file and the energy of each), a log of
sampled power (`sampler` writes it in a process of its own, `power_log` reads it as people have it), and the report
that adds single kernels up and compares the sum with the whole model (`energy_report`). All but `running` work
without torch.
"""
