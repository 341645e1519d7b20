# SPDX-License-Identifier: Apache-2.0
"""Nothing: deep_ep's helpers import it for calls that the programs do not make."""
