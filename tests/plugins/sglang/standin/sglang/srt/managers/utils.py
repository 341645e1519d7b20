# SPDX-License-Identifier: Apache-2.0
"""What managers have in common."""

from __future__ import annotations

from typing import Any


def is_health_check_generate_req(recv_req: Any) -> bool:
    return str(recv_req.rid).startswith("HEALTH_CHECK")
