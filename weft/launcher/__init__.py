# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks of this machine, as processes or as threads."""

from weft.launcher.launch import launch

__all__ = ["launch"]
