"""Graphs of a device in a replay.

prepared.py opens the bodies of a capture's graphs and checks them like a capture: before anything runs, with every
finding. steps.py issues a body's ops on the memory that a replay of the graph is given. kernel.py is the kernel of a
graph: it captures its body into a graph of this device, or issues it each time.
"""
