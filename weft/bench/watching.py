"""Kernels that write down when something happened: behind another one, or as soon as it is seen."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def stamp(to):
    """The time, in ns."""
    tl.store(to, globaltimer())


@triton.jit
def watch(addresses, to, limit_ns):
    """The time at which the word at each address is no longer -1; 0 if it still is at the end."""
    which = tl.program_id(0)
    word = tl.load(addresses + which).to(tl.pointer_type(tl.int32))
    now = globaltimer()
    end = now + limit_ns
    value = tl.load(word, volatile=True)
    while (value == -1) & (now < end):
        value = tl.load(word, volatile=True)
        now = globaltimer()
    tl.store(to + which, tl.where(value == -1, 0, now))
