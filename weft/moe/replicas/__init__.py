# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts (EPLB): placement and relocation."""
