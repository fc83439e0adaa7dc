"""Content for operators of serving engines: `attention` decides on the requests of a step and fills what says where
each one's tokens are, `experts` where they go, `cpu_engines` what vLLM on CPUs reads.
"""
