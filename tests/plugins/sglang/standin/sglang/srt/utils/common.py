# SPDX-License-Identifier: Apache-2.0
"""Whether ranks tell each other how many tokens they have."""

from __future__ import annotations

from typing import Any


def require_mlp_tp_gather(server_args: Any) -> bool:
    return False
