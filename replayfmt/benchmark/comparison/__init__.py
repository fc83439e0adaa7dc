"""Original against substituted kernels: `compare` measures both in turn, `paired` decides which is faster, `report`
prints it.
"""
