# SPDX-License-Identifier: Apache-2.0
"""What an operator of several hosts adds to the one-sided one: a rail between equal places."""
