"""What recording and replay both need of PyTorch: operators, devices, memory, settings, digests, the environment.

The only package below recording and replay that imports torch. `cpp_kernels` has what both know of the C++ kernels that
Inductor generates; neither needs Inductor for it.
"""

from __future__ import annotations
