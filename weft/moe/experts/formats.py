# SPDX-License-Identifier: Apache-2.0
"""Parser for `quantization_config` in config.json: the format of a checkpoint's experts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument
from weft.json_files import read_json
from weft.shape import FP8_BLOCK

CONFIG = "config.json"
INT4_GROUPS = (32, 128)
METHODS = ("fp8", "compressed-tensors", "mxfp4")
_SUPPORTED = (
    "weft reads FP8 with one scale per 128 x 128 block, per 32 or 128 columns, per row or per "
    "matrix, symmetric INT4 in groups of 32 or 128, MXFP4, and unquantised floats"
)


@dataclass(frozen=True, slots=True)
class DeclaredFormat:
    """Format of the experts that config.json declares.

    Attributes:
        source: Path of config.json, for errors; "" without one.
        scheme: "plain", "fp8", "int4" or "mxfp4"; "" if the config does not declare it.
        block: Rows and columns that share a scale; 0 is the whole dimension. None: undeclared.
    """

    source: str = ""
    scheme: str = ""
    block: tuple[int, int] | None = None


def read_declared_format(folder: Path, experts: str) -> DeclaredFormat:
    """Read the format that a checkpoint's config.json declares for some experts.

    Args:
        folder: Folder of the checkpoint.
        experts: Common prefix of the names of the experts' tensors.

    Raises:
        InvalidArgument: the config names a method or options that weft does not read.
    """
    path = folder / CONFIG
    if not os.path.lexists(path):
        return DeclaredFormat()
    config = read_json(path, "the model's config")
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    inner = config.get("text_config") if isinstance(config, dict) else None
    if quantization is None and isinstance(inner, dict):
        quantization = inner.get("quantization_config")
    if quantization is None:
        return DeclaredFormat(str(path))
    if not isinstance(quantization, Mapping):
        raise InvalidArgument(f"quantization_config in {path} is not an object")
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise InvalidArgument(
            f"quant_method in quantization_config of {path} is {method!r}; {_SUPPORTED}: convert "
            "the checkpoint"
        )
    ignored = [
        *_read_strings(quantization, "ignore", path),
        *_read_strings(quantization, "modules_to_not_convert", path),
    ]
    if any(_matches_experts(pattern, experts) for pattern in ignored):
        return DeclaredFormat(str(path), "plain")
    if method == "fp8":
        return DeclaredFormat(str(path), "fp8", _parse_fp8_block(quantization, path))
    if method == "mxfp4":
        return DeclaredFormat(str(path), "mxfp4", (1, 32))
    return _parse_compressed_tensors(quantization, path, experts)


def _read_strings(quantization: Mapping[str, Any], name: str, path: Path) -> list[str]:
    values = quantization.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidArgument(f"{name} in quantization_config of {path} is not a list of names")
    return values


def _matches_experts(pattern: str, experts: str) -> bool:
    """Whether a module name, or `re:` with a regular expression, matches the experts."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], f"{experts}0.gate_proj") is not None
        except re.error as error:
            raise InvalidArgument(
                f"quantization_config has an invalid pattern {pattern!r}: {error}"
            ) from error
    return experts.startswith(f"{pattern}.") or f"{experts}0".startswith(f"{pattern}.")


def _parse_fp8_block(quantization: Mapping[str, Any], path: Path) -> tuple[int, int] | None:
    block = quantization.get("weight_block_size")
    if block is None:
        return None
    if block not in ([FP8_BLOCK, FP8_BLOCK], [1, 32], [1, FP8_BLOCK]):
        raise InvalidArgument(
            f"weight_block_size in quantization_config of {path} is {block}; {_SUPPORTED}"
        )
    return block[0], block[1]


def _parse_compressed_tensors(
    quantization: Mapping[str, Any], path: Path, experts: str
) -> DeclaredFormat:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InvalidArgument(
            f"config_groups in quantization_config of {path} is not an object, or is empty"
        )
    schemes = [scheme for scheme in groups.values() if isinstance(scheme, Mapping)]
    specific = [
        scheme
        for scheme in schemes
        if any(
            _matches_experts(str(target), experts)
            for target in scheme.get("targets") or ()
            if target != "Linear"
        )
    ]
    general = [scheme for scheme in schemes if "Linear" in (scheme.get("targets") or ())]
    candidates = specific or general or schemes
    if len(candidates) != 1:
        raise InvalidArgument(
            f"config_groups in quantization_config of {path} has {len(candidates)} groups for the "
            f"experts {experts}*; exactly one is supported"
        )
    weights = candidates[0].get("weights")
    if not isinstance(weights, Mapping):
        raise InvalidArgument(f"a group in quantization_config of {path} has no weights")
    return _parse_weights_scheme(weights, path)


def _parse_weights_scheme(weights: Mapping[str, Any], path: Path) -> DeclaredFormat:
    bits, kind = weights.get("num_bits"), weights.get("type")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    symmetric, actorder = weights.get("symmetric"), weights.get("actorder")
    where = f"weights in quantization_config of {path}"
    if symmetric is False or actorder not in (None, False, "weight"):
        raise InvalidArgument(
            f"{where} are asymmetric or reordered (symmetric {symmetric!r}, actorder "
            f"{actorder!r}); {_SUPPORTED}"
        )
    if (bits, kind, strategy) == (4, "int", "group") and size in INT4_GROUPS:
        return DeclaredFormat(str(path), "int4", (1, int(size)))
    if (bits, kind) == (4, "float") and size == 32:
        return DeclaredFormat(str(path), "mxfp4", (1, 32))
    if (bits, kind) == (8, "float"):
        if strategy == "group" and size in (32, FP8_BLOCK):
            return DeclaredFormat(str(path), "fp8", (1, int(size)))
        if strategy == "block" and weights.get("block_structure") in (None, [FP8_BLOCK] * 2):
            return DeclaredFormat(str(path), "fp8", (FP8_BLOCK, FP8_BLOCK))
        if strategy in ("channel", "tensor"):
            return DeclaredFormat(str(path), "fp8", (1, 0) if strategy == "channel" else (0, 0))
    raise InvalidArgument(
        f"{where} are {bits} bits, type {kind!r}, strategy {strategy!r}, group_size {size!r}; "
        f"{_SUPPORTED}"
    )
