# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is read by what its config.json declares: right, or refused, never otherwise."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.errors import InvalidArgument
from weft.moe import ExpertWeights, MoEConfig, Routing
from weft.moe.formats import read_json

save_file = pytest.importorskip("safetensors.torch").save_file

STEM = "model.layers.0.mlp.experts"
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]  # a matrix's tensors, and its values
# What may be stored, and how it is declared: scheme, rows and columns of a block (0: all).
FORMATS: dict[str, tuple[str, tuple[int, int]]] = {
    "plain": ("plain", (1, 1)),
    **{f"fp8 {a} x {b}": ("fp8", (a, b)) for a, b in ((128, 128), (64, 64), (1, 32), (1, 128))},
    "fp8 row": ("fp8", (1, 0)),
    "fp8 matrix": ("fp8", (0, 0)),
    **{f"int4 {group}": ("int4", (1, group)) for group in (32, 64, 96, 128)},
}
READ = {*FORMATS} - {"fp8 64 x 64", "int4 64", "int4 96"}


def draw_matrix(chance: torch.Generator, name: str, rows: int, columns: int) -> Stored:
    """A random matrix of a format."""
    scheme, (down, across) = FORMATS[name]
    if scheme == "plain":
        values = torch.randn(rows, columns, generator=chance).bfloat16()
        return {"weight": values}, values.float()
    down, across = down or rows, across or columns
    size = (-(-rows // down), -(-columns // across))
    scale = torch.rand(size, generator=chance) + 0.5
    wide = scale.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
    if scheme == "fp8":
        values = torch.randn(rows, columns, generator=chance).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scale}, values.float() * wide
    numbers = torch.randint(-8, 8, (rows, columns), generator=chance)
    words = ((numbers + 8).view(rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": words, "weight_scale": scale}, numbers.float() * wide


def declaration(name: str) -> dict[str, Any] | None:
    """The quantization_config of a format."""
    scheme, (down, across) = FORMATS[name]
    if scheme == "plain":
        return None
    if scheme == "fp8" and down == across != 0:
        return {"quant_method": "fp8", "weight_block_size": [down, across]}
    strategy = "group" if across else "channel" if down else "tensor"
    weights: dict[str, Any] = {"num_bits": 4 if scheme == "int4" else 8, "strategy": strategy}
    weights |= {"type": "int" if scheme == "int4" else "float", "symmetric": True}
    weights |= {"group_size": across or None}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def write_checkpoint(
    folder: Path, stored: str, declared: str | None, sizes: tuple[int, int], seed: int
) -> dict[str, torch.Tensor]:
    """One layer of two experts; returns the values of expert 0 by matrix."""
    hidden, inner = sizes
    chance = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for expert in range(2):
        for name, rows, columns in (
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            parts, matrix = draw_matrix(chance, stored, rows, columns)
            tensors |= {f"{STEM}.{expert}.{name}_proj.{k}": v for k, v in parts.items()}
            if expert == 0:
                values[name] = matrix
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").unlink(missing_ok=True)
    if declared is not None:
        config = {"quantization_config": declaration(declared)}
        (folder / "config.json").write_text(json.dumps(config))
    return values


def read(folder: Path, sizes: tuple[int, int], **options: Any) -> ExpertWeights:
    config = MoEConfig(hidden=sizes[0], intermediate=sizes[1], routing=Routing(2, 1))
    return ExpertWeights.from_safetensors(folder, 0, (0, 1), config=config, **options)


def test_a_checkpoint_is_read_right_or_refused(tmp_path):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(120):
        stored = chance.choice([*FORMATS])
        declared = chance.choice([None, stored, stored, chance.choice([*FORMATS])])
        unit = 96 if stored == "int4 96" else 32
        sizes = unit * chance.randrange(1, 10), unit * chance.randrange(1, 10)
        values = write_checkpoint(tmp_path, stored, declared, sizes, chance.randrange(1 << 30))
        case = f"{stored} declared as {declared}, {sizes}, seed {seed}"
        refusal, weights = "", None
        try:
            weights = read(tmp_path, sizes)
        except InvalidArgument as error:
            refusal = str(error)
        if weights is None:
            outcomes["refused"] += 1
            assert STEM in refusal or "quantization_config" in refusal, (case, refusal)
            whole = all(size % 128 == 0 for size in sizes)
            assert not (stored == declared and stored in READ and whole), (case, refusal)
            continue
        outcomes["read"] += 1
        gate_up = torch.cat([values["gate"], values["up"]])
        assert torch.equal(weights.gate_up[0], gate_up.bfloat16()), case
        assert torch.equal(weights.down[0], values["down"].bfloat16()), case
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "modelopt", None])
def test_methods_that_are_not_read_are_refused_by_name(tmp_path, method):
    write_checkpoint(tmp_path, "fp8 128 x 128", None, (128, 128), 0)
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=f"quant_method .* is {method!r}; weft reads FP8"):
        read(tmp_path, (128, 128))


def test_ignored_experts_are_not_quantised(tmp_path):
    write_checkpoint(tmp_path, "fp8 128 x 128", "fp8 128 x 128", (128, 128), 0)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.layers.0.mlp"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="says that these experts are plain"):
        read(tmp_path, (128, 128))


def test_the_models_own_stack_is_read_and_others_by_prefix(tmp_path):
    sizes = (64, 32)
    values = write_checkpoint(tmp_path, "plain", None, sizes, 1)
    tensors = {
        f"{prefix}.layers.0.mlp.experts.{e}.{n}_proj.weight": values[n].bfloat16() * factor
        for prefix, factor in (("model", 1), ("mtp", 2))
        for e in range(2)
        for n in values
    }
    save_file(tensors, tmp_path / "model.safetensors")
    down = values["down"].bfloat16()
    assert torch.equal(read(tmp_path, sizes).down[0], down)
    assert torch.equal(read(tmp_path, sizes, prefix="mtp").down[0], down * 2)
    with pytest.raises(InvalidArgument, match="prefix is 'visual'; .* 'model' and 'mtp'"):
        read(tmp_path, sizes, prefix="visual")


def test_damaged_scales_are_refused(tmp_path):
    for value in (float("nan"), float("inf"), -1.0):
        write_checkpoint(tmp_path, "fp8 128 x 128", None, (128, 128), 0)
        tensors = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
        name = f"{STEM}.0.up_proj.weight_scale"
        tensors[name] = torch.full_like(tensors[name], value)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(InvalidArgument, match="in the scales .*up_proj.weight_scale"):
            read(tmp_path, (128, 128))


@pytest.mark.parametrize(
    ("stored", "more", "words"),
    [
        ("plain", {"0.up_proj.weight_scale": (1, 1)}, "beside plain weights"),
        ("fp8 128 x 128", {"0.up_proj.weight_scale_inv": (1, 1)}, "a matrix has one of them"),
        ("int4 32", {"0.up_proj.weight": (128, 128)}, "a matrix has one of them"),
        ("plain", {"0.up_proj.bias": (128,)}, "up_proj.bias, which weft does not read"),
        ("plain", {"gate_up_proj": (2, 256, 128)}, "beside fused experts"),
    ],
)
def test_tensors_that_would_be_left_unread_are_refused(tmp_path, stored, more, words):
    write_checkpoint(tmp_path, stored, None, (128, 128), 0)
    tensors = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    tensors |= {f"{STEM}.{name}": torch.ones(size) for name, size in more.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=words):
        read(tmp_path, (128, 128))


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "nested", "twice", "NaN", "bytes"])
def test_json_is_read_from_regular_files_only(tmp_path, what):
    path = tmp_path / "config.json"
    texts = {"nested": "[" * 200_000, "twice": '{"a": 1, "a": 2}', "NaN": '{"a": NaN}'}
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    elif what == "bytes":
        path.write_bytes(b"\xff\xfe{")
    else:
        path.write_text(texts[what])
    with pytest.raises(InvalidArgument, match="the model's config .*config.json"):
        read_json(path, "the model's config")
