"""Original against substituted kernels: `compare` measures both in turn, `paired` decides which is faster, `report`
prints it. A benchmark against an earlier one, or against itself: `baseline`.
"""
