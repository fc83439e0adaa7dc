"""Probes run in a replay: `launches` lays out the launches of a captured kernel, `device` loads and launches machine
code, `collecting` runs the kernel as it was and with a probe, compares the results, and writes the recording of each
launch, and `run_folder` the logs beside it. What is written is what `replayfmt.probes` evaluates.
"""
