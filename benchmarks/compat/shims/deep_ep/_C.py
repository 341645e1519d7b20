# SPDX-License-Identifier: Apache-2.0
"""Empty: deep_ep's helpers import this module for calls that the programs do not make."""
