# SPDX-License-Identifier: Apache-2.0
"""Starts new scheduler processes for dead ranks of a server with --elastic-ep-backend weft.

SGLang's data-parallel controller starts the schedulers, and starts the replacements too when the
survivors report deaths. A replacement loads the model and captures graphs alone, while the others
serve; `weft.plugins.sglang.elastic` then lets it join. SGLang runs it as one that recovers
(--elastic-ep-join-mode recover). It is no member of the survivors' torch process groups. With the
flags that weft requires, SGLang needs them only to start.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import OutOfOrder
from weft.plugins.engine_api import ExpectedAPI
from weft.plugins.sglang.hooks import NAME, RUNNER, SRT, Hook

MAX_FAILURES = 3  # replacements of a rank that may fail in a row
STABLE_SECONDS = 600.0  # a replacement that serves for less has failed
# A replacement fails if it loads this many times as long as the server did, and at least so long.
LOAD_FACTOR, MIN_LOAD_LIMIT = 3.0, 600.0
_DEVICES = "CUDA_VISIBLE_DEVICES"
_WRITER = 6  # position of pipe_writer in the arguments of run_scheduler_process
_BACKEND = "weft_lone"  # torch backend of LoneProcessGroup

_log = logging.getLogger(__name__)


# The controller's process.


class _Launch:
    """Arguments of a scheduler's process, and its visible GPUs."""

    def __init__(self, run_scheduler: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.run_scheduler, self.devices = run_scheduler, os.environ.get(_DEVICES)
        self.before, self.after = args[:_WRITER], args[_WRITER + 1 :]

    def start(self, address: str, writer: Connection) -> Any:
        """Start a process that runs the scheduler again and joins at `address`."""
        from sglang.srt.managers.data_parallel_controller import mp
        from sglang.srt.runtime_context import get_exec
        from sglang.srt.utils import numa_utils
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        process = mp.Process(
            target=run_replacement,
            args=(address, self.run_scheduler, *self.before, writer, *self.after),
        )
        server_args, gpu_id = self.before[0], self.before[2]
        memory_saver = TorchMemorySaverAdapter.create(
            enable=get_exec().features.enable_memory_saver
        )
        with (
            _visible_devices(self.devices),
            memory_saver.configure_subprocess(),
            numa_utils.configure_subprocess(server_args, gpu_id),
        ):
            process.start()
        return process


class Replacements:
    """Starts replacements in the controller's process."""

    def __init__(self) -> None:
        self.launches: dict[int, _Launch] = {}  # by rank
        self.load_limit = MIN_LOAD_LIMIT  # seconds until a process must have loaded
        self._lock = threading.Lock()
        self._addresses: set[str] = set()  # of all meetings so far: reports may be late
        self._failures: Counter[int] = Counter()  # in a row, by rank
        self._joining: dict[int, Any] = {}  # processes that have not joined yet, by rank
        self._join_times: dict[int, float] = {}  # of the ranks that have been replaced

    def update(self, processes: list[Any], active: list[bool], address: str | None) -> None:
        """Start a process for each dead rank if the survivors have opened a new meeting.

        Replacements for an earlier meeting end, because all of them have to join at once.

        Args:
            processes: Processes of the schedulers by rank, which are replaced in place.
            active: Whether each rank is alive.
            address: Address of the survivors' meeting, or None.
        """
        now = time.monotonic()
        dead = [rank for rank, is_active in enumerate(active) if not is_active]
        with self._lock:
            for rank in self._joining.keys() - set(dead):
                del self._joining[rank]
                self._join_times[rank] = now
            if not dead or not address or address in self._addresses:
                return
            self._addresses.add(address)
            for rank in dead:
                if rank in self._joining:
                    self._failures[rank] += not processes[rank].is_alive()
                elif rank in self._join_times:
                    is_stable = now - self._join_times.pop(rank) >= STABLE_SECONDS
                    self._failures[rank] = 0 if is_stable else self._failures[rank] + 1
                processes[rank].kill()
                processes[rank].join()
            self._joining.clear()
            failed = [rank for rank in dead if self._failures[rank] >= MAX_FAILURES]
            if failed:
                _log_given_up(failed, dead)
                return
            for rank in dead:
                process, reader = self._launch(rank, address, processes)
                threading.Thread(
                    target=self._watch,
                    args=(rank, address, processes, process, reader),
                    name=f"weft-replacement-{rank}",
                    daemon=True,
                ).start()

    def _launch(self, rank: int, address: str, processes: list[Any]) -> tuple[Any, Connection]:
        """Start a process and return it, with the pipe that tells when it has loaded."""
        from sglang.srt.managers.data_parallel_controller import mp

        reader, writer = mp.Pipe(duplex=False)
        process: Any = self.launches[rank].start(address, writer)
        processes[rank] = self._joining[rank] = process
        writer.close()
        _log.warning("rank %d has died: process %d will replace it", rank, process.pid)
        return process, reader

    def _watch(
        self, rank: int, address: str, processes: list[Any], process: Any, reader: Connection
    ) -> None:
        """Log what a replacement does, and start another one if it ends before it has joined.

        A scheduler ends with the thread that has started it, so this thread outlives its processes.
        """
        while True:
            with reader, contextlib.suppress(EOFError):
                if reader.poll(self.load_limit):
                    reader.recv()
                    _log.info("process %d has started and joins as rank %d", process.pid, rank)
                else:
                    _log.error(
                        "process %d has not loaded within %.0f s and is killed",
                        *(process.pid, self.load_limit),
                    )
                    process.kill()
            wait([process.sentinel])
            successor = self.restart(rank, address, processes, process)
            if successor is None:
                return
            process, reader = successor

    def restart(
        self, rank: int, address: str, processes: list[Any], process: Any
    ) -> tuple[Any, Connection] | None:
        """Start another process in place of one that has ended before it has joined.

        Returns None if the process had joined, has been replaced already, or was the last that may
        fail. Then end the others too: they would wait for it.
        """
        with self._lock:
            if rank not in self._joining or self._joining[rank] is not process:
                return None
            self._failures[rank] += 1
            _log.error(
                "process %d ended before it could replace rank %d: its log says why",
                *(process.pid, rank),
            )
            if self._failures[rank] < MAX_FAILURES:
                return self._launch(rank, address, processes)
            waiting = sorted(self._joining)
            del self._joining[rank]
            for other in self._joining.values():
                other.kill()
            self._joining.clear()
        _log_given_up([rank], waiting)
        return None


def _log_given_up(failed: list[int], dead: list[int]) -> None:
    _log.error(
        "%d replacements of rank %s have failed: the server continues without rank %s",
        *(MAX_FAILURES, _format(failed), _format(dead)),
    )


def _format(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


_replacements = Replacements()


def record_launches(original: Callable[..., None], controller: Any, *args: Any) -> None:
    """Record how the schedulers are started; wraps launch_tensor_parallel_group."""
    from sglang.srt.runtime_context import get_exec

    if get_exec().moe.elastic_ep_backend != NAME:
        original(controller, *args)
        return
    namespace = inspect.unwrap(original).__globals__
    mp = namespace["mp"]

    def create_process(*, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        tp_rank = args[3]
        _replacements.launches[tp_rank] = _Launch(target, args)
        return mp.Process(target=target, args=args)

    namespace["mp"] = SimpleNamespace(Pipe=mp.Pipe, Process=create_process)
    start = time.monotonic()
    try:
        original(controller, *args)  # returns when all schedulers have loaded
    finally:
        namespace["mp"] = mp
    _replacements.load_limit = max(MIN_LOAD_LIMIT, LOAD_FACTOR * (time.monotonic() - start))


def replace_dead_ranks(result: Any, controller: Any, ranks: Any) -> None:
    """Start replacements; runs after DataParallelController.update_active_ranks.

    The survivors send the address of their meeting as the id of their report.
    """
    from sglang.srt.runtime_context import get_exec

    if get_exec().moe.elastic_ep_backend == NAME:
        _replacements.update(controller.scheduler_procs, ranks.status, ranks.rid)


@contextlib.contextmanager
def _visible_devices(devices: str | None) -> Iterator[None]:
    before = os.environ.get(_DEVICES)
    _set_devices(devices)
    try:
        yield
    finally:
        _set_devices(before)


def _set_devices(devices: str | None) -> None:
    os.environ.pop(_DEVICES, None)
    if devices is not None:
        os.environ[_DEVICES] = devices


# The replacement's process.

_join_address = ""  # address of the survivors' meeting


def run_replacement(address: str, run_scheduler: Callable[..., None], *args: Any) -> None:
    """Run the scheduler of a dead rank; the target of a replacement's process."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    set_join_address(address)
    declare_resolution(args[0], "weft", ep_join_mode="recover")
    run_scheduler(*args)


def set_join_address(address: str) -> None:
    """Make this process the replacement of a dead rank."""
    global _join_address
    _join_address = address


def get_join_address() -> str:
    """Return the address of the meeting at which this process joins, or ""."""
    return _join_address


def is_replacement() -> bool:
    """Whether this process replaces a dead rank."""
    return bool(_join_address)


@contextlib.contextmanager
def end_on_error(action: str) -> Iterator[None]:
    """End this process on an error. SGLang would end the whole server, which does not need it."""
    try:
        yield
    except Exception:
        _log.critical("a replacement failed while %s, and ends", action, exc_info=True)
        logging.shutdown()
        os._exit(1)


class LoneProcessGroup(dist.ProcessGroup):
    """Process group of a replacement, in which it is the only rank that calls.

    While SGLang starts, it only reduces sizes over all ranks, and on GPUs waits for all of them
    before each forward pass that it captures. The result is this rank's value, and a barrier
    returns at once. Other collectives raise, and after `seal` all of them do.
    """

    is_sealed = False

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _run_alone("all_reduce")

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _run_alone("barrier")

    @classmethod
    def seal(cls) -> None:
        """Make all collectives raise from now on."""
        cls.is_sealed = True


class _DoneWork(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def _create_process_group(rank: int, size: int) -> Any:
    make: Any = LoneProcessGroup  # torch's stub lacks this constructor
    return make(rank, size)


def _run_alone(name: str) -> dist.Work:
    if LoneProcessGroup.is_sealed:
        _raise_alone(name)
    return _DoneWork()


def _raise_alone(name: str) -> None:
    raise OutOfOrder(
        f"SGLang called {name} of torch.distributed in a rank that has replaced a dead one, which "
        "is no member of the other ranks' process groups: restart the server to use this feature"
    )


def _refuse(name: str) -> Callable[..., None]:
    return lambda *args, **kwargs: _raise_alone(name)


for _name in (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather"),
    *("reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("scatter", "send", "recv", "recv_anysource"),
):
    setattr(LoneProcessGroup, _name, _refuse(_name))


def start_scheduler(original: Callable[..., None], scheduler: Any, *args: Any) -> None:
    """Start a replacement without the survivors' process groups; wraps Scheduler.__init__."""
    if not is_replacement():
        original(scheduler, *args)
        return
    from sglang.srt.runtime_context import get_parallel

    with end_on_error("starting"):
        dist.Backend.register_backend(
            _BACKEND,
            lambda store, rank, size, timeout: _create_process_group(rank, size),
            devices=["cpu", "cuda"],
        )
        parallel = get_parallel()
        dist.init_process_group(
            _BACKEND,
            store=torch._C._distributed_c10d.HashStore(),
            rank=parallel.tp_rank,
            world_size=parallel.tp_size,
        )
        original(scheduler, *args)


def create_lone_group(
    original: Callable[..., None], coordinator: Any, *args: Any, **kwargs: Any
) -> None:
    """Create a group of SGLang without the other ranks; wraps GroupCoordinator.__init__."""
    if not is_replacement():
        original(coordinator, *args, **kwargs)
        return
    bound = inspect.signature(original).bind(coordinator, *args, **kwargs)
    for name in bound.arguments:
        if name.startswith("use_"):  # communicators that connect to the other ranks
            bound.arguments[name] = False
    bound.arguments["torch_distributed_backend"] = _BACKEND
    torch_distributed: Any = dist
    new_group = dist.new_group

    def new_lone_group(ranks: list[int], **options: Any) -> Any:
        return new_group(ranks, backend=_BACKEND, group_desc=options.get("group_desc"))

    torch_distributed.new_group = new_lone_group
    try:
        original(*bound.args, **bound.kwargs)
    finally:
        torch_distributed.new_group = new_group


def skip_in_replacement(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Do nothing in a replacement; wraps what SGLang would do with the other ranks at its start."""
    if not is_replacement():
        original(*args, **kwargs)


# Patched names.

_CONTROLLER = SRT + "managers.data_parallel_controller."
HOOKS = (
    Hook(
        _CONTROLLER + "DataParallelController.launch_tensor_parallel_group",
        {"0.5.23": "self, server_args, port_args, base_gpu_id, dp_rank, worker_ports="},
        function=record_launches,
    ),
    Hook(
        _CONTROLLER + "DataParallelController.update_active_ranks",
        {"0.5.23": "self, ranks"},
        function=replace_dead_ranks,
        kind="AFTER",
    ),
    Hook(
        SRT + "managers.scheduler.Scheduler.__init__",
        {"0.5.23": "self, server_args, port_args"},
        function=start_scheduler,
    ),
    Hook(
        SRT + "distributed.parallel_state.GroupCoordinator.__init__",
        {
            "0.5.23": "self, group_ranks, local_rank, torch_distributed_backend, use_pynccl, "
            "use_mscclpp, use_custom_allreduce, use_torch_symm_mem_all_reduce, "
            "use_hpu_communicator, use_xpu_communicator, use_message_queue_broadcaster=, "
            "group_name=, gloo_timeout=, recovered_rank=, rank_offset=, max_world_size="
        },
        attributes="ranks world_size cpu_group",  # what allreduce.py reads
        function=create_lone_group,
    ),
    Hook(
        SRT + "model_executor.model_runner_components.load_model_utils.dist_barrier_after_load",
        {"0.5.23": "*, elastic_ep_backend, tp_rank, is_ep_joiner="},
        function=skip_in_replacement,
    ),
    Hook(
        RUNNER + "post_capture_elastic_ep_recover",
        {"0.5.23": "self"},
        function=skip_in_replacement,
    ),
)
# Functions and classes that the hooks use.
EXPECTED_API = (
    ExpectedAPI(
        SRT + "managers.scheduler.run_scheduler_process",
        {
            "0.5.23": "server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank, pipe_writer, "
            "display_tp_rank=, display_dp_rank=, display_moe_ep_rank="
        },
    ),
    ExpectedAPI(
        SRT + "arg_groups.overrides.declare_resolution",
        {"0.5.23": "server_args, source, **fields"},
    ),
    ExpectedAPI(SRT + "utils.numa_utils.configure_subprocess", {"0.5.23": "server_args, gpu_id"}),
    ExpectedAPI(
        SRT + "utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create",
        {"0.5.23": "enable"},
    ),
)
