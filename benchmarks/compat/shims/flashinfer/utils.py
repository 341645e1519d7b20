# SPDX-License-Identifier: Apache-2.0
"""Hardware queries of flashinfer's tests."""

import functools

import torch


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def is_confidential_compute() -> bool:
    return False
