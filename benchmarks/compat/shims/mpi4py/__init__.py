# SPDX-License-Identifier: Apache-2.0
"""The parts of mpi4py that the programs use, over a torch.distributed store."""
