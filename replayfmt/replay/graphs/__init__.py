"""Graphs of a device in a replay.

prepared.py opens the bodies of a capture's graphs and checks them like a capture: before anything runs, with every
finding. steps.py issues a body's ops on the memory that a replay of the graph is given. kernel.py is the kernel of a
graph: it captures its body into a graph of this device, or issues it each time.

whole.py puts a whole replay into one graph of its device, to measure it without the gaps in which the device waits for
the host; admission.py says what keeps a replay from being one.
"""
