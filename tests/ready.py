# SPDX-License-Identifier: Apache-2.0
"""Modules and lookups that the fork server of ranks prepares, so that no rank repeats them.

They take most of the time of a small test.
"""

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
