"""The layer that weft has."""

from weft.compat.triton_dist import EPLowLatencyAllToAllLayer as EPLowLatencyAllToAllLayer
