"""One layer's experts in a checkpoint of safetensors files, one stored matrix at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch

from weft.arguments import refuse
from weft.errors import InvalidArgument
from weft.moe.hf import read_json
from weft.moe.models import MoEConfig
from weft.shape import FP8_BLOCK

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_LAYER = 999_999
PLAIN = ("F32", "BF16", "F16")
FP8 = "F8_E4M3"
SCALES = ("F32", "BF16", "F8_E8M0")
# A tensor of one layer's experts: everything before this layer's, the layer, the block, the rest.
_EXPERTS = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(mlp|feed_forward)\.experts\.(.+)")

# How gate_up_proj holds a layer's experts. separate: not at all, each has matrices of its own;
# fused: `[experts, rows, columns]`, as transformers does in memory; transposed: `[experts, columns,
# rows]` (Llama 4); interleaved: so, with columns of the gate and of up in turn (GPT-OSS).
Storage = Literal["separate", "fused", "transposed", "interleaved"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of one tensor of one expert.

    field: the field of ExpertWeights.   rows: which of that tensor's rows.
    values: `[rows, columns]`, or `[rows]` of a bias, as stored, on the CPU and in any strides.
    scale: where values are FP8, float32 `[rows / 128, columns / 128]`, rounded up; else None.
    """

    field: str
    rows: slice
    values: torch.Tensor
    scale: torch.Tensor | None = None


@contextmanager
def open_layer(folder: Path | str, layer: int, config: MoEConfig) -> Iterator[LayerReader]:
    """The experts of a layer; the files it opens are closed at the end.

    Raises InvalidArgument naming the file and the tensor that is not as the config says.
    """
    if not isinstance(folder, str | Path):
        refuse("folder", folder, f"the path of a folder with {INDEX} or {SINGLE}")
    with ExitStack() as files:
        yield LayerReader(Path(folder), layer, config, files)


class LayerReader:
    """Reads experts by id, each matrix when it is asked for."""

    def __init__(self, folder: Path, layer: int, config: MoEConfig, files: ExitStack) -> None:
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
        self._stem, self._names = self._experts_of(layer)
        self._layout = self._layout_of()

    def parts(self, expert: int) -> Iterator[Part]:
        """All that the config wants of an expert, in the order in which files hold it."""
        if self._layout == "separate":
            yield from self._separate(expert)
            return
        inner, hidden = self._config.intermediate, self._config.hidden
        gate, up, down = slice(0, inner), slice(inner, 2 * inner), slice(0, hidden)
        gate_up = self._fused("gate_up_proj", 2 * inner, hidden, expert)
        if self._layout == "interleaved":
            yield Part("gate_up", gate, gate_up[::2])
            yield Part("gate_up", up, gate_up[1::2])
        else:
            yield Part("gate_up", slice(0, 2 * inner), gate_up)
        yield Part("down", down, self._fused("down_proj", hidden, inner, expert))
        if self._config.biased:
            bias = self._read("gate_up_proj_bias", (2 * inner,), expert=expert)
            yield Part("gate_up_bias", gate, bias[::2])
            yield Part("gate_up_bias", up, bias[1::2])
            bias = self._read("down_proj_bias", (hidden,), expert=expert)
            yield Part("down_bias", down, bias)

    def _separate(self, expert: int) -> Iterator[Part]:
        inner, hidden = self._config.intermediate, self._config.hidden
        for name, field, first, shape in (
            ("gate_proj", "gate_up", 0, (inner, hidden)),
            ("up_proj", "gate_up", inner, (inner, hidden)),
            ("down_proj", "down", 0, (hidden, inner)),
        ):
            name, scale = f"{expert}.{name}.weight", None
            values = self._read(name, shape, dtypes=(*PLAIN, FP8))
            if values.dtype == torch.float8_e4m3fn:
                blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
                scale = self._read(f"{name}_scale_inv", blocks, dtypes=SCALES).float()
            yield Part(field, slice(first, first + shape[0]), values, scale)

    def _fused(self, name: str, rows: int, columns: int, expert: int) -> torch.Tensor:
        if self._layout == "fused":
            return self._read(name, (rows, columns), expert=expert)
        return self._read(name, (columns, rows), expert=expert).T

    def _experts_of(self, layer: int) -> tuple[str, set[str]]:
        """What names of the layer's experts begin with, and how they go on."""
        found: dict[str, set[str]] = {}
        others = set()
        for name in self._files:
            if ".experts." in name and (match := _EXPERTS.fullmatch(name)):
                others.add(int(match[1]))
                if int(match[1]) == layer:
                    found.setdefault(name[: match.start(3)], set()).add(match[3])
        if len(found) == 1:
            return found.popitem()
        if found:
            raise InvalidArgument(
                f"{self._source} has experts of layer {layer} under {' and '.join(sorted(found))}; "
                "weft reads checkpoints with one model: leave the other one out"
            )
        known = f"layers {min(others)}..{max(others)} have some" if others else "no layer has any"
        raise InvalidArgument(f"layer is {layer}; {self._source} has no experts of it, {known}")

    def _layout_of(self) -> Storage:
        """How the names say that the experts are stored."""
        packed = sorted(name for name in self._names if name.endswith("_blocks"))
        if packed:
            raise InvalidArgument(
                f"{self._source} has {self._stem}{packed[0]}, which is MXFP4; weft reads BF16, "
                "F16, F32 and FP8: save the model in bfloat16 first, as transformers does with "
                "Mxfp4Config(dequantize=True)"
            )
        biased = "gate_up_proj_bias" in self._names
        if biased != self._config.biased:
            have = "biases" if biased else "no biases"
            raise InvalidArgument(
                f"the experts {self._stem}* of {self._source} have {have}, the config has "
                f"biased={self._config.biased}: take MoEConfig.from_hf of the same model"
            )
        if "gate_up_proj" not in self._names:
            return "separate"
        if biased:
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
        full = self._stem + name
        path = self._files.get(full)
        if path is None:
            raise InvalidArgument(f"{self._source} has no tensor {full}; {self._near(name)}")
        try:
            tensor = self._handle(path).get_slice(full)
        except _safetensors()[1] as reason:
            raise InvalidArgument(
                f"{path} has no tensor {full}, though {self._source} names that file: {reason}"
            ) from reason
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
            found: torch.Tensor = tensor[:] if expert is None else tensor[expert]
        return found

    def _near(self, name: str) -> str:
        """What an error says of a tensor that is not there: which ones are."""
        if name.endswith("_scale_inv"):
            return "FP8 weights need one scale for each 128 x 128 of them"
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
    return {name: checked[file] for name, file in weight_map.items()}


def _safetensors() -> tuple[Any, type[Exception]]:
    """What opens a file, and what it raises. Raises InvalidArgument that says what to install."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise InvalidArgument(
            f"checkpoints need safetensors: {error}; pip install 'weft[checkpoint]'"
        ) from error
    return safe_open, SafetensorError
