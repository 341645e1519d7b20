# SPDX-License-Identifier: Apache-2.0
"""A server that goes on after a rank has died: --elastic-ep-backend weft.

SGLang's own machinery, which that flag turns on, keeps the server when a scheduler's process ends
and routes to living ranks alone. Here is what it leaves to the backend: survivors agree, make the
pass again, take experts from living ranks, and the requests of the dead rank fail in words. Nothing
here imports SGLang before one of its own functions has called.
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
from weft.memory import Group
from weft.plugins.names import Known
from weft.plugins.sglang.hooks import NAME, SRT, Hook

TOGETHER = 60.0  # seconds in which all survivors must come to the recovery
# What a rank may get when another one has died: in a layer, or in a control message.
LOST = (PeerDied, PeerLeft, PeerTimeout, RendezvousFailed)

_log = logging.getLogger(__name__)


# Flags.


def wrong_flags(server_args: Any) -> Iterator[str]:
    """What each flag must be, of those that are otherwise.

    With these no collective of SGLang's own spans the ranks while it serves.
    """
    from sglang.srt.runtime_context import get_parallel

    wanted = {
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
    for name, (value, flag) in wanted.items():
        if getattr(server_args, name) != value:
            yield flag
    if get_parallel().attn_tp_size != 1:
        yield "an attention group for each rank (--attn-dp-size equal to --tp-size)"
    if server_args.ep_dispatch_algorithm not in ("static", "dynamic"):
        yield "--ep-dispatch-algorithm static or dynamic"


# Where experts are.


def lacking(places: Any, dead: set[int]) -> list[tuple[int, int]]:
    """(layer, logical expert) of each that has no living replica.

    places: SGLang's ExpertLocationMetadata.
    """
    return [
        (layer, expert)
        for layer, row in enumerate(places.physical_to_logical_map_cpu.tolist())
        for expert in range(places.num_logical_experts)
        if not _replicas(row, expert, places.num_local_physical_experts, dead)
    ]


def route_around(places: Any, dead: set[int], rank: int) -> None:
    """Let tokens go to living replicas alone: SGLang's tables are rewritten in place.

    So graphs hold. As SGLang does, a rank prefers a replica of its own. Raises SetupError naming
    experts that have no living replica; then nothing was rewritten.

    places: SGLang's ExpertLocationMetadata.   rank: this one.
    """
    lost = lacking(places, dead)
    if lost:
        shown = ", ".join(f"{expert} of layer {layer}" for layer, expert in lost[:8])
        raise SetupError(
            f"with rank {_list(dead)} gone no replica is left of {len(lost)} experts: {shown}"
            f"{' ...' if lost[8:] else ''}; start with more --ep-num-redundant-experts, or place "
            "the replicas of an expert on several ranks by --init-expert-location"
        )
    local = places.num_local_physical_experts
    every = torch.full_like(places.logical_to_all_physical_map_cpu, -1)
    single = every[..., 0].clone()
    for layer, row in enumerate(places.physical_to_logical_map_cpu.tolist()):
        for expert in range(places.num_logical_experts):
            found = _replicas(row, expert, local, dead)
            found = [each for each in found if each // local == rank] or found
            every[layer, expert, : len(found)] = torch.tensor(found)
            single[layer, expert] = found[rank % len(found)]
    places.logical_to_all_physical_map_cpu.copy_(every)
    places.logical_to_all_physical_map.copy_(every)
    places.logical_to_all_physical_map_num_valid.copy_((every >= 0).sum(-1))
    if places.logical_to_rank_dispatch_physical_map is not None:
        places.logical_to_rank_dispatch_physical_map.copy_(single)


def _replicas(row: list[int], expert: int, local: int, dead: set[int]) -> list[int]:
    return [p for p, held in enumerate(row) if held == expert and p // local not in dead]


# The ranks.


class Survivors:
    """The ranks in step: each exchange of batch sizes and each forward pass ends on all of them.

    Every rank makes the same sequence of exchanges and passes, and each ends in a control message
    of all ranks. So when one dies, the others are at most one message apart, and what they were at
    is either finished on all of them, which a rank that is ahead tells, or made again on all.

    lose: puts SGLang right when ranks have died; gets those that are gone now.
    """

    def __init__(self, group: Group, lose: Callable[[set[int]], None]) -> None:
        self.group, self._lose = group, lose
        self.dead: set[int] = set()
        self._ended = 0  # messages of the sequence that this rank has seen the end of
        self._said: list[Any] = []  # what the newest of them brought

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value`, JSON; None for one that is gone."""
        while True:
            try:
                found = self.group.all_gather(value)
            except LOST as error:
                told = self._recover(error)
                if told is None:
                    continue
                found = told
            return self._end(found)

    def run(self, step: Callable[[], Any]) -> Any:
        """The result of `step`, this rank's forward pass, once all living ranks have made it.

        It is called again when a rank has died, and must wait for its own kernels.
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

    def _end(self, said: list[Any]) -> list[Any]:
        self._ended, self._said = self._ended + 1, said
        return said

    def _recover(self, error: Exception) -> list[Any] | None:
        """Go on without the dead. What the message brought that failed here and ended elsewhere."""
        while True:
            recovery = self.group.recover(timeout=TOGETHER)
            fresh = set(recovery.dead) - self.dead
            if not fresh:
                raise error
            self.dead |= fresh
            self._lose(self.dead)
            _log.warning(
                "rank %d of %d: rank %s has died; %d ranks go on after %.0f ms",
                self.group.rank,
                self.group.size,
                _list(fresh),
                len(recovery.living),
                1000 * recovery.seconds,
            )
            try:
                states = self.group.all_gather([self._ended, self._said])
            except LOST as another:
                error = another
                continue
            ended, said = max((each for each in states if each is not None), key=lambda s: s[0])
            return list(said) if ended > self._ended else None


_survivors: Survivors | None = None
_untold = False  # does the tokenizer not know yet who is gone?


def follow(group: Group, runner: Any) -> None:
    """From now on the ranks of `group` outlive each other."""
    global _survivors

    def lose(dead: set[int]) -> None:
        global _untold
        from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        route_around(get_global_expert_location_metadata(), dead, group.rank)
        if runner.eplb_manager is not None:  # it sums its counts over all ranks
            runner.eplb_manager.disable_rebalance(f"rank {_list(dead)} has died")
        state = ElasticEPStateManager.instance()
        state.active_ranks[sorted(dead)] = 0
        state.snapshot_active_to_last()  # nothing for SGLang to rebalance
        state.sync_active_to_cpu()
        _untold = True

    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    places = get_global_expert_location_metadata()
    for rank in range(group.size) if group.rank == 0 else ():
        lost = lacking(places, {rank})
        if lost:
            _log.warning(
                "the server would not outlive rank %d: %d experts, the first of them %d of layer "
                "%d, have replicas there alone",
                rank,
                len(lost),
                lost[0][1],
                lost[0][0],
            )
    _survivors = Survivors(group, lose)


def leave() -> None:
    """Forget the ranks. Local and idempotent."""
    global _survivors, _untold
    _survivors, _untold = None, False


def is_on() -> bool:
    """Do the ranks of this process's server outlive each other?"""
    return _survivors is not None


def forward(run: Callable[[], Any], check: Callable[[], None], batch: Any) -> Any:
    """A forward pass that all living ranks finish.

    check: raises what broke the group.
    batch: SGLang's ForwardBatch, which a pass that fails may leave padded.
    """
    if _survivors is None:
        raise OutOfOrder("no ranks are followed: call follow first")
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
    """Around exchange_sync_rows, by which ranks tell each other their batches before every pass.

    A rank that is gone keeps what SGLang has put there before: an idle one's.
    """
    if _survivors is None:
        original(global_flat, local_row, group)
        return
    rows = global_flat.view(-1, local_row.numel())
    for rank, row in enumerate(_survivors.exchange(local_row.tolist())):
        if row is not None and rank not in _survivors.dead:
            rows[rank] = torch.tensor(row, dtype=rows.dtype)


def planned(result: Any, scheduler: Any, *args: Any, **given: Any) -> None:
    """After Scheduler.get_next_batch_to_run: tell the tokenizer at once who is gone.

    SGLang does after every batch, which an idle server has none of.
    """
    global _untold
    if _untold:
        scheduler._maybe_report_active_ranks()
        _untold = False


# The tokenizer's process.


class Routes:
    """Which rank each request was sent to, so that those of a dead rank can be answered."""

    def __init__(self) -> None:
        self.active: list[bool] = []
        self._next = 0

    def choose(self, manager: Any, request: Any, ranks: int) -> None:
        """Give a request to the next living rank, unless it names one."""
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
        """Answer what dead ranks were asked: 503, in words."""
        from sglang.srt.managers.io_struct import AbortReq

        if self.active == active:
            return
        self.active = list(active)
        manager.update_control_communicator_fan_out(sum(active))
        for rid, state in list(manager.rid_to_state.items()):
            rank = getattr(state, "weft_rank", None)
            if rank is not None and not active[rank]:
                text = f"rank {rank}, which served this request, has died; ask again"
                # SGLang's OpenAI streams test for this type; an int would be no error to them.
                status = HTTPStatus.SERVICE_UNAVAILABLE
                reason = {"type": "abort", "message": text, "status_code": status, "err_type": None}
                manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


_routes = Routes()


def dispatched(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Around TokenizerManager._dispatch_to_scheduler: all that goes to the ranks."""
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


# What is patched.

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
        function=planned,
        kind="AFTER",
    ),
    Hook(
        _MANAGERS + "tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
        {"0.5.23": "self, obj"},
        function=dispatched,
    ),
)
# What the hooks call and read.
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
