# SPDX-License-Identifier: Apache-2.0
"""As much of mpi4py as the programs use, over a store of torch.distributed's."""
