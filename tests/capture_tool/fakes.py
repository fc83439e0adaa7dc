"""A recorder that only writes down what it is told, for the hooks around it."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.recording.special_values import plain_parts


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.recorder.pauses:
            self.recorder.log.append(("op", str(func)))
        return func(*args, **(kwargs or {}))


class FakeRecorder:
    """`log` has what happened: ("op", name), ("unsupported", reason, op, detail), ("host_read", method, values),
    ("mark", data pointer)."""

    def __init__(self):
        self.log = []
        self.pauses = 0
        self.mode = _Mode(self)

    def launching(self):
        return self.recording()

    def recording(self):
        depth = torch._C._len_torch_dispatch_stack()
        return not self.pauses and any(torch._C._get_dispatch_stack_at(i) is self.mode for i in range(depth))

    def mode_here(self):
        return self.mode if self.recording() else None

    def hidden(self):
        return self.paused()

    @contextlib.contextmanager
    def paused(self):
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def watch(self, storage, *, windowed=True):
        pass

    def attempt(self, step, *args):
        return step(*args)

    def unsupported(self, reason, op, detail):
        self.log.append(("unsupported", reason, op, detail))

    unsupported_throughout = unsupported

    def host_read(self, method, tensor):
        if self.recording() and plain_parts(tensor):
            with self.paused(), torch.utils._python_dispatch._disable_current_modes():
                self.log.append(("host_read", method, tensor.detach().clone().tolist()))

    def mark_outside_write(self, tensor):
        self.log.append(("mark", tensor.data_ptr()))

    def take(self, *kinds):
        """What happened since the last time, of these kinds, shortened to what a test compares."""
        taken, self.log[:] = [event for event in self.log if not kinds or event[0] in kinds], []
        return taken
