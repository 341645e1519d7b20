# SPDX-License-Identifier: Apache-2.0
"""The runner copies triton_dist's own reference here."""
