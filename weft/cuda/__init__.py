# SPDX-License-Identifier: Apache-2.0
"""CUDA driver calls, and GPU memory that several processes map."""
