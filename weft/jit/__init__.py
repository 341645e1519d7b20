"""From text to a callable: NVRTC or the system's C++ compiler, one disk cache, one launcher.

Nothing here needs CUDA to be imported; `nvrtc`, `module` and `launch` look for it at first use.
"""

from weft.jit.cache import Cache, Entry
from weft.jit.host import HOST_OPTIONS, compile_program, compile_shared
from weft.jit.launch import Launcher
from weft.jit.module import CudaModule, Function, current_arch
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin

__all__ = [
    "CUDA_OPTIONS",
    "HOST_OPTIONS",
    "Cache",
    "CudaModule",
    "Entry",
    "Function",
    "Launcher",
    "compile_cubin",
    "compile_program",
    "compile_shared",
    "current_arch",
]
