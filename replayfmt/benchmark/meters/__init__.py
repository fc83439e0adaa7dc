"""What looks at a replay while it runs: clocks (`stopwatch`), a torch.profiler trace (`profiling`), and the device
kernels that it launched (`device_kernels`).
"""
