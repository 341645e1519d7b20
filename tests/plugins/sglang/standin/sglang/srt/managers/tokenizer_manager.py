# SPDX-License-Identifier: Apache-2.0
"""The process that clients' requests come to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin


class TokenizerManager(TokenizerControlMixin):
    """Requests that are not answered yet, and what went to the ranks."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[Any] = []
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, *requests: Any) -> None:
        for request in requests:
            self.rid_to_state[request.rid] = SimpleNamespace()
            self._dispatch_to_scheduler(request)

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        self.sent.append(obj)

    def _handle_abort_req(self, recv_obj: Any) -> None:
        del self.rid_to_state[recv_obj.rid]
        self.answers[recv_obj.rid] = recv_obj.finished_reason
