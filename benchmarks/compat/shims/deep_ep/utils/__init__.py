# SPDX-License-Identifier: Apache-2.0
"""The runner copies deep_ep's envs.py, math.py and testing.py here."""
