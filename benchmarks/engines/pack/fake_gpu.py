# SPDX-License-Identifier: Apache-2.0
"""Import this first on machines without a GPU: torch.cuda answers like one H200.

It serves imports and builds; nothing can run on it.
"""

import types

import torch

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=143771 << 20,
    warp_size=32,
    gcnArchName="",
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
)
ANSWERS = {
    "is_available": True,
    "device_count": 8,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_properties": PROPERTIES,
    "get_device_name": PROPERTIES.name,
    "mem_get_info": (140 << 30, 141 << 30),
}
for name, answer in ANSWERS.items():
    setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
