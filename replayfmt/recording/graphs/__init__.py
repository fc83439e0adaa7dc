"""Graphs of a device: what is issued while one is captured is its body, each replay is one op.

mode.py sees what is issued during a capture, on all threads that do it. body.py writes that down: a capture of its own,
without content, which becomes an attachment of the graph's kernel. kernel.py has the kernel: its arguments are the
memory that the graph uses and that outlives its capture. hooks.py notices captures and replays, and records the
replays.
"""
