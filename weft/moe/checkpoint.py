# SPDX-License-Identifier: Apache-2.0
"""One layer's experts in a checkpoint of safetensors files, one stored matrix at a time."""

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

from weft.arguments import refuse
from weft.distribution import install_hint
from weft.errors import InvalidArgument
from weft.json_files import read_json
from weft.moe.formats import INT4_GROUPS, declared_format
from weft.moe.models import MoEConfig
from weft.shape import FP8_BLOCK

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_LAYER = 999_999
PLAIN = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
PACKED = ("U8", "I8")  # MXFP4, two numbers a byte
INT4 = "I32"  # eight numbers a word
POWERS = ("U8", "F8_E8M0")  # scales that are powers of two
MX_BLOCK = 32
# A tensor of one layer's experts: everything before this layer's, the layer, the block, the rest.
_EXPERTS = re.compile(
    r"(?:.*\.)?layers\.(\d{1,6})\.(mlp|feed_forward|ffn|block_sparse_moe)\.experts\.(.+)"
)

# Stacks beside the model's own: of a draft model, or of an encoder.
_BESIDE = re.compile(r"(?:^|\.)(?:mtp|draft|eagle|visual|vision\w*|audio\w*)\b")

# How gate_up_proj holds a layer's experts. separate: not at all, each has matrices of its own;
# fused: `[experts, rows, columns]`, as transformers does in memory; transposed: `[experts, columns,
# rows]` (Llama 4); interleaved: so, with columns of the gate and of up in turn (GPT-OSS).
Storage = Literal["separate", "fused", "transposed", "interleaved"]
# Matrices of experts that are separate: the gate's, the up's and the down's.
MATRICES = ("gate_proj", "up_proj", "down_proj")
SHORT_MATRICES = ("w1", "w3", "w2")  # DeepSeek-V4, MiniMax, Kimi-K3
# What a matrix's scales are called, after its name.
SCALE_NAMES = ("weight_scale_inv", "scale", "weight_scale")


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of one tensor of one expert.

    field: the field of ExpertWeights.   rows: which of that tensor's rows.
    name: the tensor, and where it is, for errors.
    values: `[rows, columns]`, or `[rows]` of a bias, as stored, on the CPU and in any strides;
        MXFP4: uint8 `[rows, columns / 2]`; INT4: int8.
    scale: where values are FP8 or INT4, float32, one for each block, rounded up; MXFP4: uint8
        `[rows, columns / 32]`; else None.
    block: rows and columns that share a scale.
    """

    name: str
    field: str
    rows: slice
    values: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)

    def padded(self, columns: int) -> Part:
        """MXFP4, or a bias beside it, with zeros for the rows and columns that it lacks."""
        missing = self.rows.stop - self.rows.start - len(self.values)
        values = _padded(self.values, missing, columns // 2)
        scale = None if self.scale is None else _padded(self.scale, missing, columns // MX_BLOCK)
        return replace(self, values=values, scale=scale)


@contextmanager
def open_layer(
    folder: Path | str, layer: int, config: MoEConfig, prefix: str | None = None
) -> Iterator[LayerReader]:
    """The experts of a layer; the files it opens are closed at the end.

    prefix: what the names of the stack's layers begin with, where a checkpoint has several.

    Raises InvalidArgument naming the file and the tensor that is not as the config says.
    """
    if not isinstance(folder, str | Path):
        refuse("folder", folder, f"the path of a folder with {INDEX} or {SINGLE}")
    with ExitStack() as files:
        yield LayerReader(Path(folder), layer, config, files, prefix)


class LayerReader:
    """Reads experts by id, each matrix when it is asked for.

    mxfp4: whether the experts are MXFP4.
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
        self._open: dict[Path, Any] = {}
        self._source = folder / INDEX
        if self._source.is_file():
            self._files = _indexed(folder, self._source)
        else:
            self._source = folder / SINGLE
            if not self._source.is_file():
                raise InvalidArgument(
                    f"folder is {str(folder)!r}; it has neither {INDEX} nor {SINGLE}"
                )
            self._files = dict.fromkeys(self._handle(self._source).keys(), self._source)
        self._stem, self._names = self._experts_of(layer, prefix)
        self._declared = declared_format(folder, self._stem)
        self._layout = self._layout_of()
        short = any(".w1." in name for name in self._names)
        self._matrices = SHORT_MATRICES if short else MATRICES
        self.mxfp4 = self._is_mxfp4()
        self._inner, self._hidden = self._sizes_of()
        self._check_names()

    def parts(self, expert: int) -> Iterator[Part]:
        """All that the config wants of an expert, in the order in which files hold it."""
        if self._layout == "separate":
            yield from self._separate(expert)
            return
        wide, inner, hidden = 2 * self._inner, self._config.intermediate, self._config.hidden
        gate, up, down = slice(0, inner), slice(inner, 2 * inner), slice(0, hidden)
        values, scale = self._fused("gate_up_proj", wide, self._hidden, expert)
        if self._layout == "interleaved":
            for rows, first in ((gate, 0), (up, 1)):
                powers = None if scale is None else scale[first::2]
                yield self._part("gate_up", expert, rows, values[first::2], powers, hidden)
        else:
            yield self._part("gate_up", expert, slice(0, 2 * inner), values, scale, hidden)
        values, scale = self._fused("down_proj", self._hidden, self._inner, expert)
        yield self._part("down", expert, down, values, scale, inner)
        if self._config.biased:
            bias = self._read("gate_up_proj_bias", (wide,), expert=expert)
            yield self._part("gate_up_bias", expert, gate, bias[::2])
            yield self._part("gate_up_bias", expert, up, bias[1::2])
            bias = self._read("down_proj_bias", (self._hidden,), expert=expert)
            yield self._part("down_bias", expert, down, bias)

    def _part(
        self,
        field: str,
        expert: int,
        rows: slice,
        values: torch.Tensor,
        scale: torch.Tensor | None = None,
        columns: int = 0,
        block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK),
    ) -> Part:
        """A part of as many rows and columns as the config has."""
        name = f"{self._stem}{expert}, {field} of rows {rows.start}.."
        part = Part(name, field, rows, values, scale, block)
        return part.padded(columns) if self.mxfp4 else part

    def _separate(self, expert: int) -> Iterator[Part]:
        inner, hidden = self._config.intermediate, self._config.hidden
        gate, up, down = self._matrices
        for name, field, first, shape in (
            (gate, "gate_up", 0, (inner, hidden)),
            (up, "gate_up", inner, (inner, hidden)),
            (down, "down", 0, (hidden, inner)),
        ):
            rows = slice(first, first + shape[0])
            yield self._matrix(expert, name, field, rows, shape)

    def _matrix(
        self, expert: int, name: str, field: str, place: slice, shape: tuple[int, int]
    ) -> Part:
        """One matrix that is stored alone, in any of the formats."""
        (rows, columns), stem = shape, f"{expert}.{name}"
        self._check_alone(stem, ("weight", "weight_packed"))
        self._check_alone(stem, SCALE_NAMES)
        name = f"{stem}.weight"
        if f"{name}_packed" in self._names:  # compressed-tensors
            name = f"{name}_packed"
        beside = next((f"{stem}.{n}" for n in SCALE_NAMES if f"{stem}.{n}" in self._names), "")
        beside = beside or f"{stem}.{SCALE_NAMES[0]}"
        dtype, wider = self._dtype_of(name), (rows, -(-columns // FP8_BLOCK))
        self._check_declared(name, dtype)
        if dtype in PACKED or dtype == INT4:
            unit = 8 if dtype == INT4 else MX_BLOCK
            if columns % unit:
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name} as {dtype} with {columns} columns; "
                    f"such weights have multiples of {unit}: pad them before they are quantised"
                )
        if dtype in PACKED:
            values = self._read(name, (rows, columns // 2), dtypes=PACKED).view(torch.uint8)
            powers = (rows, columns // MX_BLOCK)
            scale = self._read(beside, powers, dtypes=POWERS).view(torch.uint8)
            return self._part(field, expert, place, values, scale, columns)
        if dtype == INT4:
            words = self._read(name, (rows, columns // 8), dtypes=(INT4,))
            groups: list[tuple[int, ...]] = [
                (rows, columns // g) for g in INT4_GROUPS if columns % g == 0
            ]
            scale, block = self._scales(beside, shape, groups)
            values = _int4(words)
        else:
            values = self._read(name, shape, dtypes=(*PLAIN, FP8, *PACKED, INT4))
            if dtype != FP8:
                if beside in self._names:
                    raise InvalidArgument(
                        f"{self._source} has scales {self._stem}{beside} beside plain weights "
                        f"{self._stem}{name} ({dtype}), which have none: one of the two is of "
                        "another checkpoint"
                    )
                return self._part(field, expert, place, values, None, columns)
            blocks: list[tuple[int, ...]] = [(-(-rows // FP8_BLOCK), wider[1])]
            if columns % MX_BLOCK == 0:
                blocks.append((rows, columns // MX_BLOCK))
            blocks += [wider, (rows, 1), (rows,), (1, 1), (1,), ()]
            scale, block = self._scales(beside, shape, blocks)
        return self._part(field, expert, place, values, scale, columns, block)

    def _scales(
        self, name: str, shape: tuple[int, int], allowed: list[tuple[int, ...]]
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """A matrix's scales in float32, `[rows, columns]` of blocks, and what a block is.

        allowed: shapes that they may have; errors name the first.
        """
        path, tensor = self._opened(name)
        have = tuple(tensor.get_shape())
        if have not in allowed:
            some = ", ".join(str(list(each)) for each in allowed) or "none that weft reads"
            raise InvalidArgument(
                f"{path} has {self._stem}{name} {list(have)} beside weights {list(shape)}; scales "
                f"that weft reads for them: {some}. Groups of a row have 32 or 128 columns, blocks "
                "128 x 128: convert the checkpoint"
            )
        found = self._read(name, have, dtypes=PLAIN + POWERS)
        if found.dtype == torch.uint8:
            found = found.view(torch.float8_e8m0fnu)
        scale = found.float().reshape(have if len(have) == 2 else (-1, 1))
        sizes = (
            next(b for b in (1, MX_BLOCK, FP8_BLOCK, size) if -(-size // b) == count)
            for size, count in zip(shape, scale.shape, strict=True)
        )
        down, across = sizes
        if not torch.isfinite(scale).all() or (scale < 0).any():
            raise InvalidArgument(
                f"{path} has a NaN, an infinity or a negative number in the scales "
                f"{self._stem}{name}: the file is damaged"
            )
        self._check_block(name, shape, scale.shape, (down, across))
        return scale, (down, across)

    def _check_alone(self, stem: str, names: Sequence[str]) -> None:
        """Raise InvalidArgument where a matrix has several tensors of which one alone is read."""
        found = [f"{stem}.{name}" for name in names if f"{stem}.{name}" in self._names]
        if len(found) > 1:
            raise InvalidArgument(
                f"{self._source} has {' and '.join(f'{self._stem}{each}' for each in found)}; a "
                "matrix has one of them: remove the other"
            )

    def _check_declared(self, name: str, dtype: str) -> None:
        """Raise InvalidArgument for a quantised tensor that config.json says is another."""
        scheme = {FP8: "fp8", INT4: "int4"} | dict.fromkeys(PACKED, "mxfp4")
        found, declared = scheme.get(dtype, ""), self._declared
        if not found or not declared.scheme:
            return
        # Checkpoints of FP8 keep experts in MXFP4 without saying so; their bytes say it.
        if declared.scheme in (found, "fp8" if found == "mxfp4" else found):
            return
        raise InvalidArgument(
            f"{self._source} has {self._stem}{name} as {dtype}, which is {found}, but "
            f"quantization_config of {declared.source} says that these experts are "
            f"{declared.scheme}: one of the two is of another model"
        )

    def _check_block(
        self, name: str, shape: tuple[int, int], scales: Sequence[int], block: tuple[int, int]
    ) -> None:
        """Raise InvalidArgument for scales whose block the config contradicts, or leaves open."""
        declared = self._declared
        if declared.block is not None and declared.scheme != "mxfp4":
            said = tuple(b or size for b, size in zip(declared.block, shape, strict=True))
            expected = tuple(-(-size // b) for size, b in zip(shape, said, strict=True))
            if tuple(scales) != expected:
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name} {list(scales)} for weights "
                    f"{list(shape)}, but quantization_config of {declared.source} says blocks of "
                    f"{list(said)}, for which there are {list(expected)}: one of the two is of "
                    "another model"
                )
            return
        whole = all(
            count == 1 or b == 1 or size % b == 0
            for size, b, count in zip(shape, block, scales, strict=True)
        )
        if not whole:
            raise InvalidArgument(
                f"{self._source} has {self._stem}{name} {list(scales)} for weights {list(shape)}, "
                "which are no whole blocks of 128, so other blocks would have as many scales, and "
                "no config.json says which: put the model's config.json with its "
                "quantization_config beside the checkpoint"
            )

    def _check_names(self) -> None:
        """Raise InvalidArgument for a tensor of an expert that would change what it computes."""
        if self._layout != "separate":
            stored = ("", "_blocks", "_scales", "_bias")
            known = {f"{m}{suffix}" for m in ("gate_up_proj", "down_proj") for suffix in stored}
            for name in sorted(self._names - known):
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name} beside fused experts, which weft does "
                    "not read: they are gate_up_proj and down_proj, with biases, blocks and scales"
                )
            return
        suffixes = ("weight", "weight_packed", "weight_shape", *SCALE_NAMES, "input_scale")
        known = {f"{m}.{suffix}" for m in self._matrices for suffix in suffixes}
        for name in sorted(self._names):
            if name.partition(".")[2] not in known:
                raise InvalidArgument(
                    f"{self._source} has {self._stem}{name}, which weft does not read: experts are "
                    f"{', '.join(self._matrices)} with symmetric scales, without biases, zero "
                    "points or an order of columns: convert the checkpoint"
                )

    def _fused(
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
            return "gate_up_proj_blocks" in self._names
        gate = f".{self._matrices[0]}.weight"
        gates = sorted(n for n in self._names if n.endswith((gate, f"{gate}_packed")))
        return bool(gates) and self._dtype_of(gates[0]) in PACKED

    def _sizes_of(self) -> tuple[int, int]:
        """The experts' intermediate and hidden sizes: the config's, but that MXFP4 experts which
        are fused may have less than whole blocks of 128, to which the config was rounded up.
        """
        wanted = self._config.intermediate, self._config.hidden
        if self._layout == "separate" or not self.mxfp4:
            return wanted
        shape = self._opened("down_proj_blocks")[1].get_shape()
        if len(shape) != 4:
            return wanted  # which the tensor's shape will be compared with
        found = int(shape[2]) * MX_BLOCK, int(shape[1])
        if all(
            want in (have, -(-have // FP8_BLOCK) * FP8_BLOCK)
            for have, want in zip(found, wanted, strict=True)
        ):
            return found
        return wanted

    def _experts_of(self, layer: int, prefix: str | None) -> tuple[str, set[str]]:
        """What names of the layer's experts begin with, and how they go on.

        Without a prefix the model's own stack is read, not that of a draft model or an encoder.
        """
        found: dict[str, set[str]] = {}
        others = set()
        for name in self._files:
            if ".experts." in name and (match := _EXPERTS.fullmatch(name)):
                others.add(int(match[1]))
                if int(match[1]) == layer:
                    found.setdefault(name[: match.start(3)], set()).add(match[3])
        stacks = {stem.rpartition("layers.")[0]: stem for stem in found}
        if prefix is not None:
            wanted = f"{prefix.rstrip('.')}." if prefix else ""
            chosen = [stem for stack, stem in stacks.items() if stack == wanted]
        else:
            chosen = [stem for stack, stem in stacks.items() if not _BESIDE.search(stack)]
        if len(chosen) == 1:
            return chosen[0], found[chosen[0]]
        if found:
            some = " and ".join(repr(stack.rstrip(".")) for stack in sorted(stacks))
            asked = "" if prefix is None else f"prefix is {prefix!r}; "
            raise InvalidArgument(
                f"{asked}{self._source} has experts of layer {layer} under the prefixes {some}: "
                "pass one of them as prefix="
            )
        known = f"layers {min(others)}..{max(others)} have some" if others else "no layer has any"
        raise InvalidArgument(f"layer is {layer}; {self._source} has no experts of it, {known}")

    def _layout_of(self) -> Storage:
        """How the names say that the experts are stored."""
        biased = "gate_up_proj_bias" in self._names
        if biased != self._config.biased:
            have = "biases" if biased else "no biases"
            raise InvalidArgument(
                f"the experts {self._stem}* of {self._source} have {have}, the config has "
                f"biased={self._config.biased}: take MoEConfig.from_hf of the same model"
            )
        if not self._names & {"gate_up_proj", "gate_up_proj_blocks"}:
            return "separate"
        if biased or "gate_up_proj_blocks" in self._names:
            return "interleaved"
        return "transposed" if ".feed_forward." in f".{self._stem}" else "fused"

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        expert: int | None = None,
        dtypes: tuple[str, ...] = PLAIN,
    ) -> torch.Tensor:
        """The tensor, or its part for one expert, which alone is read then."""
        path, tensor = self._opened(name)
        full = self._stem + name
        wanted = list(shape) if expert is None else [self._config.routing.num_experts, *shape]
        if list(tensor.get_shape()) != wanted:
            raise InvalidArgument(
                f"{path} has {full} {list(tensor.get_shape())}; the config wants {wanted}: take "
                "MoEConfig.from_hf of the same model"
            )
        if tensor.get_dtype() not in dtypes:
            raise InvalidArgument(
                f"{path} has {full} as {tensor.get_dtype()}; weft reads it as {', '.join(dtypes)}"
            )
        with torch.device("cpu"):  # safetensors makes tensors on the caller's default device
            found: torch.Tensor = tensor[...] if expert is None else tensor[expert]
        return found

    def _opened(self, name: str) -> tuple[Path, Any]:
        """The file of a tensor, and the tensor, of which nothing is read yet."""
        full = self._stem + name
        path = self._files.get(full)
        if path is None:
            raise InvalidArgument(f"{self._source} has no tensor {full}; {self._near(name)}")
        try:
            return path, self._handle(path).get_slice(full)
        except _safetensors()[1] as reason:
            raise InvalidArgument(
                f"{path} has no tensor {full}, though {self._source} names that file: {reason}"
            ) from reason

    def _dtype_of(self, name: str) -> str:
        """The tensor's dtype, as safetensors calls it."""
        return str(self._opened(name)[1].get_dtype())

    def _near(self, name: str) -> str:
        """What an error says of a tensor that is not there: which ones are."""
        if name.endswith(SCALE_NAMES):
            return (
                "weights need scales: FP8 for each 128 x 128, 32 or 128 of a row, row or matrix, "
                "MXFP4 for each 32 of a row, INT4 for each 32 or 128"
            )
        if name.endswith("_scales"):
            return "MXFP4 weights need a scale for each 32 of a row"
        first = name.partition(".")[0]
        near = sorted(other for other in self._names if other.partition(".")[0] == first)
        some = ", ".join(near[:4] or sorted(self._names)[:4])
        return f"{self._stem}* are {some}{', ...' if len(self._names) > 4 else ''}"

    def _handle(self, path: Path) -> Any:
        """An open file, opened once."""
        if path not in self._open:
            opened, error = _safetensors()
            try:
                handle = self._stack.enter_context(opened(path, framework="pt", device="cpu"))
            except (OSError, UnicodeError, error) as reason:
                raise InvalidArgument(f"cannot read {str(path)!r}: {reason}") from reason
            self._open[path] = handle
        return self._open[path]


def _int4(words: torch.Tensor) -> torch.Tensor:
    """int8 `[rows, columns]` of int32 `[rows, columns / 8]`; the lowest four bits come first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts & 15) - 8).to(torch.int8).flatten(1)


def _padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """With so many rows of zeros after the last, and zeros up to so many columns."""
    across = (0, columns - tensor.shape[1]) if tensor.dim() == 2 else ()
    return functional.pad(tensor, (*across, 0, rows))


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    """Tensor -> file, as the index says. Raises InvalidArgument for files outside the folder."""
    found = read_json(index, "the checkpoint's index")
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict):
        raise InvalidArgument(f"{index} has no object 'weight_map' of tensors and their files")
    checked: dict[str, Path] = {}
    for file in weight_map.values():
        if not isinstance(file, str):
            raise InvalidArgument(f"{index} names a file {file!r}; it must be a string")
        if file in checked:
            continue
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise InvalidArgument(
                f"{index} names the file {file!r}; weft reads *.safetensors in that folder only"
            )
        checked[file] = folder / path
    try:
        for file in checked:
            os.fsencode(file)
    except UnicodeError as error:
        raise InvalidArgument(f"{index} names a file whose name is no text: {error}") from error
    return {name: checked[file] for name, file in weight_map.items()}


def _safetensors() -> tuple[Any, type[Exception]]:
    """What opens a file, and what it raises. Raises InvalidArgument that says what to install."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise InvalidArgument(
            f"checkpoints need safetensors: {error}; {install_hint('checkpoint')}"
        ) from error
    return safe_open, SafetensorError
