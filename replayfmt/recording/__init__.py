"""A running program's operator calls, written to a capture.

From the bottom up: `options`, `known_files` and `patches`; `content` and `stream` (what is in memory, and the records
on their way to the file); `kernels` and `storages`; `arguments` and `calls` (one call: its record before and after);
`inductor` and `undispatched`; `capture_session`, which puts these together for one capture. Above it are those who see
the program's work and give it to the session: `dispatch`, `code` and `hooks`; then `program` (threads, children, the
end of the process) and `recorder`, which starts and ends a capture; `requests` and `supervisor` do that from outside.
"""
