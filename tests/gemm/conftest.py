# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the emulated GEMMs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because others would spin beside the emulator's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
