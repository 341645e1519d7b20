"""What each decoder layer gives for the last token of a prompt: SGLang's plug-in "weft_layers".

LAYER_OUTPUTS names a folder. Every prefill writes a file for each of its prompts, named by the
prompt and by the number of prompts that were computed together. For servers without CUDA graphs.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

_batch: Any = None
_rows: list[torch.Tensor] = []


def register() -> None:
    """Hook the model's layers once they are loaded, and each forward pass."""
    if not os.environ.get("LAYER_OUTPUTS"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner."
    HookRegistry.register(runner + "load_model", hook_layers, HookType.AFTER)
    HookRegistry.register(runner + "forward", begin, HookType.BEFORE)
    HookRegistry.register(runner + "forward", write, HookType.AFTER)


def hook_layers(result: object, runner: Any) -> None:
    """Keep the last rows of what each layer of the model returns."""
    for layer in runner.model.model.layers:
        layer.register_forward_hook(keep)


def keep(module: object, inputs: object, output: Any) -> None:
    """A layer returns its own part and the residual: together they are the stream."""
    if _batch is None:
        return
    hidden, residual = output[:2]  # DeepSeek's return a third thing
    whole = hidden.float() if residual is None else hidden.float() + residual.float()
    ends = torch.tensor(lengths(_batch), device=whole.device).cumsum(0) - 1
    _rows.append(whole[ends].cpu())


def begin(runner: object, forward_batch: Any, *args: Any, **options: Any) -> None:
    """Record a pass that computes prompts, on ranks that have some."""
    global _batch
    _rows.clear()
    prompts = forward_batch.forward_mode.is_extend() and len(lengths(forward_batch)) > 0
    _batch = forward_batch if prompts else None


def write(result: object, runner: object, forward_batch: Any, *args: Any, **options: Any) -> None:
    """One file for each prompt: float32 `[layers, hidden]`."""
    global _batch
    if _batch is None or not _rows:
        return
    _batch = None
    folder = Path(os.environ["LAYER_OUTPUTS"])
    folder.mkdir(parents=True, exist_ok=True)
    layers = torch.stack(_rows, 1).numpy()
    ids, start = forward_batch.input_ids.cpu().tolist(), 0
    for i, length in enumerate(lengths(forward_batch)):
        prompt = ids[start : start + length]
        start += length
        np.save(folder / f"{name_of(prompt)}-{len(layers)}.npy", layers[i])


def lengths(batch: Any) -> list[int]:
    """New tokens of each prompt."""
    return [int(n) for n in batch.extend_seq_lens_cpu or [] if n > 0]


def name_of(ids: list[int]) -> str:
    """A prompt's name in files."""
    return f"{zlib.crc32(bytes(str(ids), 'ascii')):08x}"
