# SPDX-License-Identifier: Apache-2.0
"""Just-in-time compilation with NVRTC or the system's C++ compiler, a disk cache and a launcher.

Importing this package does not need CUDA: `nvrtc`, `module` and `launch` load it at first use.
"""

from weft.jit.cache import Cache
from weft.jit.host import HOST_OPTIONS, compile_shared
from weft.jit.launch import Launcher
from weft.jit.module import CudaModule, Function, current_arch
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin

__all__ = [
    "CUDA_OPTIONS",
    "HOST_OPTIONS",
    "Cache",
    "CudaModule",
    "Function",
    "Launcher",
    "compile_cubin",
    "compile_shared",
    "current_arch",
]
