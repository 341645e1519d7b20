# SPDX-License-Identifier: Apache-2.0
"""The layer that weft implements."""

from weft.compat.triton_dist import EPLowLatencyAllToAllLayer as EPLowLatencyAllToAllLayer
