# SPDX-License-Identifier: Apache-2.0
"""Reader for one layer's experts in a safetensors checkpoint, one stored matrix at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch.nn import functional

from weft.arguments import raise_invalid
from weft.distribution import install_hint
from weft.errors import InvalidArgument
from weft.json_files import read_json
from weft.moe.experts.formats import INT4_GROUPS, read_declared_format
from weft.moe.models import MoEConfig
from weft.shape import FP8_BLOCK

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_LAYER = 999_999
PLAIN = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
PACKED = ("U8", "I8")  # MXFP4, two values per byte
INT4 = "I32"  # eight values per word
POWERS = ("U8", "F8_E8M0")  # power-of-two scales
MX_BLOCK = 32
# The name of an expert's tensor: layer, MoE block if any, rest.
_EXPERTS = re.compile(
    r"(?:.*\.)?layers\.(\d{1,6})\.((?:mlp|feed_forward|ffn|block_sparse_moe|mixer)\.)?experts\.(.+)"
)

# Layer stacks other than the main model's: a draft model's or an encoder's.
_OTHER_STACK = re.compile(r"(?:^|\.)(?:mtp|draft|eagle|visual|vision\w*|audio\w*)\b")

# separate: each expert has its own matrices. The others are one tensor for all experts: fused is
# `[experts, rows, columns]`, as transformers in memory; transposed is `[experts, columns, rows]`
# (Llama 4); interleaved is transposed with alternating gate and up columns (GPT-OSS).
Storage = Literal["separate", "fused", "transposed", "interleaved"]
# Gate, up and down matrices of separate experts; experts without a gate lack the first.
MATRICES = ("gate_proj", "up_proj", "down_proj")
SHORT_MATRICES = ("w1", "w3", "w2")  # DeepSeek-V4, MiniMax, Kimi-K3
SCALE_NAMES = ("weight_scale_inv", "scale", "weight_scale")  # suffixes after a matrix's name


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one tensor of one expert.

    Attributes:
        name: Name and location of the tensor, for errors.
        field: Field of ExpertWeights.
        rows: Rows within that field.
        values: `[rows, columns]`, or `[rows]` of a bias, as stored, on the CPU with any strides.
            MXFP4: uint8 `[rows, columns / 2]`. INT4: int8.
        scale: For FP8 and INT4, float32 with one entry per block, the last ones perhaps partial.
            For MXFP4, uint8 `[rows, columns / 32]`. Else None.
        block: Rows and columns that share a scale.
    """

    name: str
    field: str
    rows: slice
    values: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)

    def pad(self, columns: int) -> Part:
        """Return this part, zero-padded to its rows and to `columns` columns of values.

        Only MXFP4 may have scales.
        """
        missing = self.rows.stop - self.rows.start - len(self.values)
        values = _pad(self.values, missing, columns if self.scale is None else columns // 2)
        scale = None if self.scale is None else _pad(self.scale, missing, columns // MX_BLOCK)
        return replace(self, values=values, scale=scale)


@contextmanager
def open_layer(
    folder: Path | str, layer: int, config: MoEConfig, prefix: str | None = None
) -> Iterator[LayerReader]:
    """Open a layer's experts; the files are closed on exit.

    Args:
        prefix: Prefix of the layers' names, if the checkpoint has several stacks of layers.

    Raises:
        InvalidArgument: a tensor does not match the config. The text names file and tensor.
    """
    if not isinstance(folder, str | Path):
        raise_invalid("folder", folder, f"the path of a folder with {INDEX} or {SINGLE}")
    with ExitStack() as files:
        yield LayerReader(Path(folder), layer, config, files, prefix)


class LayerReader:
    """Reader of experts by id, which loads each matrix on demand.

    Attributes:
        mxfp4: Whether the experts are MXFP4.
    """

    def __init__(
        self,
        folder: Path,
        layer: int,
        config: MoEConfig,
        files: ExitStack,
        prefix: str | None = None,
    ) -> None:
        self._config, self._stack = config, files
        self._open_files: dict[Path, Any] = {}
        self._source = folder / INDEX
        if self._source.is_file():
            self._files = _read_index(folder, self._source)
        else:
            self._source = folder / SINGLE
            if not self._source.is_file():
                raise InvalidArgument(
                    f"folder is {str(folder)!r}; it has neither {INDEX} nor {SINGLE}"
                )
            self._files = dict.fromkeys(self._open_file(self._source).keys(), self._source)
        # Common prefix of the names of this layer's experts, and what follows it.
        self._stem, self._names = self._find_experts(layer, prefix)
        self._declared_format = read_declared_format(folder, self._stem)
        gated = config.gating.num_projections == 2
        self._fused_name = "gate_up_proj" if gated else "up_proj"
        self._layout = self._find_layout()
        short = any(".w1." in name for name in self._names)
        matrices = SHORT_MATRICES if short else MATRICES
        self._matrices = matrices[-1 - config.gating.num_projections :]
        self.mxfp4 = self._is_mxfp4()
        self._inner, self._hidden = self._get_stored_sizes()
        sizes = config.intermediate, config.hidden
        self._is_padded = sizes != (self._inner, self._hidden)
        self._check_names()

    def read_parts(self, expert: int) -> Iterator[Part]:
        """Yield all parts of an expert, in the order in which the files store them."""
        if self._layout == "separate":
            yield from self._read_separate_parts(expert)
            return
        gate_up_rows = self._config.gating.num_projections * self._inner
        inner, hidden = self._config.intermediate, self._config.hidden
        gate, up, down = slice(0, inner), slice(inner, 2 * inner), slice(0, hidden)
        values, scale = self._read_fused(self._fused_name, gate_up_rows, self._hidden, expert)
        if self._layout == "interleaved":
            for rows, first in ((gate, 0), (up, 1)):
                powers = None if scale is None else scale[first::2]
                yield self._create_part("gate_up", expert, rows, values[first::2], powers, hidden)
        else:
            rows = slice(0, self._config.gate_up_rows)
            yield self._create_part("gate_up", expert, rows, values, scale, hidden)
        values, scale = self._read_fused("down_proj", self._hidden, self._inner, expert)
        yield self._create_part("down", expert, down, values, scale, inner)
        if self._config.biased:
            bias = self._read("gate_up_proj_bias", (gate_up_rows,), expert=expert)
            yield self._create_part("gate_up_bias", expert, gate, bias[::2])
            yield self._create_part("gate_up_bias", expert, up, bias[1::2])
            bias = self._read("down_proj_bias", (self._hidden,), expert=expert)
            yield self._create_part("down_bias", expert, down, bias)

    def _create_part(
        self,
        field: str,
        expert: int,
        rows: slice,
        values: torch.Tensor,
        scale: torch.Tensor | None = None,
        columns: int = 0,
        block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK),
    ) -> Part:
        name = f"{self._stem}{expert}, {field} of rows {rows.start}.."
        part = Part(name, field, rows, values, scale, block)
        return part.pad(columns) if self.mxfp4 or self._is_padded else part

    def _read_separate_parts(self, expert: int) -> Iterator[Part]:
        inner, hidden = self._config.intermediate, self._config.hidden
        *first_matrices, down = self._matrices
        for i, name in enumerate(first_matrices):
            rows, shape = slice(i * inner, (i + 1) * inner), (self._inner, self._hidden)
            yield self._read_matrix(expert, name, "gate_up", rows, shape, hidden)
        shape = self._hidden, self._inner
        yield self._read_matrix(expert, down, "down", slice(0, hidden), shape, inner)

    def _read_matrix(
        self,
        expert: int,
        name: str,
        field: str,
        target_rows: slice,
        shape: tuple[int, int],
        target_columns: int,
    ) -> Part:
        """Read one matrix `shape` of a separately stored expert, in any format."""
        (rows, columns), stem = shape, f"{expert}.{name}"
        self._check_exclusive(stem, ("weight", "weight_packed"))
        self._check_exclusive(stem, SCALE_NAMES)
        name = f"{stem}.weight"
        if f"{name}_packed" in self._names:  # compressed-tensors
            name = f"{name}_packed"
        scale_names = [f"{stem}.{suffix}" for suffix in SCALE_NAMES]
        scale_name = next((n for n in scale_names if n in self._names), scale_names[0])
        dtype, row_groups = self._get_dtype(name), (rows, -(-columns // FP8_BLOCK))
        self._check_declared(name, dtype)
        if self._is_padded and dtype not in PLAIN:
            raise InvalidArgument(
                f"{self._source} has {self._stem}{name} {list(shape)} as {dtype}, and the config "
                f"has intermediate {self._config.intermediate} and hidden {self._config.hidden}; "
                "weft pads only unquantised experts: pass the checkpoint's sizes"
            )
        if dtype in PACKED or dtype == INT4:
            unit = 8 if dtype == INT4 else MX_BLOCK
            if columns % unit:
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name} as {dtype} with {columns} columns; "
                    f"such weights need a multiple of {unit}: pad them before quantisation"
                )
        if dtype in PACKED:
            values = self._read(name, (rows, columns // 2), dtypes=PACKED).view(torch.uint8)
            powers = (rows, columns // MX_BLOCK)
            scale = self._read(scale_name, powers, dtypes=POWERS).view(torch.uint8)
            return self._create_part(field, expert, target_rows, values, scale, columns)
        if dtype == INT4:
            words = self._read(name, (rows, columns // 8), dtypes=(INT4,))
            groups: list[tuple[int, ...]] = [
                (rows, columns // g) for g in INT4_GROUPS if columns % g == 0
            ]
            scale, block = self._read_scales(scale_name, shape, groups)
            values = _unpack_int4(words)
        else:
            values = self._read(name, shape, dtypes=(*PLAIN, FP8, *PACKED, INT4))
            if dtype != FP8:
                if scale_name in self._names:
                    raise InvalidArgument(
                        f"{self._source} has scales {self._stem}{scale_name} beside "
                        f"unquantised weights {self._stem}{name} ({dtype}): the weights and the "
                        "scales do not match"
                    )
                return self._create_part(field, expert, target_rows, values, None, target_columns)
            blocks: list[tuple[int, ...]] = [(-(-rows // FP8_BLOCK), row_groups[1])]
            if columns % MX_BLOCK == 0:
                blocks.append((rows, columns // MX_BLOCK))
            blocks += [row_groups, (rows, 1), (rows,), (1, 1), (1,), ()]
            scale, block = self._read_scales(scale_name, shape, blocks)
        return self._create_part(field, expert, target_rows, values, scale, columns, block)

    def _read_scales(
        self, name: str, shape: tuple[int, int], allowed: list[tuple[int, ...]]
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return a matrix's scales, float32 `[row blocks, column blocks]`, and the block size.

        Args:
            allowed: Shapes that the stored scales may have.
        """
        path, tensor = self._find_tensor(name)
        stored_shape = tuple(tensor.get_shape())
        if stored_shape not in allowed:
            options = ", ".join(str(list(s)) for s in allowed) or "none"
            raise InvalidArgument(
                f"{path} has {self._stem}{name} {list(stored_shape)} beside weights {list(shape)}; "
                f"supported shapes of scales: {options}. Groups of a row have 32 or 128 "
                "columns, blocks 128 x 128: convert the checkpoint"
            )
        stored = self._read(name, stored_shape, dtypes=PLAIN + POWERS)
        if stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e8m0fnu)
        scale = stored.float().reshape(stored_shape if len(stored_shape) == 2 else (-1, 1))
        block_rows, block_columns = (
            next(b for b in (1, MX_BLOCK, FP8_BLOCK, size) if -(-size // b) == count)
            for size, count in zip(shape, scale.shape, strict=True)
        )
        if not torch.isfinite(scale).all() or (scale < 0).any():
            raise InvalidArgument(
                f"{path} has a NaN, an infinity or a negative number in the scales "
                f"{self._stem}{name}: the file is damaged"
            )
        block = block_rows, block_columns
        self._check_block(name, shape, scale.shape, block)
        return scale, block

    def _check_exclusive(self, stem: str, suffixes: Sequence[str]) -> None:
        """Raise InvalidArgument if a matrix has several tensors of which only one would be read."""
        names = [f"{stem}.{suffix}" for suffix in suffixes if f"{stem}.{suffix}" in self._names]
        if len(names) > 1:
            raise InvalidArgument(
                f"{self._source} has {' and '.join(f'{self._stem}{name}' for name in names)}; a "
                "matrix has one of them: remove the other"
            )

    def _check_declared(self, name: str, dtype: str) -> None:
        """Raise InvalidArgument for a quantised tensor that contradicts config.json."""
        schemes = {FP8: "fp8", INT4: "int4"} | dict.fromkeys(PACKED, "mxfp4")
        scheme, declared = schemes.get(dtype, ""), self._declared_format
        if not scheme or not declared.scheme:
            return
        # FP8 checkpoints may store their experts as MXFP4 without declaring it.
        if declared.scheme in (scheme, "fp8" if scheme == "mxfp4" else scheme):
            return
        raise InvalidArgument(
            f"{self._source} has {self._stem}{name} as {dtype}, which is {scheme}, but "
            f"quantization_config of {declared.source} says that these experts are "
            f"{declared.scheme}: the weights and the config do not match"
        )

    def _check_block(
        self, name: str, shape: tuple[int, int], scales: Sequence[int], block: tuple[int, int]
    ) -> None:
        """Raise InvalidArgument if the block size contradicts the config or is ambiguous."""
        declared = self._declared_format
        if declared.block is not None and declared.scheme != "mxfp4":
            declared_block = tuple(b or size for b, size in zip(declared.block, shape, strict=True))
            expected = tuple(-(-size // b) for size, b in zip(shape, declared_block, strict=True))
            if tuple(scales) != expected:
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name} {list(scales)} for weights "
                    f"{list(shape)}, but quantization_config of {declared.source} says blocks of "
                    f"{list(declared_block)}, which need {list(expected)}: the weights and the "
                    "config do not match"
                )
            return
        unambiguous = all(
            count == 1 or b == 1 or size % b == 0
            for size, b, count in zip(shape, block, scales, strict=True)
        )
        if not unambiguous:
            raise InvalidArgument(
                f"{self._source} has {self._stem}{name} {list(scales)} for weights {list(shape)}, "
                "which are not multiples of 128, so the block size is ambiguous without "
                "quantization_config: put the model's config.json with its "
                "quantization_config beside the checkpoint"
            )

    def _check_names(self) -> None:
        """Raise InvalidArgument for an unknown tensor, which weft would otherwise ignore."""
        if self._layout != "separate":
            kinds = ("", "_blocks", "_scales", "_bias")
            expected_names = {
                f"{m}{suffix}" for m in (self._fused_name, "down_proj") for suffix in kinds
            }
            for name in sorted(self._names - expected_names):
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name} beside fused experts, which weft does "
                    f"not read: they are {self._fused_name} and down_proj, with biases, blocks and "
                    "scales"
                )
            return
        suffixes = ("weight", "weight_packed", "weight_shape", *SCALE_NAMES, "input_scale")
        expected_names = {f"{m}.{suffix}" for m in self._matrices for suffix in suffixes}
        for name in sorted(self._names):
            if name.partition(".")[2] not in expected_names:
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name}, which weft does not read: experts are "
                    f"{', '.join(self._matrices)} with symmetric scales, without biases, zero "
                    "points or activation order: convert the checkpoint"
                )

    def _read_fused(
        self, name: str, rows: int, columns: int, expert: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.mxfp4:
            blocks = columns // MX_BLOCK
            size = (rows, blocks, MX_BLOCK // 2)
            values = self._read(f"{name}_blocks", size, expert=expert, dtypes=PACKED)
            powers = self._read(f"{name}_scales", (rows, blocks), expert=expert, dtypes=POWERS)
            return values.view(torch.uint8).flatten(1), powers.view(torch.uint8)
        if self._layout == "fused":
            return self._read(name, (rows, columns), expert=expert), None
        return self._read(name, (columns, rows), expert=expert).T, None

    def _is_mxfp4(self) -> bool:
        if self._layout != "separate":
            return f"{self._fused_name}_blocks" in self._names
        gate = f".{self._matrices[0]}.weight"
        gates = sorted(n for n in self._names if n.endswith((gate, f"{gate}_packed")))
        return bool(gates) and self._get_dtype(gates[0]) in PACKED

    def _get_stored_sizes(self) -> tuple[int, int]:
        """Return the stored intermediate and hidden sizes.

        Fused MXFP4 experts and separate unquantised ones may be smaller than the config, whose
        sizes are then rounded up to whole blocks of 128. All others must have the config's sizes.
        """
        expected = self._config.intermediate, self._config.hidden
        if self._layout == "separate":
            suffix = f".{self._matrices[-1]}.weight"
            name = next((n for n in sorted(self._names) if n.endswith(suffix)), None)
            if name is None or self._get_dtype(name) not in PLAIN:
                return expected
        elif self.mxfp4:
            name = "down_proj_blocks"
        else:
            return expected
        shape = self._find_tensor(name)[1].get_shape()
        if self.mxfp4:  # [experts, hidden, blocks, bytes]
            shape = [*shape[1:2], *(blocks * MX_BLOCK for blocks in shape[2:3])]
        if len(shape) != 2:
            return expected  # _read rejects the tensor later
        stored = int(shape[1]), int(shape[0])
        if all(
            size in (stored_size, -(-stored_size // FP8_BLOCK) * FP8_BLOCK)
            for stored_size, size in zip(stored, expected, strict=True)
        ):
            return stored
        return expected

    def _find_experts(self, layer: int, prefix: str | None) -> tuple[str, set[str]]:
        """Return the common prefix of the layer's expert names, and the rest of each name.

        By default the main model's stack is read, not that of a draft model or an encoder.
        """
        names_by_stem: dict[str, set[str]] = {}
        layers = set()
        for name in self._files:
            if ".experts." in name and (match := _EXPERTS.fullmatch(name)):
                layers.add(int(match[1]))
                if int(match[1]) == layer:
                    names_by_stem.setdefault(name[: match.start(3)], set()).add(match[3])
        stacks = {stem.rpartition("layers.")[0]: stem for stem in names_by_stem}
        if prefix is not None:
            expected = f"{prefix.rstrip('.')}." if prefix else ""
            stems = [stem for stack, stem in stacks.items() if stack == expected]
        else:
            stems = [stem for stack, stem in stacks.items() if not _OTHER_STACK.search(stack)]
        if len(stems) == 1:
            return stems[0], names_by_stem[stems[0]]
        if names_by_stem:
            prefixes = " and ".join(repr(stack.rstrip(".")) for stack in sorted(stacks))
            argument = "" if prefix is None else f"prefix is {prefix!r}; "
            raise InvalidArgument(
                f"{argument}{self._source} has experts of layer {layer} under the prefixes "
                f"{prefixes}: pass one of them as prefix="
            )
        available = f"{min(layers)}..{max(layers)}" if layers else "none"
        raise InvalidArgument(
            f"layer is {layer}, but {self._source} has no experts of it (layers: {available})"
        )

    def _find_layout(self) -> Storage:
        """Return the storage layout of the experts, according to the tensors' names."""
        biased = "gate_up_proj_bias" in self._names
        if biased != self._config.biased:
            actual = "biases" if biased else "no biases"
            raise InvalidArgument(
                f"the experts {self._stem}* of {self._source} have {actual}, but the config has "
                f"biased={self._config.biased}: use MoEConfig.from_hf of the same model"
            )
        if not self._names & {self._fused_name, f"{self._fused_name}_blocks"}:
            return "separate"
        if biased or "gate_up_proj_blocks" in self._names:
            return "interleaved"
        inner, hidden = self._config.intermediate, self._config.hidden
        names = [name for name in ("down_proj", self._fused_name) if name in self._names]
        shapes = [self._find_tensor(name)[1].get_shape()[1:] for name in names]
        # Llama 4 transposes; LFM2, if transformers did not save the original format, does not.
        fused = shapes == [[hidden, inner], [self._config.gate_up_rows, hidden]]
        return "transposed" if ".feed_forward." in f".{self._stem}" and not fused else "fused"

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        expert: int | None = None,
        dtypes: tuple[str, ...] = PLAIN,
    ) -> torch.Tensor:
        """Read a tensor, or only one expert's slice of it."""
        path, tensor = self._find_tensor(name)
        full = self._stem + name
        expected = list(shape) if expert is None else [self._config.routing.num_experts, *shape]
        if list(tensor.get_shape()) != expected:
            raise InvalidArgument(
                f"{path} has {full} {list(tensor.get_shape())}; the config expects {expected}: "
                "use MoEConfig.from_hf of the same model"
            )
        if tensor.get_dtype() not in dtypes:
            raise InvalidArgument(
                f"{path} has {full} as {tensor.get_dtype()}; weft reads it as {', '.join(dtypes)}"
            )
        with torch.device("cpu"):  # safetensors allocates on the caller's default device
            values: torch.Tensor = tensor[...] if expert is None else tensor[expert]
        return values

    def _find_tensor(self, name: str) -> tuple[Path, Any]:
        """Return a tensor's file and its slice object; this reads no values."""
        full = self._stem + name
        path = self._files.get(full)
        if path is None:
            raise InvalidArgument(f"{self._source} has no tensor {full}; {self._build_hint(name)}")
        try:
            return path, self._open_file(path).get_slice(full)
        except _import_safetensors()[1] as error:
            raise InvalidArgument(
                f"{path} has no tensor {full}, though {self._source} names that file: {error}"
            ) from error

    def _get_dtype(self, name: str) -> str:
        """Return the tensor's dtype as safetensors names it."""
        return str(self._find_tensor(name)[1].get_dtype())

    def _build_hint(self, name: str) -> str:
        """Return a hint for the error about a missing tensor."""
        if name.endswith(SCALE_NAMES):
            return (
                "weights need scales: FP8 one per 128 x 128 block, per 32 or 128 columns, per row "
                "or per matrix; MXFP4 one per 32 columns; INT4 one per 32 or 128 columns"
            )
        if name.endswith("_scales"):
            return "MXFP4 weights need one scale per 32 columns"
        first = name.partition(".")[0]
        similar = sorted(other for other in self._names if other.partition(".")[0] == first)
        names = ", ".join(similar[:4] or sorted(self._names)[:4])
        return f"{self._stem}* are {names}{', ...' if len(self._names) > 4 else ''}"

    def _open_file(self, path: Path) -> Any:
        """Return the open file, opening it on first use."""
        if path not in self._open_files:
            safe_open, safetensors_error = _import_safetensors()
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, UnicodeError, safetensors_error) as error:
                raise InvalidArgument(f"cannot read {str(path)!r}: {error}") from error
            self._open_files[path] = handle
        return self._open_files[path]


def _unpack_int4(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 `[rows, columns / 8]`, lowest four bits first, to int8 `[rows, columns]`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts & 15) - 8).to(torch.int8).flatten(1)


def _pad(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Append `rows` rows of zeros, and pad a matrix with zeros to `columns` columns."""
    column_padding = (0, columns - tensor.shape[1]) if tensor.dim() == 2 else ()
    return functional.pad(tensor, (*column_padding, 0, rows))


def _read_index(folder: Path, index: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises InvalidArgument for files outside the folder."""
    content = read_json(index, "the checkpoint's index")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise InvalidArgument(f"{index} has no object 'weight_map' of tensors and their files")
    paths: dict[str, Path] = {}
    for file in weight_map.values():
        if not isinstance(file, str):
            raise InvalidArgument(f"{index} names a file {file!r}; it must be a string")
        if file in paths:
            continue
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise InvalidArgument(
                f"{index} names the file {file!r}; weft reads *.safetensors only in that folder"
            )
        paths[file] = folder / path
    try:
        for file in paths:
            os.fsencode(file)
    except UnicodeError as error:
        raise InvalidArgument(f"{index} names a file with an invalid name: {error}") from error
    return {name: paths[file] for name, file in weight_map.items()}


def _import_safetensors() -> tuple[Any, type[Exception]]:
    """Import safe_open and SafetensorError. Raises InvalidArgument if safetensors is missing."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise InvalidArgument(
            f"checkpoints need safetensors: {error}; {install_hint('checkpoint')}"
        ) from error
    return safe_open, SafetensorError
