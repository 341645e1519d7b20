# SPDX-License-Identifier: Apache-2.0
"""Imported first where there is no GPU: what vLLM asks of NVML is answered as of one H200.

Nothing can run on it.
"""

import importlib.machinery
import importlib.util
import sys
import types

import fake_gpu
import torch

ANSWERS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetName": fake_gpu.PROPERTIES.name,
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=fake_gpu.PROPERTIES.total_memory),
}
PACKAGE = "vllm.third_party"


def load() -> types.ModuleType:
    """vLLM's copy of pynvml, before vLLM itself, which looks for a GPU when it is imported."""
    found = importlib.machinery.PathFinder.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("there is no vLLM")
    folder = f"{found.submodule_search_locations[0]}/third_party"
    package = types.ModuleType(PACKAGE)
    package.__path__ = [folder]
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.pynvml", f"{folder}/pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules |= {PACKAGE: package, f"{PACKAGE}.pynvml": module}
    spec.loader.exec_module(module)
    package.pynvml = module  # type: ignore[attr-defined]
    return module


_nvml = load()
for _name, _answer in ANSWERS.items():
    setattr(_nvml, _name, lambda *given, answer=_answer: answer)
torch.cuda._device_count_nvml = lambda: 1
