# SPDX-License-Identifier: Apache-2.0
"""Routing of an MoE layer: rules, and their kernels."""
