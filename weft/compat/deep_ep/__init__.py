# SPDX-License-Identifier: Apache-2.0
"""`Buffer` of deep_ep: low latency on weft.LowLatencyAllToAll, normal mode on weft.AllToAll.

docs/user/compat.md lists for each call what is the same, stricter or unsupported.
"""

from __future__ import annotations

import torch

from weft.compat.deep_ep.buffer import Buffer
from weft.compat.deep_ep.config import Config
from weft.compat.deep_ep.events import EventOverlap
from weft.keywords import explain_keywords

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64  # int32 ids are accepted as well

explain_keywords(globals())
