# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of an engine's ranks.

Ranks of SGLang and vLLM do not serve `/metrics` themselves. The engine's HTTP server merges the
values that processes write to the directory PROMETHEUS_MULTIPROC_DIR. SGLang sets the variable with
`--enable-metrics`, and vLLM with `--api-server-count` above 1; a user may set it too. A thread of
each rank copies the counters of its operators there.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from collections import defaultdict
from typing import Any

from weft.errors import WeftError
from weft.group import Group
from weft.group.waits import BOUNDS_NS, Waits, WaitTimes

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
PERIOD_SECONDS = 5.0  # between two copies
_JOIN_SECONDS = 2.0
_BOUNDS = BOUNDS_NS[::2]  # of the exported histogram: 1.024 us and its powers of 4
_log = logging.getLogger(__name__)


class _Metrics:
    """The metrics of this process. The library allows each name once in a process."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        phase = ("rank", "operator", "phase")
        peer = ("rank", "peer", "operator", "phase", "cause")
        self.seconds = Counter(
            "weft_wait_seconds", "Time that a rank has waited for a peer, by cause.", peer
        )
        self.waits = Counter("weft_waits", "Waits of a rank for a peer, by cause.", peer)
        self.rounds = Counter("weft_rounds", "Rounds that a rank has finished.", phase)
        self.durations = Counter(
            "weft_wait_durations",
            "Cumulative histogram of waits for any peer: those of at most `le` seconds.",
            (*phase, "cause", "le"),
        )
        options: dict[str, Any] = {"multiprocess_mode": "mostrecent"}
        self.phase = Gauge(
            "weft_phase_seconds", "Mean duration of a phase in recent rounds.", phase, **options
        )
        self.between = Gauge(
            "weft_between_phases_seconds",
            "Mean time from the end of an operator's previous phase to the start of this one.",
            phase,
            **options,
        )


_metrics: _Metrics | None = None


class Exporter:
    """Thread that copies the waits of a group's operators to Prometheus metrics."""

    def __init__(self, group: Group) -> None:
        global _metrics
        self._group, self._stopped = group, threading.Event()
        self._seen: defaultdict[tuple[Any, ...], float] = defaultdict(float)
        if _metrics is None:
            _metrics = _Metrics()
        self._metrics = _metrics
        self._thread = threading.Thread(target=self._run, name="weft-metrics", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def start(cls, group: Group) -> Exporter | None:
        """Start a thread if the engine's server merges metrics of several processes."""
        if not os.environ.get(DIRECTORY):
            return None
        return cls(group)

    def close(self) -> None:
        """Copy a last time and end the thread. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(_JOIN_SECONDS)
            atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(PERIOD_SECONDS):
                self.update()
            self.update()
        except WeftError as error:  # a GPU or the group failed; the engine reports that
            _log.info("metrics of rank %d end: %s", self._group.rank, error)
        except Exception:
            _log.warning("metrics of rank %d end", self._group.rank, exc_info=True)

    def update(self) -> None:
        """Copy the counters."""
        for name, waits in self._group.waits().items():
            self._update_operator(name, waits)

    def _update_operator(self, operator: str, waits: Waits) -> None:
        rank, metrics = str(waits.rank), self._metrics
        histograms: defaultdict[tuple[str, str], list[int]] = defaultdict(
            lambda: [0] * (len(BOUNDS_NS) + 1)
        )
        for entry in waits.peers:
            causes: tuple[tuple[str, WaitTimes], ...]
            causes = (("skew", entry.skew), ("transfer", entry.transfer))
            for cause, times in causes:
                labels = (rank, str(entry.peer), operator, entry.phase, cause)
                self._advance(metrics.seconds, labels, times.total_seconds)
                self._advance(metrics.waits, labels, times.count)
                total = histograms[entry.phase, cause]
                for bucket, count in enumerate(times.counts):
                    total[bucket] += count
        for (phase, cause), counts in histograms.items():
            cumulative = list(itertools.accumulate(counts))
            limits = [str(bound / 1e9) for bound in _BOUNDS] + ["+Inf"]
            for limit, value in zip(limits, [*cumulative[:-1:2], cumulative[-1]], strict=True):
                self._advance(metrics.durations, (rank, operator, phase, cause, limit), value)
        for phase_times in waits.phases:
            of_phase = rank, operator, phase_times.phase
            self._advance(metrics.rounds, of_phase, phase_times.rounds)
            metrics.phase.labels(*of_phase).set(phase_times.seconds)
            metrics.between.labels(*of_phase).set(phase_times.between_seconds)

    def _advance(self, counter: Any, labels: tuple[str, ...], value: float) -> None:
        """Add the increase of a value, which new processes of a recovery may set back to 0."""
        key = (counter, *labels)
        before = self._seen[key] if value >= self._seen[key] else 0.0
        self._seen[key] = value
        counter.labels(*labels).inc(value - before)
