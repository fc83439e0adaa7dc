"""What the tests of safety share: one thread, the tools run in this process, and captures to be changed."""

from one_thread import one_thread as one_thread
