# SPDX-License-Identifier: Apache-2.0
"""Communication backends of flashinfer's callers, and its tests' queries about NVLink."""

from typing import Any

import torch.distributed as dist


class TorchDistBackend:
    """Control messages over a torch process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def Get_rank(self) -> int:
        return dist.get_rank(self.group)

    def Get_size(self) -> int:
        return dist.get_world_size(self.group)

    def allgather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def barrier(self) -> None:
        dist.barrier(group=self.group)


class MnnvlMemory:
    """weft's memory needs NVLink inside a host, and no fabric."""

    @staticmethod
    def initialize() -> None: ...

    @staticmethod
    def supports_mnnvl() -> bool:
        return True
