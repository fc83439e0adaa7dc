"""What the tests of the failure contract share: one thread, and the tools run in this process."""

from one_thread import one_thread as one_thread
