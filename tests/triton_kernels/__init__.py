"""Triton kernels: recorded, replayed, compiled ahead of time, replaced."""
