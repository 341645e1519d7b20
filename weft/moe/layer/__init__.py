# SPDX-License-Identifier: Apache-2.0
"""The MoE layer: options, choice of mode and overlap, workspace, and calls."""
