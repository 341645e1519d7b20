# SPDX-License-Identifier: Apache-2.0
"""Implements --elastic-ep-backend weft, which keeps a server running after a rank has died.

With that flag, SGLang does not end the server when a scheduler's process ends, and routes requests
to living ranks only. This module does the rest: the survivors agree on the dead ranks, repeat the
forward pass and use replicas on living ranks, and requests of a dead rank fail with an error
message. `weft.plugins.sglang.healing` starts new processes for the dead ranks, which join here.
SGLang is imported only inside functions that SGLang calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any

import torch

from weft.errors import (
    InvalidArgument,
    OutOfOrder,
    PeerDied,
    PeerLeft,
    PeerTimeout,
    RendezvousFailed,
    SetupError,
    WeftError,
)
from weft.group import Group
from weft.group.meeting import Meeting
from weft.plugins.blocks import LOAD_TIMEOUT
from weft.plugins.engine_api import ExpectedAPI
from weft.plugins.sglang import healing
from weft.plugins.sglang.hooks import NAME, SRT, Hook
from weft.plugins.sglang.weights import check_weights_equal, describe_weights

RECOVERY_TIMEOUT = 60.0  # seconds within which all survivors must enter recovery
JOIN_TIMEOUT = 60.0  # seconds of a step in which replacements, which have connected, join
WAIT_TIMEOUT = 7 * 86400.0  # seconds that a replacement waits for sleeping ranks and other ones
MAX_DIGESTS = 2048  # of weights in one message, which holds 1 MiB
SEND_TIMEOUT = 1.0  # seconds that a message waits for a rank's process
# Errors that a rank may get, in a layer or a control message, after another rank has died.
PEER_ERRORS = (PeerDied, PeerLeft, PeerTimeout, RendezvousFailed)

_log = logging.getLogger(__name__)


# Flags.


def list_missing_flags(server_args: Any) -> Iterator[str]:
    """Yield the required setting of each flag that has another value.

    With the required flags, SGLang itself runs no collectives over all ranks during forward passes.
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
        "ep_join_mode": (
            "recover" if healing.is_replacement() else None,
            "no --elastic-ep-join-mode",
        ),
        "enable_elastic_expert_backup": (False, "no --enable-elastic-expert-backup"),
        "enable_prefill_delayer": (False, "no --enable-prefill-delayer"),
    }
    for name, (value, flag) in required.items():
        if getattr(server_args, name) != value:
            yield flag
    if get_parallel().attn_tp_size != 1:
        yield "one attention group per rank (--attn-dp-size equal to --tp-size)"
    if server_args.ep_dispatch_algorithm not in ("static", "dynamic"):
        yield "--ep-dispatch-algorithm static or dynamic"


# Expert placement.


def find_experts_without_replica(locations: Any, dead: set[int]) -> list[tuple[int, int]]:
    """Return (layer, logical expert) for each expert without a living replica.

    `locations` is SGLang's ExpertLocationMetadata.
    """
    return [
        (layer, expert)
        for layer, row in enumerate(locations.physical_to_logical_map_cpu.tolist())
        for expert in range(locations.num_logical_experts)
        if not _find_replicas(row, expert, locations.num_local_physical_experts, dead)
    ]


def reroute_experts(locations: Any, dead: set[int], rank: int) -> None:
    """Route tokens to living replicas only, by rewriting SGLang's tables in place.

    Captured graphs stay valid. As in SGLang, a rank prefers local replicas.

    Args:
        locations: SGLang's ExpertLocationMetadata.
        dead: Dead ranks.
        rank: This rank.

    Raises:
        SetupError: If an expert has no living replica. The tables are then unchanged.
    """
    unavailable = find_experts_without_replica(locations, dead)
    if unavailable:
        examples = ", ".join(f"{expert} of layer {layer}" for layer, expert in unavailable[:8])
        raise SetupError(
            f"without rank {_format_ranks(dead)}, {len(unavailable)} experts have no replica: "
            f"{examples}{' ...' if unavailable[8:] else ''}; start with more "
            "--ep-num-redundant-experts, or place the replicas of an expert on several ranks with "
            "--init-expert-location"
        )
    num_local = locations.num_local_physical_experts
    all_replicas = torch.full_like(locations.logical_to_all_physical_map_cpu, -1)
    preferred = all_replicas[..., 0].clone()
    for layer, row in enumerate(locations.physical_to_logical_map_cpu.tolist()):
        for expert in range(locations.num_logical_experts):
            replicas = _find_replicas(row, expert, num_local, dead)
            replicas = [id_ for id_ in replicas if id_ // num_local == rank] or replicas
            all_replicas[layer, expert, : len(replicas)] = torch.tensor(replicas)
            preferred[layer, expert] = replicas[rank % len(replicas)]
    locations.logical_to_all_physical_map_cpu.copy_(all_replicas)
    locations.logical_to_all_physical_map.copy_(all_replicas)
    locations.logical_to_all_physical_map_num_valid.copy_((all_replicas >= 0).sum(-1))
    if locations.logical_to_rank_dispatch_physical_map is not None:
        locations.logical_to_rank_dispatch_physical_map.copy_(preferred)


def _find_replicas(row: list[int], expert: int, num_local: int, dead: set[int]) -> list[int]:
    return [
        physical
        for physical, logical in enumerate(row)
        if logical == expert and physical // num_local not in dead
    ]


# Recovery.


class Survivors:
    """Runs steps that complete on all living ranks: message exchanges and forward passes.

    Every rank runs the same sequence of steps, and each step ends with a control message among all
    ranks. When a rank dies, the others are therefore at most one step apart. Either a rank has
    completed the interrupted step and sends its result to the others, or all ranks repeat it.

    After a death the survivors open a meeting, at which replacements wait. Its hub finds them
    between two passes and tells the others in an exchange; the next exchange begins with the join.

    Args:
        group: The group.
        on_change: Updates SGLang's state after ranks have died or joined, given all dead ranks.
        describe_weights: Returns digests of this rank's weights, which all ranks compare.
        can_heal: Whether dead ranks are replaced.
        join_address: In a replacement, the address of the survivors' meeting.
    """

    def __init__(
        self,
        group: Group,
        on_change: Callable[[set[int]], None],
        describe_weights: Callable[[], dict[str, Any]],
        *,
        can_heal: bool = False,
        join_address: str = "",
    ) -> None:
        self.group, self._on_change = group, on_change
        self._describe_weights, self._can_heal = describe_weights, can_heal
        self._join_address = join_address
        self.dead: set[int] = set()
        self._meeting: Meeting | None = None  # at which replacements wait
        self._must_admit = False  # whether all of them wait
        self._num_steps = 0  # number of steps that this rank has completed
        self._last_values: list[Any] = []  # result of the latest completed step

    @property
    def address(self) -> str | None:
        """Address of the meeting for replacements, or None."""
        return None if self._meeting is None else self._meeting.address

    def exchange(self, value: Any) -> list[Any]:
        """Return a list of every rank's `value` (JSON), with None for dead ranks."""
        if self._join_address:
            self._join()
        elif self._must_admit:
            self._admit()
        while True:
            try:
                replies = self.group.all_gather([value, self._find_replacements()])
            except PEER_ERRORS as error:
                replies_of_peer = self._recover(error)
                if replies_of_peer is None:
                    continue
                replies = replies_of_peer
            self._complete_step(replies)
            addresses = [reply[1] for reply in replies if reply is not None]
            # A peer may have completed the step before a recovery, which opened another meeting.
            self._must_admit = self.address is not None and self.address in addresses
            return [None if reply is None else reply[0] for reply in replies]

    def run(self, step: Callable[[], Any]) -> Any:
        """Run the forward pass `step`; return its result once all living ranks have completed it.

        `step` must wait for its kernels. It is repeated if a rank dies.
        """
        while True:
            try:
                result = step()
                self.group.barrier()
            except PEER_ERRORS as error:
                if self._recover(error) is None:
                    continue
            self._complete_step([])
            return result

    def _complete_step(self, values: list[Any]) -> None:
        self._num_steps, self._last_values = self._num_steps + 1, values

    def _recover(self, error: Exception, *, in_join: bool = False) -> list[Any] | None:
        """Recover the group without the dead ranks.

        Returns the result of the failed step if another rank has completed it, otherwise None.
        """
        while True:
            # Replacements that failed to join end, and are killed if they hang.
            recovery = self.group.recover(suspects=sorted(self.dead), timeout=RECOVERY_TIMEOUT)
            newly_dead = set(recovery.dead) - self.dead
            if not newly_dead and not in_join:
                raise error
            self.dead |= newly_dead
            self._on_change(self.dead)
            if newly_dead:
                _log.warning(
                    "rank %d of %d: rank %s has died; %d ranks continue after %.0f ms",
                    self.group.rank,
                    self.group.size,
                    _format_ranks(newly_dead),
                    len(recovery.living),
                    1000 * recovery.seconds,
                )
            try:
                if self._can_heal:
                    self._meeting = self.group.open_meeting()
                states = self.group.all_gather([self._num_steps, self._last_values])
            except PEER_ERRORS as next_error:
                error = next_error
                continue
            num_steps, values = max(
                (state for state in states if state is not None), key=lambda state: state[0]
            )
            return list(values) if num_steps > self._num_steps else None

    def _find_replacements(self) -> str | None:
        """Return the address of the meeting if this rank is its hub and all replacements wait."""
        if self._meeting is None or self.group.asleep:
            return None
        if not self.dead <= self._meeting.find_waiting_ranks():
            return None
        return self._meeting.address

    def _admit(self) -> None:
        """Let the replacements of all dead ranks join, or continue without them."""
        began, joining, meeting = time.monotonic(), self.dead, self._meeting
        self._must_admit = False
        assert meeting is not None
        try:
            self.group.replace(meeting, timeout=JOIN_TIMEOUT)
            self._complete_join()
        except WeftError as error:
            _log.error("rank %s could not join: %s", _format_ranks(joining), error)
            self._recover(error, in_join=True)
            return
        _log.warning(
            "rank %d of %d: rank %s has been replaced; serving paused for %.0f ms",
            self.group.rank,
            self.group.size,
            _format_ranks(joining),
            1000 * (time.monotonic() - began),
        )

    def _join(self) -> None:
        """Join the survivors, in a replacement."""
        address, self._join_address = self._join_address, ""
        with healing.end_on_error("joining"):
            self.group.join(address, timeout=LOAD_TIMEOUT, rendezvous_timeout=WAIT_TIMEOUT)
            self._complete_join()
        healing.LoneProcessGroup.seal()

    def _complete_join(self) -> None:
        """Compare the weights of all ranks, and use all ranks from now on. Collective.

        Raises:
            SetupError: If the weights of a rank differ. Every rank raises it.
        """
        digests = list(self._describe_weights().items())
        states = self.group.all_gather([self._num_steps, len(digests)])
        parts = -(-max(state[1] for state in states) // MAX_DIGESTS)
        by_rank: list[dict[str, Any]] = [{} for _ in states]
        for part in range(parts):
            for rank, entries in enumerate(self.group.all_gather(digests[part::parts])):
                by_rank[rank].update(entries)
        check_weights_equal(by_rank)
        self._num_steps = max(state[0] for state in states)
        self.dead, self._meeting = set(), None
        self._on_change(self.dead)


_survivors: Survivors | None = None
_has_unreported_change = False  # whether the tokenizer lacks the active ranks


def create_group(process_group: Any, device: torch.device) -> Group:
    """Create the group of SGLang's `process_group`, or the one of a replacement. Collective."""
    if not healing.is_replacement():
        return Group.from_torch(process_group, device=device, timeout=LOAD_TIMEOUT)
    return Group.for_replacement(
        rank=process_group.rank(), size=process_group.size(), device=device, timeout=LOAD_TIMEOUT
    )


def enable_recovery(group: Group, runner: Any, layers: Iterable[Any], server_args: Any) -> None:
    """Enable recovery: from now on, the ranks of `group` continue if one of them dies.

    Dead ranks are replaced, unless the server moves experts or loads adapters, which a replacement
    would not have.

    Args:
        group: The group of all ranks.
        runner: SGLang's ModelRunner, with the model.
        layers: FusedMoE layers of the model.
        server_args: The resolved flags.
    """
    global _survivors

    def on_change(dead: set[int]) -> None:
        global _has_unreported_change
        from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

        reroute_experts(locations, dead, group.rank)
        if dead and runner.eplb_manager is not None:  # it sums its counts over all ranks
            runner.eplb_manager.disable_rebalance(f"rank {_format_ranks(dead)} has died")
        state = ElasticEPStateManager.instance()
        state.active_ranks.fill_(1)
        state.active_ranks[sorted(dead)] = 0
        state.snapshot_active_to_last()  # SGLang must not rebalance by itself
        state.sync_active_to_cpu()
        _has_unreported_change = True

    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    locations = get_global_expert_location_metadata()
    if locations is None:
        raise InvalidArgument(
            "--elastic-ep-backend weft needs replicas of experts, but SGLang has none for this "
            "model: leave the flag out"
        )
    for rank in range(group.size) if group.rank == 0 else ():
        unavailable = find_experts_without_replica(locations, {rank})
        if unavailable:
            _log.warning(
                "the server cannot survive the death of rank %d: %d experts have replicas only "
                "there, for example %d of layer %d",
                rank,
                len(unavailable),
                unavailable[0][1],
                unavailable[0][0],
            )
    obstacles = [name for name in ("enable_eplb", "enable_lora") if getattr(server_args, name)]
    if obstacles and group.rank == 0:
        _log.warning(
            "the server does not replace dead ranks, because of --%s",
            " and --".join(obstacles).replace("_", "-"),
        )
    _survivors = Survivors(
        group,
        on_change,
        lambda: describe_weights(runner.model, layers, locations, group.rank),
        can_heal=not obstacles,
        join_address=healing.get_join_address(),
    )


def disable_recovery() -> None:
    """Disable recovery. Local and idempotent."""
    global _survivors, _has_unreported_change
    _survivors, _has_unreported_change = None, False


def is_enabled() -> bool:
    """Whether this server's ranks continue if one of them dies."""
    return _survivors is not None


def run_forward(run: Callable[[], Any], check: Callable[[], None], batch: Any) -> Any:
    """Run a forward pass and return its result once all living ranks have completed it.

    Args:
        run: The forward pass.
        check: Raises a group error.
        batch: SGLang's ForwardBatch. A failed pass may leave it padded, so it is restored.
    """
    if _survivors is None:
        raise OutOfOrder("recovery is disabled: call enable_recovery first")
    saved_fields, device = dict(vars(batch)), _survivors.group.device

    def step() -> Any:
        vars(batch).clear()
        vars(batch).update(saved_fields)
        result = run()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        check()
        return result

    return _survivors.run(step)


def exchange_batch_sizes(
    original: Callable[..., None], global_flat: torch.Tensor, local_row: torch.Tensor, group: Any
) -> None:
    """Exchange the ranks' batch sizes before a forward pass; wraps exchange_sync_rows.

    For a dead rank, SGLang's default remains: the row of an idle rank.
    """
    if _survivors is None:
        original(global_flat, local_row, group)
        return
    rows = global_flat.view(-1, local_row.numel())
    for rank, row in enumerate(_survivors.exchange(local_row.tolist())):
        if row is not None and rank not in _survivors.dead:
            rows[rank] = torch.tensor(row, dtype=rows.dtype)


def report_active_ranks(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Report a change of the active ranks; runs after Scheduler.get_next_batch_to_run.

    SGLang itself reports only after a batch, and an idle server runs none. The report reaches the
    tokenizer and the controller, which starts replacements. Its id is the address of the meeting.
    """
    global _has_unreported_change
    if not _has_unreported_change or _survivors is None:
        return
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
    from sglang.srt.managers.io_struct import ActiveRanksOutput

    active = ElasticEPStateManager.instance().active_ranks_cpu.bool().tolist()
    report = ActiveRanksOutput(status=active, rid=_survivors.address)
    scheduler.ipc_channels.send_to_tokenizer.send_output(report)
    _has_unreported_change = False


# The tokenizer's process.


class RequestRoutes:
    """Tracks the rank of each request, so that the requests of a dead rank can be aborted."""

    def __init__(self) -> None:
        self.active: list[bool] = []
        self._next = 0

    def assign(self, manager: Any, request: Any, ranks: int) -> None:
        """Assign a request to the next living rank, unless it names one."""
        if len(self.active) != ranks:
            self.active = [True] * ranks
        if request.routed_dp_rank is None:
            self._next = next(
                rank
                for offset in range(1, ranks + 1)
                if self.active[rank := (self._next + offset) % ranks]
            )
            request.routed_dp_rank = self._next
        elif not self.active[request.routed_dp_rank]:
            raise ValueError(f"routed_dp_rank is {request.routed_dp_rank}, but this rank has died")
        state = manager.rid_to_state.get(request.rid)
        if state is not None:
            state.weft_rank = request.routed_dp_rank

    def abort_requests(self, manager: Any, active: list[bool]) -> None:
        """Abort the requests of dead ranks with status 503 and a message."""
        from sglang.srt.managers.io_struct import AbortReq

        if self.active == active:
            return
        self.active = list(active)
        manager.update_control_communicator_fan_out(sum(active))
        for rid, state in list(manager.rid_to_state.items()):
            rank = getattr(state, "weft_rank", None)
            if rank is not None and not active[rank]:
                text = f"rank {rank}, which processed this request, has died; send it again"
                # SGLang's OpenAI streams test for this enum; they do not treat an int as an error.
                status = HTTPStatus.SERVICE_UNAVAILABLE
                reason = {"type": "abort", "message": text, "status_code": status, "err_type": None}
                manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


_request_routes = RequestRoutes()


def route_requests(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Assign requests to living ranks; wraps TokenizerManager._dispatch_to_scheduler."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.utils import is_health_check_generate_req
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_exec().moe.elastic_ep_backend != NAME:
        original(manager, obj)
        return
    single_types = (io_struct.TokenizedGenerateReqInput, io_struct.TokenizedEmbeddingReqInput)
    batch_types = (
        io_struct.BatchTokenizedGenerateReqInput,
        io_struct.BatchTokenizedEmbeddingReqInput,
    )
    if isinstance(obj, single_types + batch_types):
        for request in (obj,) if isinstance(obj, single_types) else obj:
            if not is_health_check_generate_req(request):
                _request_routes.assign(manager, request, get_parallel().num_dp_ranks)
    original(manager, obj)
    if isinstance(obj, io_struct.ActiveRanksOutput):
        _request_routes.abort_requests(manager, obj.status)


def send_or_drop(original: Callable[..., None], socket: Any, obj: Any, flags: int = 0) -> None:
    """Drop a message for a dead rank; wraps sock_send of the data-parallel controller.

    A PUSH socket without a peer is never writable. A blocking send would keep the controller from
    SGLang's report of the death, which aborts the dead rank's requests.
    """
    import zmq
    from sglang.srt.runtime_context import get_exec

    is_worker = get_exec().moe.elastic_ep_backend == NAME and socket.type == zmq.PUSH
    if is_worker and not socket.poll(int(1000 * SEND_TIMEOUT), zmq.POLLOUT):
        _log.warning("a %s for a dead rank was dropped", type(obj).__name__)
        return
    original(socket, obj, flags)


def _format_ranks(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


# Patched names.

_MANAGERS = SRT + "managers."
HOOKS = (
    *healing.HOOKS,
    Hook(
        _MANAGERS + "scheduler_components.dp_attn.exchange_sync_rows",
        {"0.5.23": "global_flat, local_row, group"},
        function=exchange_batch_sizes,
    ),
    Hook(
        _MANAGERS + "scheduler.Scheduler.get_next_batch_to_run",
        {"0.5.23": "self, running_batch, last_batch"},
        function=report_active_ranks,
        kind="AFTER",
    ),
    Hook(
        _MANAGERS + "tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
        {"0.5.23": "self, obj"},
        function=route_requests,
    ),
    Hook(
        _MANAGERS + "data_parallel_controller.sock_send",
        {"0.5.23": "socket, obj, flags="},
        function=send_or_drop,
    ),
)
# Functions and classes that the hooks use.
_STATE = SRT + "elastic_ep.elastic_ep.ElasticEPState."
_LOCATIONS = SRT + "eplb.expert_location."
EXPECTED_API = (
    *healing.EXPECTED_API,
    ExpectedAPI(SRT + "elastic_ep.elastic_ep.ElasticEPStateManager.instance", {"0.5.23": "cls"}),
    ExpectedAPI(
        _STATE + "snapshot_active_to_last", {"0.5.23": "self"}, "active_ranks last_active_ranks"
    ),
    ExpectedAPI(_STATE + "sync_active_to_cpu", {"0.5.23": "self"}, "active_ranks active_ranks_cpu"),
    ExpectedAPI(_LOCATIONS + "get_global_expert_location_metadata", {"0.5.23": ""}),
    ExpectedAPI(
        _LOCATIONS + "ExpertLocationMetadata",
        {"0.5.23": None},
        "physical_to_logical_map_cpu logical_to_all_physical_map logical_to_all_physical_map_cpu "
        "logical_to_all_physical_map_num_valid logical_to_rank_dispatch_physical_map "
        "num_local_physical_experts num_logical_experts",
    ),
    ExpectedAPI(
        SRT + "eplb.eplb_manager.EPLBManager.disable_rebalance", {"0.5.23": "self, reason"}
    ),
    ExpectedAPI(
        _MANAGERS + "scheduler.Scheduler._maybe_report_active_ranks",
        {"0.5.23": "self"},
        "ipc_channels send_to_tokenizer send_output",
    ),
    ExpectedAPI(
        _MANAGERS + "tokenizer_manager.TokenizerManager._handle_abort_req",
        {"0.5.23": "self, recv_obj"},
        "rid_to_state finished_reason",
    ),
    ExpectedAPI(
        _MANAGERS
        + "tokenizer_control_mixin.TokenizerControlMixin.update_control_communicator_fan_out",
        {"0.5.23": "self, worker_count"},
    ),
    ExpectedAPI(_MANAGERS + "io_struct.AbortReq", {"0.5.23": None}, "finished_reason"),
    ExpectedAPI(_MANAGERS + "io_struct.ActiveRanksOutput", {"0.5.23": None}, "status"),
    ExpectedAPI(_MANAGERS + "io_struct.BaseReq", {"0.5.23": None}, "rid"),
    ExpectedAPI(
        _MANAGERS + "io_struct.TokenizedGenerateReqInput", {"0.5.23": None}, "routed_dp_rank"
    ),
    ExpectedAPI(
        _MANAGERS + "io_struct.TokenizedEmbeddingReqInput", {"0.5.23": None}, "routed_dp_rank"
    ),
    ExpectedAPI(_MANAGERS + "io_struct.BatchTokenizedGenerateReqInput", {"0.5.23": None}),
    ExpectedAPI(_MANAGERS + "io_struct.BatchTokenizedEmbeddingReqInput", {"0.5.23": None}),
    ExpectedAPI(_MANAGERS + "utils.is_health_check_generate_req", {"0.5.23": "recv_req"}),
)
