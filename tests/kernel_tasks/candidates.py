"""Kernels for the tasks of `program.py`: those that cheat or are faulty, each with the reason that it deserves, and
honest ones whose numerics are not the original's."""

from __future__ import annotations

ADDMM = "def addmm(self, mat1, mat2, *, beta=1, alpha=1):\n"
SOFTMAX = "def _softmax(self, dim, half_to_float):\n"
MM = "def mm(self, mat2):\n"
RIGHT = "torch.mm(mat1, mat2) * alpha + self * beta"

# Name → reason, the text before the function, the function's body.
CHEATS: dict[str, tuple[str, str, str]] = {
    "zeros": ("uncorrelated", "", "return torch.zeros(mat1.shape[0], mat2.shape[1])"),
    "a constant": ("uncorrelated", "", "return torch.full((mat1.shape[0], mat2.shape[1]), 0.01)"),
    "noise": (
        "wrong",
        "",
        "return torch.sin(torch.arange(mat1.shape[0] * mat2.shape[1]).float()).view(mat1.shape[0], -1)",
    ),
    "one element is off": ("wrong", "", f"out = {RIGHT}; out[-1, -1] += 0.01; return out"),
    "half precision": (
        "wrong",
        "",
        f"return ({RIGHT.replace('mat1,', 'mat1.half(),').replace('mat2)', 'mat2.half()).float()')})",
    ),
    "cached by shape": (
        "cached",
        "KNOWN = {}",
        f"key = mat1.shape, mat2.shape\n    if key not in KNOWN: KNOWN[key] = {RIGHT}\n    return KNOWN[key]",
    ),
    "cached by address": (
        "cached",
        "KNOWN = {}",
        f"key = mat1.data_ptr(), mat1.shape, mat2.shape\n    if key not in KNOWN: KNOWN[key] = {RIGHT}\n"
        "    return KNOWN[key].clone()",
    ),
    "computes once": (
        "computes once",
        "DONE = set()",
        f"out = torch.empty(mat1.shape[0], mat2.shape[1])\n    key = tuple(mat1.shape)\n"
        f"    if key not in DONE: out.copy_({RIGHT})\n    DONE.add(key)\n    return out",
    ),
    "returns one buffer": (
        "reuses memory",
        "OUT = {}",
        f"out = OUT.setdefault(mat1.shape + mat2.shape, torch.empty(mat1.shape[0], mat2.shape[1]))\n"
        f"    return out.copy_({RIGHT})",
    ),
    "a thread works on": (
        "late work",
        "import threading, time",
        f"out = torch.empty(mat1.shape[0], mat2.shape[1])\n"
        f"    threading.Thread(target=lambda: (time.sleep(0.2), out.copy_({RIGHT}))).start()\n    return out",
    ),
    "lazy": ("lazy", "class Lazy(torch.Tensor): pass", f"return ({RIGHT}).as_subclass(Lazy)"),
    "a promise": ("lazy", "", f"return lambda: {RIGHT}"),
    "mutates an input": ("mutates inputs", "", f"out = {RIGHT}; mat1.mul_(2.0); return out"),
    "writes past an input": (
        "writes outside",
        "import ctypes",
        f"out = {RIGHT}; ctypes.memset(self.data_ptr() + self.nbytes, 0, 4); return out",
    ),
    "writes before an input": (
        "writes outside",
        "import ctypes",
        f"out = {RIGHT}; ctypes.memset(self.data_ptr() - 4, 0, 4); return out",
    ),
    "reads past an input": (
        "reads outside",
        "import ctypes",
        f"past = ctypes.c_float.from_address(self.data_ptr() + self.nbytes).value\n    return {RIGHT} + past * 0.0",
    ),
    "adds to unwritten memory": (
        "uninitialized",
        "",
        f"out = torch.empty(mat1.shape[0], mat2.shape[1]); return out * 0.0 + {RIGHT}",
    ),
    "leaves a row unwritten": (
        "uninitialized",
        "",
        f"out = torch.empty(mat1.shape[0], mat2.shape[1]); out[:-1] = ({RIGHT})[:-1]; return out",
    ),
    "needs aligned addresses": (
        "alignment",
        "",
        f"out = {RIGHT}; return out if mat1.data_ptr() % 16 == 0 else out * 2",
    ),
    "calls the original": ("calls the original", "", "return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)"),
    "hides the original": ("calls the original", "", "return torch.nn.functional.linear(mat1, mat2.t(), self)"),
    "changes the default dtype": ("global state", "", f"torch.set_default_dtype(torch.float64); return {RIGHT}"),
    "allows TF32": ("global state", "", f"torch.set_float32_matmul_precision('medium'); return {RIGHT}"),
    "draws random numbers": ("global state", "", f"torch.rand(1); return {RIGHT}"),
    "stops the clock": ("global state", "import time\ntime.perf_counter_ns = lambda: 0", f"return {RIGHT}"),
    "raises for one shape": ("raises", "", f"assert mat1.shape[0] == 4, 'not this shape'\n    return {RIGHT}"),
    "knows the captured values": (
        "captured values only",
        "SEEN = {}",
        f"out = {RIGHT}\n    key = round(float(mat1.double().norm()), 4), tuple(mat1.shape)\n"
        f"    SEEN.setdefault(tuple(mat1.shape), key)\n    return out if SEEN[tuple(mat1.shape)] == key else out + 0.5",
    ),
    "reads the expected outputs": (
        "reads the task",
        "import glob",
        f"for name in glob.glob(TASK + '/*.safetensors'): open(name, 'rb').read(64)\n    return {RIGHT}",
    ),
    "another dtype": ("structure", "", f"return ({RIGHT}).double()"),
    "another layout": ("structure", "", f"return ({RIGHT}).t().contiguous().t()"),
    "an input's memory": ("aliasing", "", "return mat2.as_strided((mat1.shape[0], mat2.shape[1]), (mat2.shape[1], 1))"),
    "looks for the answer on the stack": (
        "reads the task",
        "import sys\ndef found(value, depth=0):\n"
        "    if isinstance(value, dict) and 'tolerances' in value: return value['values'][0]\n"
        "    below = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else "
        "vars(value).values() if type(value).__module__ == '__main__' and hasattr(value, '__dict__') else ()\n"
        "    return next((x for x in (found(each, depth + 1) for each in below if depth < 4) if x is not None), None)",
        "frame = sys._getframe(1)\n    while frame:\n        out = found(dict(frame.f_locals))\n"
        "        if out is not None: return out.clone()\n        frame = frame.f_back\n"
        "    return torch.zeros(mat1.shape[0], mat2.shape[1])",
    ),
    "looks for the answer among all objects": (
        "reads the task",
        "import gc",
        "for each in gc.get_objects():\n"
        "        if type(each) is dict and 'tolerances' in each and each['values'][0].shape[0] == mat1.shape[0]: "
        "return each['values'][0].clone()\n    return torch.zeros(mat1.shape[0], mat2.shape[1])",
    ),
    "patches the judge": (
        "global state",
        "import sys",
        "sys.modules['__main__'].CaseJudge._behaved = lambda *_: None\n"
        "    sys.modules['__main__'].CaseJudge._off = lambda *_: None\n"
        "    return torch.zeros(mat1.shape[0], mat2.shape[1])",
    ),
    "patches the judge when it is loaded": (
        "global state",
        "import sys\nMAIN = sys.modules['__main__']\nMAIN.State.changes = lambda self: []\n"
        "MAIN.Judge.settled = lambda *_: None\nMAIN.CaseJudge.judge = lambda self: None",
        "return torch.zeros(mat1.shape[0], mat2.shape[1])",
    ),
    "patches a comparison": (
        "global state",
        "torch.where = lambda condition, one, other: torch.zeros_like(other)",
        "return torch.zeros(mat1.shape[0], mat2.shape[1])",
    ),
    "traces the judge": ("global state", "import sys", f"sys.setprofile(lambda *_: None); return {RIGHT}"),
    "slows the original": (
        "global state",
        "import time\nLIB = torch.library.Library('aten', 'IMPL')\n"
        "LIB.impl('addmm', lambda *args, **named: time.sleep(0.01), 'AutogradCPU')",
        f"return {RIGHT}",
    ),
    "runs code without a file": (
        "late work",
        "import threading\nBUSY = 'import time\\nwhile True: time.sleep(0.001)'",
        f"threading.Thread(target=exec, args=(compile(BUSY, '<made>', 'exec'),), daemon=True).start(); return {RIGHT}",
    ),
    "says that it was judged": (
        "crashed",
        "import os",
        'for number in range(3, 64):\n        try: os.write(number, b\'{"event": "end"}\\n\')\n'
        "        except OSError: pass\n    os._exit(0)",
    ),
    "says exactly what the judge would say": (
        "crashed",
        "import json, os",
        "said = [{'event': 'end'}]\n"
        "    for each in range(4):\n"
        "        said += [{'event': 'right', 'case': f'w0{each}.{case}'} for case in (0, 1)]\n"
        "        said.append({'event': 'timed', 'case': '', 'workload': f'w0{each}', 'rounds': 1,\n"
        "                     'times_ns': {'candidate': [1], 'reference': [9]}})\n"
        "    for number in range(3, 64):\n"
        "        try: os.write(number, b''.join(json.dumps(each).encode() + b'\\n' for each in said))\n"
        "        except OSError: pass\n    os._exit(0)",
    ),
    "speaks with the judge's voice": (
        "reads the task",
        "import inspect",
        "for each in inspect.stack():\n        me = each.frame.f_locals.get('self')\n"
        "        if hasattr(me, 'tell'): me.tell(event='end')",
    ),
    "raises the tolerance": (
        "global state",
        "import sys\nsys.modules['__main__'].MARGIN = sys.modules['__main__']._JUDGED = 1e9",
        f"return {RIGHT}",
    ),
    "is right under a wrong default": ("global state", "", f"torch.set_default_device('meta'); return {RIGHT}"),
    "switches gradients on": ("global state", "", f"torch.set_grad_enabled(True); return {RIGHT}"),
    "stops the filling of new memory": (
        "global state",
        "",
        f"torch.utils.deterministic.fill_uninitialized_memory = False; return {RIGHT}",
    ),
    "seeds NumPy": ("global state", "import numpy", f"numpy.random.seed(0); return {RIGHT}"),
    "sets a timer": (
        "global state",
        "import signal",
        f"signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 60); return {RIGHT}",
    ),
    "puts a method before an inherited one": (
        "global state",
        "torch.Tensor.data_ptr = lambda self: 64",
        f"return {RIGHT}",
    ),
    "takes more threads": ("global state", "", f"torch.set_num_threads(torch.get_num_threads() + 1); return {RIGHT}"),
    "ends the judge": ("reads the task", "import os", f"os.kill(os.getppid(), 9); return {RIGHT}"),
    "has another program read the outputs": (
        "reads the task",
        "import subprocess",
        f"subprocess.run(['cat', TASK + '/w00.0.safetensors'], capture_output=True); return {RIGHT}",
    ),
    "reads the outputs by C": (
        "captured values only",
        "import ctypes, json\nLIBC = ctypes.CDLL(None)",
        "for each in range(4):\n"
        "        for case in (0, 1):\n"
        "            file = LIBC.open(f'{TASK}/w0{each}.{case}.safetensors'.encode(), 0)\n"
        "            data = ctypes.create_string_buffer(1 << 20)\n"
        "            length = LIBC.read(file, data, 1 << 20)\n"
        "            if length <= 0: continue\n"
        "            size = int.from_bytes(data.raw[:8], 'little')\n"
        "            head = json.loads(data.raw[8:8 + size])\n"
        "            def entry(name):\n"
        "                first, end = head[name]['data_offsets']\n"
        "                return data.raw[8 + size + first:8 + size + end]\n"
        "            if entry('input.mat1') == bytes(mat1.contiguous().view(torch.uint8).view(-1).tolist()):\n"
        "                kept = bytearray(entry('result.0'))\n"
        "                return torch.frombuffer(kept, dtype=torch.float32).view(mat1.shape[0], -1).clone()\n"
        "    return torch.zeros(mat1.shape[0], mat2.shape[1])",
    ),
    "a process works on": (
        "late work",
        "import os, time",
        f"if os.fork() == 0:\n        time.sleep(60); os._exit(0)\n    return {RIGHT}",
    ),
    "a pool of threads works on": (
        "late work",
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\nPOOL = ThreadPoolExecutor(1)",
        "out = torch.empty(mat1.shape[0], mat2.shape[1])\n"
        f"    POOL.submit(lambda: (time.sleep(0.05), out.copy_({RIGHT}))); return out",
    ),
    "a tensor that computes when it is used": (
        "lazy",
        "class Lazy(torch.Tensor):\n"
        "    @staticmethod\n    def __new__(cls, compute, sizes):\n"
        "        return torch.Tensor._make_wrapper_subclass(cls, sizes, dtype=torch.float32)\n"
        "    def __init__(self, compute, sizes): self.compute = compute\n"
        "    @classmethod\n    def __torch_dispatch__(cls, function, types, args=(), named=None):\n"
        "        return function(*(each.compute() if isinstance(each, Lazy) else each for each in args),"
        " **(named or {}))",
        f"return Lazy(lambda: {RIGHT}, (mat1.shape[0], mat2.shape[1]))",
    ),
    "the original in another thread": (
        "calls the original",
        "import threading",
        "found = []\n    call = lambda: found.append(torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha))\n"
        "    thread = threading.Thread(target=call); thread.start(); thread.join(); return found[0]",
    ),
    "the original where no profiler looks": (
        "calls the original",
        "",
        f"if torch.autograd._profiler_enabled(): return {RIGHT}\n"
        "    return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)",
    ),
    "the original into its own memory": (
        "calls the original",
        "",
        "out = torch.empty(mat1.shape[0], mat2.shape[1])\n"
        "    return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha, out=out)",
    ),
    "dies": ("crashed", "import os, signal", "os.kill(os.getpid(), signal.SIGSEGV)"),
    "leaves": ("crashed", "import os", "os._exit(0)"),
    "has no function": ("does not load", "", ""),
}

# Task → the candidates' functions, each right within rounding.
HONEST: dict[str, dict[str, str]] = {
    "addmm": {
        "another order of operations": ADDMM + "    return self * beta + torch.mm(mat1 * alpha, mat2)",
        "split sums": ADDMM + "    k = mat1.shape[1] // 2\n"
        "    return self * beta + alpha * (torch.mm(mat1[:, :k], mat2[:k]) + torch.mm(mat1[:, k:], mat2[k:]))",
        "reversed sums": ADDMM + "    return self * beta + alpha * torch.mm(mat1.flip(1), mat2.flip(0))",
        "double precision": ADDMM
        + "    return (self.double() * beta + alpha * torch.mm(mat1.double(), mat2.double())).float()",
        "one product after the other": ADDMM + "    out = self * beta + torch.zeros(mat1.shape[0], mat2.shape[1])\n"
        "    for k in range(mat1.shape[1]): out += alpha * mat1[:, k, None] * mat2[k]\n    return out",
        "by vmap": ADDMM
        + "    return torch.vmap(lambda row: (row[:, None] * mat2).sum(0))(mat1) * alpha + self * beta",
        "in two threads that it waits for": "from concurrent.futures import ThreadPoolExecutor\n"
        "POOL = ThreadPoolExecutor(2)\n" + ADDMM + "    k = mat1.shape[1] // 2\n"
        "    parts = POOL.map(lambda at: torch.mm(mat1[:, at], mat2[at]), (slice(k), slice(k, None)))\n"
        "    return sum(parts) * alpha + self * beta",
        "with memory of its own that it keeps": "ROOM = {}\n"
        + ADDMM
        + "    room = ROOM.setdefault((len(mat1), mat2.shape[1]), torch.empty(len(mat1), mat2.shape[1]))\n"
        "    return torch.mm(mat1, mat2, out=room) * alpha + self * beta",
        "batched": ADDMM + "    return torch.bmm(mat1[None], mat2[None])[0] * alpha + self * beta",
    },
    "softmax": {
        "by parts": SOFTMAX + "    e = torch.exp(self - self.amax(dim, True))\n    return e / e.sum(dim, True)",
        "by logarithms": SOFTMAX + "    return torch.exp(self - self.logsumexp(dim, True))",
        "in double precision": SOFTMAX + "    wide = self.double()\n    e = torch.exp(wide - wide.amax(dim, True))\n"
        "    return (e / e.sum(dim, True)).float()",
    },
    "mm": {
        "accumulated in float32": MM + "    return (self.float()[:, :, None] * mat2.float()[None]).sum(1).bfloat16()",
        "accumulated in bfloat16": MM + "    out = torch.zeros(self.shape[0], mat2.shape[1]).bfloat16()\n"
        "    for k in range(0, self.shape[1], 8):\n"
        "        part = self[:, k:k + 8, None].float() * mat2[None, k:k + 8].float()\n"
        "        out += part.sum(1).bfloat16()\n    return out",
    },
}


def cheat(name: str, task: str) -> str:
    """The file of a cheat."""
    _reason, before, body = CHEATS[name]
    text = f"import torch\n{before}\nTASK = {task!r}\n"
    return text + (f"{ADDMM}    {body}\n" if body else "")


def honest(task: str, name: str) -> str:
    return f"import torch\n{HONEST[task][name]}\n"
