# SPDX-License-Identifier: Apache-2.0
"""Keeps a server running after a rank has died: --elastic-ep-backend weft.

With that flag, SGLang keeps the server when a scheduler's process ends, and routes requests to
living ranks only. This module supplies what SGLang leaves to the backend: the survivors agree on
the dead ranks, repeat the forward pass, use replicas on living ranks, and requests of a dead rank
fail with an error message. SGLang is imported only inside functions that SGLang calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import torch

from weft.errors import (
    OutOfOrder,
    PeerDied,
    PeerLeft,
    PeerTimeout,
    RendezvousFailed,
    SetupError,
)
from weft.group import Group
from weft.plugins.names import Known
from weft.plugins.sglang.hooks import NAME, SRT, Hook

RECOVERY_TIMEOUT = 60.0  # seconds within which all survivors must enter recovery
# Errors that a rank may see when another one has died, in a layer or in a control message.
LOST = (PeerDied, PeerLeft, PeerTimeout, RendezvousFailed)

_log = logging.getLogger(__name__)


# Flags.


def wrong_flags(server_args: Any) -> Iterator[str]:
    """Yield the required form of each flag that is set otherwise.

    With the required flags, none of SGLang's own collectives spans the ranks while it serves.
    """
    from sglang.srt.runtime_context import get_parallel

    required = {
        "disable_overlap_schedule": (True, "--disable-overlap-schedule"),
        "enable_dp_lm_head": (True, "--enable-dp-lm-head"),
        "moe_dense_tp_size": (1, "--moe-dense-tp-size 1"),
        "enable_dp_attention_local_control_broadcast": (
            True,
            "--enable-dp-attention-local-control-broadcast",
        ),
        "tokenizer_worker_num": (1, "--tokenizer-worker-num 1"),
        "moe_dp_size": (1, "--moe-dp-size 1"),
        "disaggregation_mode": ("null", "no --disaggregation-mode"),
        "speculative_algorithm": (None, "no --speculative-algorithm"),
        "max_ep_size": (None, "no --max-ep-size"),
        "ep_join_mode": (None, "no --elastic-ep-join-mode"),
        "enable_elastic_expert_backup": (False, "no --enable-elastic-expert-backup"),
    }
    for name, (value, flag) in required.items():
        if getattr(server_args, name) != value:
            yield flag
    if get_parallel().attn_tp_size != 1:
        yield "one attention group per rank (--attn-dp-size equal to --tp-size)"
    if server_args.ep_dispatch_algorithm not in ("static", "dynamic"):
        yield "--ep-dispatch-algorithm static or dynamic"


# Expert placement.


def experts_without_replica(places: Any, dead: set[int]) -> list[tuple[int, int]]:
    """Return (layer, logical expert) of each expert without a living replica.

    `places` is SGLang's ExpertLocationMetadata.
    """
    return [
        (layer, expert)
        for layer, row in enumerate(places.physical_to_logical_map_cpu.tolist())
        for expert in range(places.num_logical_experts)
        if not _replicas(row, expert, places.num_local_physical_experts, dead)
    ]


def route_around(places: Any, dead: set[int], rank: int) -> None:
    """Route tokens to living replicas only, by rewriting SGLang's tables in place.

    Captured graphs stay valid. As in SGLang, a rank prefers its own replicas.

    Args:
        places: SGLang's ExpertLocationMetadata.
        dead: Dead ranks.
        rank: This rank.

    Raises:
        SetupError: If an expert has no living replica. The tables are then unchanged.
    """
    lost = experts_without_replica(places, dead)
    if lost:
        listing = ", ".join(f"{expert} of layer {layer}" for layer, expert in lost[:8])
        raise SetupError(
            f"with rank {_list(dead)} gone no replica is left of {len(lost)} experts: {listing}"
            f"{' ...' if lost[8:] else ''}; start with more --ep-num-redundant-experts, or place "
            "the replicas of an expert on several ranks by --init-expert-location"
        )
    local = places.num_local_physical_experts
    all_replicas = torch.full_like(places.logical_to_all_physical_map_cpu, -1)
    preferred = all_replicas[..., 0].clone()
    for layer, row in enumerate(places.physical_to_logical_map_cpu.tolist()):
        for expert in range(places.num_logical_experts):
            replicas = _replicas(row, expert, local, dead)
            replicas = [each for each in replicas if each // local == rank] or replicas
            all_replicas[layer, expert, : len(replicas)] = torch.tensor(replicas)
            preferred[layer, expert] = replicas[rank % len(replicas)]
    places.logical_to_all_physical_map_cpu.copy_(all_replicas)
    places.logical_to_all_physical_map.copy_(all_replicas)
    places.logical_to_all_physical_map_num_valid.copy_((all_replicas >= 0).sum(-1))
    if places.logical_to_rank_dispatch_physical_map is not None:
        places.logical_to_rank_dispatch_physical_map.copy_(preferred)


def _replicas(row: list[int], expert: int, local: int, dead: set[int]) -> list[int]:
    return [p for p, held in enumerate(row) if held == expert and p // local not in dead]


# Recovery.


class Survivors:
    """Keeps the living ranks in step: each message exchange and forward pass ends on all of them.

    Every rank makes the same sequence of exchanges and passes, and each ends in a control message
    among all ranks. When a rank dies, the others are therefore at most one message apart. Either a
    rank that is ahead passes on the result of the interrupted step, or all ranks repeat the step.

    `lose` updates SGLang's state after a death; it gets the set of all dead ranks.
    """

    def __init__(self, group: Group, lose: Callable[[set[int]], None]) -> None:
        self.group, self._lose = group, lose
        self.dead: set[int] = set()
        self._ended = 0  # number of steps that this rank has completed
        self._last: list[Any] = []  # result of the latest completed step

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON), None for dead ranks."""
        while True:
            try:
                values = self.group.all_gather(value)
            except LOST as error:
                missed = self._recover(error)
                if missed is None:
                    continue
                values = missed
            return self._end(values)

    def run(self, step: Callable[[], Any]) -> Any:
        """Return the result of the forward pass `step` once all living ranks have completed it.

        `step` must wait for its own kernels. It is repeated when a rank has died.
        """
        while True:
            try:
                result = step()
                self.group.barrier()
            except LOST as error:
                if self._recover(error) is None:
                    continue
            self._end([])
            return result

    def _end(self, values: list[Any]) -> list[Any]:
        self._ended, self._last = self._ended + 1, values
        return values

    def _recover(self, error: Exception) -> list[Any] | None:
        """Continue without the dead ranks.

        Returns the result of the step that failed here if another rank completed it, otherwise
        None.
        """
        while True:
            recovery = self.group.recover(timeout=RECOVERY_TIMEOUT)
            newly_dead = set(recovery.dead) - self.dead
            if not newly_dead:
                raise error
            self.dead |= newly_dead
            self._lose(self.dead)
            _log.warning(
                "rank %d of %d: rank %s has died; %d ranks continue after %.0f ms",
                self.group.rank,
                self.group.size,
                _list(newly_dead),
                len(recovery.living),
                1000 * recovery.seconds,
            )
            try:
                states = self.group.all_gather([self._ended, self._last])
            except LOST as another:
                error = another
                continue
            ended, last = max((each for each in states if each is not None), key=lambda s: s[0])
            return list(last) if ended > self._ended else None


_survivors: Survivors | None = None
_unreported = False  # whether the tokenizer has not yet been told of dead ranks


def follow(group: Group, runner: Any) -> None:
    """Let the ranks of `group` survive each other's deaths from now on."""
    global _survivors

    def lose(dead: set[int]) -> None:
        global _unreported
        from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        route_around(get_global_expert_location_metadata(), dead, group.rank)
        if runner.eplb_manager is not None:  # its counts are summed over all ranks
            runner.eplb_manager.disable_rebalance(f"rank {_list(dead)} has died")
        state = ElasticEPStateManager.instance()
        state.active_ranks[sorted(dead)] = 0
        state.snapshot_active_to_last()  # SGLang must not rebalance by itself
        state.sync_active_to_cpu()
        _unreported = True

    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    places = get_global_expert_location_metadata()
    for rank in range(group.size) if group.rank == 0 else ():
        lost = experts_without_replica(places, {rank})
        if lost:
            _log.warning(
                "the server would not survive the death of rank %d: %d experts, the first of them "
                "%d of layer %d, have replicas only there",
                rank,
                len(lost),
                lost[0][1],
                lost[0][0],
            )
    _survivors = Survivors(group, lose)


def leave() -> None:
    """Stop following the ranks. Local and idempotent."""
    global _survivors, _unreported
    _survivors, _unreported = None, False


def is_on() -> bool:
    """Whether this server's ranks survive each other's deaths."""
    return _survivors is not None


def forward(run: Callable[[], Any], check: Callable[[], None], batch: Any) -> Any:
    """Run a forward pass that all living ranks complete.

    Args:
        run: The forward pass.
        check: Raises a group error.
        batch: SGLang's ForwardBatch. A failed pass may leave it padded, so it is restored.
    """
    if _survivors is None:
        raise OutOfOrder("no group is followed: call follow first")
    before, device = dict(vars(batch)), _survivors.group.device

    def step() -> Any:
        vars(batch).clear()
        vars(batch).update(before)
        result = run()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        check()
        return result

    return _survivors.run(step)


def exchange_rows(
    original: Callable[..., None], global_flat: torch.Tensor, local_row: torch.Tensor, group: Any
) -> None:
    """Around exchange_sync_rows, which shares the ranks' batch sizes before every pass.

    The row of a dead rank keeps SGLang's default, an idle rank's row.
    """
    if _survivors is None:
        original(global_flat, local_row, group)
        return
    rows = global_flat.view(-1, local_row.numel())
    for rank, row in enumerate(_survivors.exchange(local_row.tolist())):
        if row is not None and rank not in _survivors.dead:
            rows[rank] = torch.tensor(row, dtype=rows.dtype)


def after_get_next_batch(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After Scheduler.get_next_batch_to_run: report dead ranks to the tokenizer at once.

    SGLang reports only after a batch, and an idle server runs none.
    """
    global _unreported
    if _unreported:
        scheduler._maybe_report_active_ranks()
        _unreported = False


# The tokenizer's process.


class Routes:
    """Tracks the rank of each request, so that a dead rank's requests can be answered."""

    def __init__(self) -> None:
        self.active: list[bool] = []
        self._next = 0

    def choose(self, manager: Any, request: Any, ranks: int) -> None:
        """Assign a request to the next living rank, unless it names one."""
        if len(self.active) != ranks:
            self.active = [True] * ranks
        if request.routed_dp_rank is None:
            self._next = next(
                rank
                for each in range(1, ranks + 1)
                if self.active[rank := (self._next + each) % ranks]
            )
            request.routed_dp_rank = self._next
        elif not self.active[request.routed_dp_rank]:
            raise ValueError(f"routed_dp_rank is {request.routed_dp_rank}, which has died")
        state = manager.rid_to_state.get(request.rid)
        if state is not None:
            state.weft_rank = request.routed_dp_rank

    def lose(self, manager: Any, active: list[bool]) -> None:
        """Abort the requests of dead ranks with status 503 and a message."""
        from sglang.srt.managers.io_struct import AbortReq

        if self.active == active:
            return
        self.active = list(active)
        manager.update_control_communicator_fan_out(sum(active))
        for rid, state in list(manager.rid_to_state.items()):
            rank = getattr(state, "weft_rank", None)
            if rank is not None and not active[rank]:
                text = f"rank {rank}, which served this request, has died; ask again"
                # SGLang's OpenAI streams test for this enum; they do not treat an int as an error.
                status = HTTPStatus.SERVICE_UNAVAILABLE
                reason = {"type": "abort", "message": text, "status_code": status, "err_type": None}
                manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


_routes = Routes()


def around_dispatch(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Around TokenizerManager._dispatch_to_scheduler, which sends everything to the ranks."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.utils import is_health_check_generate_req
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_exec().moe.elastic_ep_backend != NAME:
        original(manager, obj)
        return
    one = (io_struct.TokenizedGenerateReqInput, io_struct.TokenizedEmbeddingReqInput)
    many = (io_struct.BatchTokenizedGenerateReqInput, io_struct.BatchTokenizedEmbeddingReqInput)
    if isinstance(obj, one + many):
        for request in (obj,) if isinstance(obj, one) else obj:
            if not is_health_check_generate_req(request):
                _routes.choose(manager, request, get_parallel().num_dp_ranks)
    original(manager, obj)
    if isinstance(obj, io_struct.ActiveRanksOutput):
        _routes.lose(manager, obj.status)


def _list(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


# Patched names.

_MANAGERS = SRT + "managers."
HOOKS = (
    Hook(
        _MANAGERS + "scheduler_components.dp_attn.exchange_sync_rows",
        {"0.5.23": "global_flat, local_row, group"},
        function=exchange_rows,
    ),
    Hook(
        _MANAGERS + "scheduler.Scheduler.get_next_batch_to_run",
        {"0.5.23": "self, running_batch, last_batch"},
        function=after_get_next_batch,
        kind="AFTER",
    ),
    Hook(
        _MANAGERS + "tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
        {"0.5.23": "self, obj"},
        function=around_dispatch,
    ),
)
# Names that the hooks call and read.
_STATE = SRT + "elastic_ep.elastic_ep.ElasticEPState."
_PLACES = SRT + "eplb.expert_location."
KNOWN = (
    Known(SRT + "elastic_ep.elastic_ep.ElasticEPStateManager.instance", {"0.5.23": "cls"}),
    Known(_STATE + "snapshot_active_to_last", {"0.5.23": "self"}, "active_ranks last_active_ranks"),
    Known(_STATE + "sync_active_to_cpu", {"0.5.23": "self"}, "active_ranks active_ranks_cpu"),
    Known(_PLACES + "get_global_expert_location_metadata", {"0.5.23": ""}),
    Known(
        _PLACES + "ExpertLocationMetadata",
        {"0.5.23": None},
        "physical_to_logical_map_cpu logical_to_all_physical_map logical_to_all_physical_map_cpu "
        "logical_to_all_physical_map_num_valid logical_to_rank_dispatch_physical_map "
        "num_local_physical_experts num_logical_experts",
    ),
    Known(SRT + "eplb.eplb_manager.EPLBManager.disable_rebalance", {"0.5.23": "self, reason"}),
    Known(_MANAGERS + "scheduler.Scheduler._maybe_report_active_ranks", {"0.5.23": "self"}),
    Known(
        _MANAGERS + "tokenizer_manager.TokenizerManager._handle_abort_req",
        {"0.5.23": "self, recv_obj"},
        "rid_to_state finished_reason",
    ),
    Known(
        _MANAGERS
        + "tokenizer_control_mixin.TokenizerControlMixin.update_control_communicator_fan_out",
        {"0.5.23": "self, worker_count"},
    ),
    Known(_MANAGERS + "io_struct.AbortReq", {"0.5.23": None}, "finished_reason"),
    Known(_MANAGERS + "io_struct.ActiveRanksOutput", {"0.5.23": None}, "status"),
    Known(_MANAGERS + "io_struct.TokenizedGenerateReqInput", {"0.5.23": None}, "routed_dp_rank"),
    Known(_MANAGERS + "io_struct.TokenizedEmbeddingReqInput", {"0.5.23": None}, "routed_dp_rank"),
    Known(_MANAGERS + "io_struct.BatchTokenizedGenerateReqInput", {"0.5.23": None}),
    Known(_MANAGERS + "io_struct.BatchTokenizedEmbeddingReqInput", {"0.5.23": None}),
    Known(_MANAGERS + "utils.is_health_check_generate_req", {"0.5.23": "recv_req"}),
)
