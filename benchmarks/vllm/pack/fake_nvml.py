# SPDX-License-Identifier: Apache-2.0
"""Import this first on machines without a GPU: NVML answers vLLM like one H200.

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
    """Load vLLM's copy of pynvml before vLLM itself, whose import looks for a GPU."""
    vllm_spec = importlib.machinery.PathFinder.find_spec("vllm")
    if vllm_spec is None or not vllm_spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed")
    folder = f"{vllm_spec.submodule_search_locations[0]}/third_party"
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
    setattr(_nvml, _name, lambda *args, answer=_answer: answer)
torch.cuda._device_count_nvml = lambda: 1
