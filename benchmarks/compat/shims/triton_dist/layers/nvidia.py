# SPDX-License-Identifier: Apache-2.0
"""The layer that weft has."""

from weft.compat.triton_dist import EPLowLatencyAllToAllLayer as EPLowLatencyAllToAllLayer
