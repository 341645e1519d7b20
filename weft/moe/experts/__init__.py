# SPDX-License-Identifier: Apache-2.0
"""Experts of an MoE layer: modules, weights, checkpoints, and how a rank runs them."""
