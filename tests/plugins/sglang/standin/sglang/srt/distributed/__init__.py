# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks."""

from sglang.srt.distributed.parallel_state import get_moe_ep_group

__all__ = ["get_moe_ep_group"]
