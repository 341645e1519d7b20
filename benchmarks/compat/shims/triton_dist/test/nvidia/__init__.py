# SPDX-License-Identifier: Apache-2.0
"""The runner puts triton_dist's own reference here."""
