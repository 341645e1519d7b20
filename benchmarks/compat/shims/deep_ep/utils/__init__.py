# SPDX-License-Identifier: Apache-2.0
"""The runner puts envs.py, math.py and testing.py of deep_ep here."""
