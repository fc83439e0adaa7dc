"""Content for operators of serving engines: `batches` decides on the requests of a step, `attention`, `caches`,
`packed` and `ragged` fill what says where each one's tokens are, `experts` where they go, `cpu_engines` what vLLM on
CPUs reads.
"""
