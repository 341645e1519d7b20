# SPDX-License-Identifier: Apache-2.0
"""Kernels for MXFP4."""

from __future__ import annotations

from enum import Enum


class Mxfp4MoeBackend(Enum):
    NONE = "None"
