# SPDX-License-Identifier: Apache-2.0
"""Exchanges between hosts: a rail joins the ranks that have the same index on each host."""
