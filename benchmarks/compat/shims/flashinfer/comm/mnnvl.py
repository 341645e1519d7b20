# SPDX-License-Identifier: Apache-2.0
"""Communication backends of flashinfer's callers, and what its tests ask about NVLink."""

from typing import Any

import torch.distributed as dist


class TorchDistBackend:
    """Control messages over a process group of torch's."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def Get_rank(self) -> int:
        return dist.get_rank(self.group)

    def Get_size(self) -> int:
        return dist.get_world_size(self.group)

    def allgather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(found, value, group=self.group)
        return found

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def barrier(self) -> None:
        dist.barrier(group=self.group)


class MnnvlMemory:
    """weft's memory needs NVLink inside a host, and nothing of a fabric's."""

    @staticmethod
    def initialize() -> None: ...

    @staticmethod
    def supports_mnnvl() -> bool:
        return True
