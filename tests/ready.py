# SPDX-License-Identifier: Apache-2.0
"""What a fork server of ranks has imported and found out, so that no rank has to by itself.

For a small test that is most of a rank's life: modules that tests share; what torch imports late
(`assert_close` the tensors of torch.distributed, a rank's first MoE layer sympy); and what the keys
of compiled code are made of. Only fork servers import this.
"""

from __future__ import annotations

import contextlib
import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import sympy  # noqa: F401
import torch
import torch.distributed.tensor  # noqa: F401

from tests import patience, rounds, sums  # noqa: F401
from tests.moe import layers  # noqa: F401
from weft.errors import CompileError
from weft.jit.host import compiler_identity, cpu_identity, find_compiler
from weft.jit.source import header_digest

header_digest()
cpu_identity()
with contextlib.suppress(CompileError):  # without a compiler, tests say so
    compiler_identity(find_compiler())
# As in conftest.py: torch starts with another seed in every process.
torch.manual_seed(0)
# A full collection in a rank would look through all that is imported here, and copy its pages.
gc.collect()
gc.freeze()
