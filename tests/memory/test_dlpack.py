# SPDX-License-Identifier: Apache-2.0
"""Tensors over bare addresses: they see the memory and keep its owner alive."""

import ctypes
import gc
import weakref

import torch

from weft.memory import dlpack


class Owner:
    """Stands for what a view keeps alive."""


def test_a_tensor_sees_the_memory_and_keeps_its_owner():
    memory = (ctypes.c_ubyte * 64)(*range(64))
    owner = Owner()
    gone = weakref.ref(owner)
    tensor = dlpack.tensor_at(ctypes.addressof(memory), 64, torch.device("cpu"), owner)
    assert tensor.dtype is torch.uint8
    assert tensor.tolist() == list(range(64))
    view = tensor[8:24].view(torch.int32)
    view[0] = 0
    assert list(memory[8:12]) == [0] * 4
    assert tensor.data_ptr() == ctypes.addressof(memory)
    del owner, tensor
    gc.collect()
    assert gone() is not None
    del view
    assert gone() is None
    assert not dlpack._alive


def test_the_device_is_the_one_that_was_named():
    structure = dlpack._Managed()
    structure.tensor.device = dlpack._Device(dlpack._KINDS["cuda"], 3)
    assert (structure.tensor.device.kind, structure.tensor.device.index) == (2, 3)
    assert ctypes.sizeof(dlpack._Managed) == 64  # DLManagedTensor of DLPack 0.8
