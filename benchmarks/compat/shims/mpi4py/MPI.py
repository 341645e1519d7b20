# SPDX-License-Identifier: Apache-2.0
"""COMM_WORLD of the ranks that the runner started, all on one host."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from functools import cached_property
from typing import Any

from torch.distributed import TCPStore

COMM_TYPE_SHARED = 1


class _World:
    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.calls = 0

    @cached_property
    def store(self) -> TCPStore:
        port = int(os.environ["RIVALS_STORE_PORT"])
        wait = timedelta(seconds=120)
        return TCPStore("127.0.0.1", port, self.size, is_master=self.rank == 0, timeout=wait)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, value: Any) -> list[Any]:
        self.calls += 1
        self.store.set(f"{self.calls}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self.store.get(f"{self.calls}/{r}")) for r in range(self.size)]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.rank == root else None)[root]

    def barrier(self) -> None:
        self.allgather(None)

    Barrier = barrier

    def Split_type(self, kind: int) -> _World:
        return self


COMM_WORLD = _World()
