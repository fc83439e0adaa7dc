"""Work that reaches devices as code of the program's own, past the dispatcher, and is recorded as ops.

`triton_launches` sees launches of Triton kernels. Graphs of a device: what is issued while one is captured is its body,
each replay is one op. `graph_capture` sees what is issued during a capture, on all threads that do it. `graph_body`
writes that down: a capture of its own, without content, which becomes an attachment of the graph's kernel.
`graph_replays` notices captures and replays, and records the replays.
"""
