# SPDX-License-Identifier: Apache-2.0
"""Experts from checkpoints: layouts, FP8, what is read, and files that are wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gemm.cases import decode_mxfp4
from tests.moe.layers import dequantized, widened
from tests.moe.test_mxfp4 import padded_with_zeros
from weft.errors import InvalidArgument
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing
from weft.moe.experts import to_blocks

safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file

LAYER, EXPERTS = 3, 4
CONFIG = MoEConfig(256, 128, Routing(EXPERTS, 2))
NAME = f"model.layers.{LAYER}.mlp.experts"
Tensors = dict[str, torch.Tensor]


def experts_of(config: MoEConfig = CONFIG) -> list[Expert]:
    return [Expert.seeded(config, seed) for seed in range(EXPERTS)]


def separate(config: MoEConfig = CONFIG) -> Tensors:
    """Gate, up and down of each expert."""
    found: Tensors = {}
    for index, expert in enumerate(experts_of(config)):
        gate, up = expert.gate_up.chunk(2)
        for name, tensor in (("gate", gate), ("up", up), ("down", expert.down)):
            found[f"{NAME}.{index}.{name}_proj.weight"] = tensor.contiguous()
    return found


def in_fp8(tensors: Tensors) -> Tensors:
    """The same with blocks of 128 x 128 and their scales, as DeepSeek stores them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        packed, scales = to_blocks(tensor.unsqueeze(0))
        found[name], found[f"{name}_scale_inv"] = packed[0], scales[0]
    return found


def save(folder: Path, *shards: Tensors) -> Path:
    """A checkpoint of one file, or of several with an index."""
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    write_index(folder, weight_map)
    return folder


def declare(folder: Path, quantization: object) -> None:
    """Write a config.json that says how weights are quantised."""
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def read(folder: Path, *experts: int, **options: Any) -> ExpertWeights:
    options = {"config": CONFIG, **options}
    found = ExpertWeights.from_safetensors(folder, LAYER, experts, **options)
    device = found.gate_up.device
    assert device.type == torch.device(options.get("device", "cpu")).type
    found.check(options["config"], len(experts), device, fp8=options.get("fp8", False))
    return found


def same(a: ExpertWeights, b: ExpertWeights) -> None:
    for name in ExpertWeights.__slots__:
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            assert torch.equal(one.float().cpu(), other.float().cpu()), name


def test_some_experts_of_one_layer_in_many_files(tmp_path):
    tensors = separate()
    tensors["model.layers.31.mlp.experts.0.gate_proj.weight"] = torch.ones(3, 3)
    tensors["model.layers.2.mlp.gate_proj.weight"] = torch.ones(3, 3)
    names = sorted(tensors)
    folder = save(tmp_path, *({n: tensors[n] for n in names[i::3]} for i in range(3)))
    wanted = [experts_of()[expert] for expert in (2, 0, 2)]
    same(read(folder, 2, 0, 2), ExpertWeights.stack(CONFIG, wanted))
    assert read(folder).gate_up.shape == (0, 256, 256)
    for dtype in (torch.float16, torch.float32):
        config = replace(CONFIG, dtype=dtype)
        wanted = [experts_of()[1].to(dtype)]
        same(read(folder, 1, config=config), ExpertWeights.stack(config, wanted))


def test_the_callers_default_device_does_not_matter(tmp_path):
    folder = save(tmp_path, separate())
    with torch.device("meta"):
        found = read(folder, 1)
    same(found, read(folder, 1))


@pytest.mark.parametrize("prefix", ["", "language_model.model."])
@pytest.mark.parametrize("layout", ["fused", "llama", "gpt-oss"])
def test_fused_layouts(tmp_path, layout, prefix):
    config = replace(CONFIG, hidden=256, intermediate=128, biased=layout == "gpt-oss")
    assert config.hidden == 2 * config.intermediate, "shapes do not tell the layouts apart"
    whole = ExpertWeights.stack(config, experts_of(config))
    gate_up, down = whole.gate_up, whole.down
    stem = f"{prefix}layers.{LAYER}.mlp.experts."
    tensors: Tensors = {}
    if layout == "gpt-oss":
        gate, up = gate_up.chunk(2, dim=1)
        gate_up = torch.stack((gate, up), dim=2).flatten(1, 2)
        assert whole.gate_up_bias is not None
        assert whole.down_bias is not None
        gate, up = whole.gate_up_bias.chunk(2, dim=1)
        tensors[f"{stem}gate_up_proj_bias"] = torch.stack((gate, up), dim=2).flatten(1)
        tensors[f"{stem}down_proj_bias"] = whole.down_bias
    if layout == "llama":
        stem = stem.replace("mlp", "feed_forward")
    if layout != "fused":
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    tensors[f"{stem}gate_up_proj"] = gate_up.contiguous()
    tensors[f"{stem}down_proj"] = down.contiguous()
    folder = save(tmp_path, tensors)
    chosen = [experts_of(config)[expert] for expert in (3, 1)]
    stacked = ExpertWeights.stack(config, chosen)
    same(read(folder, 3, 1, config=config), stacked)
    same(read(folder, 3, 1, config=config, fp8=True), stacked.to_fp8())


def test_fp8_blocks(tmp_path):
    folder = save(tmp_path, in_fp8(separate()))
    whole = ExpertWeights.stack(CONFIG, experts_of())
    same(read(folder, *range(EXPERTS), fp8=True), whole.to_fp8())
    wide = read(folder, *range(EXPERTS))
    assert torch.equal(wide.down, dequantized(whole.to_fp8(), "down").bfloat16())
    assert not torch.equal(wide.down, whole.down)
    torch.testing.assert_close(wide.gate_up, whole.gate_up, rtol=1 / 8, atol=1 / 128)


def test_fp8_of_a_checkpoint_without(tmp_path):
    folder = save(tmp_path, separate())
    whole = ExpertWeights.stack(CONFIG, experts_of())
    same(read(folder, *range(EXPERTS), fp8=True), whole.to_fp8())


def test_blocks_at_the_edge(tmp_path):
    """Sizes that are no multiples of 128: the last blocks are smaller; no FP8 is made of them."""
    config = replace(CONFIG, hidden=200, intermediate=72)
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    wanted = torch.empty(200, 72)
    for name, rows, columns in (("gate", 72, 200), ("up", 72, 200), ("down", 200, 72)):
        packed = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
        key = f"{NAME}.0.{name}_proj.weight"
        # Some write scales in bfloat16.
        tensors[key], tensors[f"{key}_scale_inv"] = packed, scales.bfloat16()
        if name == "down":
            for row in range(rows):
                wanted[row] = packed[row].float() * scales.bfloat16().float()[row // 128, 0]
    folder = save(tmp_path, tensors)
    with pytest.raises(InvalidArgument, match="no whole blocks of 128, so other blocks"):
        read(folder, 0, config=config)
    declare(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert torch.equal(read(folder, 0, config=config).down[0], wanted.bfloat16())
    with pytest.raises(InvalidArgument, match="fp8 is True for intermediate 72 and hidden 200"):
        read(folder, 0, config=config, fp8=True)


def mxfp4_of(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of all experts, and no row that spans too much."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator).byte()
    scales = torch.randint(118, 130, (EXPERTS, rows, columns // 32), generator=generator).byte()
    return values, scales


def gpt_oss(config: MoEConfig) -> tuple[Tensors, ExpertWeights]:
    """MXFP4 as GPT-OSS stores it, and what it means."""
    wide, inner, hidden = 2 * config.intermediate, config.intermediate, config.hidden
    gate_up, down = mxfp4_of(wide, hidden, 1), mxfp4_of(hidden, inner, 2)
    biases = torch.randn(EXPERTS, wide).bfloat16(), torch.randn(EXPERTS, hidden).bfloat16()
    tensors = {f"{NAME}.gate_up_proj_bias": biases[0], f"{NAME}.down_proj_bias": biases[1]}
    for name, (values, scales) in (("gate_up", gate_up), ("down", down)):
        tensors[f"{NAME}.{name}_proj_blocks"] = values.unflatten(2, (-1, 16))
        tensors[f"{NAME}.{name}_proj_scales"] = scales
    apart = torch.cat((torch.arange(0, wide, 2), torch.arange(1, wide, 2)))
    wholes = decode_mxfp4(*gate_up)[:, apart], decode_mxfp4(*down)
    meant = (x.bfloat16() for x in (*wholes, biases[0][:, apart], biases[1]))
    return tensors, ExpertWeights(*meant)


def test_mxfp4_with_gate_and_up_in_turn(tmp_path):
    config = replace(CONFIG, biased=True)
    tensors, meant = gpt_oss(config)
    folder = save(tmp_path, tensors)
    packed = read(folder, 2, 0, config=config, fp8=True)
    assert packed.gate_up.dtype == torch.uint8
    chosen = [2, 0]
    for name in ("gate_up", "down"):
        assert torch.equal(dequantized(packed, name), getattr(meant, name)[chosen].float())
    plain = read(folder, 2, 0, config=config)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        assert torch.equal(getattr(plain, name), getattr(meant, name)[chosen]), name
    assert packed.gate_up_bias is not None
    assert plain.gate_up_bias is not None
    assert torch.equal(packed.gate_up_bias, plain.gate_up_bias)


def test_mxfp4_of_other_sizes_is_filled_up_with_zeros(tmp_path):
    small = replace(CONFIG, hidden=160, intermediate=96, biased=True)
    tensors, meant = gpt_oss(small)
    folder = save(tmp_path, tensors)
    same(read(folder, 1, config=small), ExpertWeights(*(t[1:2] for t in meant.tensors)))
    with pytest.raises(InvalidArgument, match="fp8 is True for intermediate 96 and hidden 160"):
        read(folder, 1, config=small, fp8=True)
    with pytest.raises(InvalidArgument, match=r"\[4, 192, 5, 16\]; the config wants \[4, 256, 12"):
        read(folder, 1, config=replace(small, hidden=384, intermediate=128), fp8=True)
    packed = read(folder, 1, config=replace(small, hidden=256, intermediate=128), fp8=True)
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    wanted = padded_with_zeros({name: getattr(meant, name)[1:2] for name in names}, False)
    for name in ("gate_up", "down"):
        assert torch.equal(dequantized(packed, name), wanted[name].float())
        assert torch.equal(getattr(packed, f"{name}_bias"), wanted[f"{name}_bias"])


def deepseek_v4() -> tuple[Tensors, ExpertWeights]:
    """MXFP4 as DeepSeek-V4 stores it, and what it means."""
    tensors: Tensors = {}
    found = {"w1": mxfp4_of(128, 256, 1), "w3": mxfp4_of(128, 256, 2), "w2": mxfp4_of(256, 128, 3)}
    for name, (values, scales) in found.items():
        for expert in range(EXPERTS):
            key = f"layers.{LAYER}.ffn.experts.{expert}.{name}"
            tensors[f"{key}.weight"] = values[expert].view(torch.int8).clone()
            tensors[f"{key}.scale"] = scales[expert].view(torch.float8_e8m0fnu).clone()
    gate, up, down = (decode_mxfp4(*each).bfloat16() for each in found.values())
    return tensors, ExpertWeights(torch.cat((gate, up), dim=1), down)


def test_mxfp4_of_separate_experts(tmp_path):
    tensors, meant = deepseek_v4()
    folder = save(tmp_path, tensors)
    packed, plain = read(folder, 3, 1, fp8=True), read(folder, 3, 1)
    for name in ("gate_up", "down"):
        wanted = getattr(meant, name)[[3, 1]]
        assert torch.equal(dequantized(packed, name), wanted.float())
        assert torch.equal(getattr(plain, name), wanted)


def test_mxfp4_that_cannot_be_packed_is_named(tmp_path):
    tensors, _ = deepseek_v4()
    scales = tensors[f"layers.{LAYER}.ffn.experts.1.w3.scale"].view(torch.uint8)
    scales[7] = torch.tensor([20, 120, 120, 120, 120, 120, 120, 120])
    folder = save(tmp_path, tensors)
    words = (
        r"layers.3.ffn.experts.1, gate_up of rows 128.., row 7 has blocks with scales of 2\^-107"
    )
    with pytest.raises(InvalidArgument, match=words):
        read(folder, 1, fp8=True)
    read(folder, 0, fp8=True)
    read(folder, 1)
    tensors[f"layers.{LAYER}.ffn.experts.2.w1.weight"] = torch.ones(128, 256).bfloat16()
    del tensors[f"layers.{LAYER}.ffn.experts.2.w1.scale"]
    with pytest.raises(InvalidArgument, match="experts.2, .* is torch.bfloat16, other experts are"):
        read(save(tmp_path, tensors), 2, fp8=True)


MATRICES = (("w1", 128, 256), ("w3", 128, 256), ("w2", 256, 128))


def stored(folder: Path, name: str, tensors: dict[str, Tensors]) -> Path:
    """A checkpoint with MiniMax's names; of each matrix, what follows its own name."""
    block = f"language_model.model.layers.{LAYER}.block_sparse_moe.experts"
    return save(
        folder,
        {
            f"{block}.{expert}.{matrix}.{suffix}": tensor.clone()
            for expert in range(EXPERTS)
            for matrix, parts in tensors.items()
            for suffix, tensor in parts.items()
        },
    )


def meaning(wide: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"gate_up": torch.cat((wide["w1"], wide["w3"])), "down": wide["w2"]}


def fp8_numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Every finite number of e4m3, in some order."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator).byte()
    return torch.where(codes & 127 == 127, codes - 1, codes).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", ["mxfp8", "e8m0", "blocks", "rows", "vector", "matrix", "scalar"])
def test_scales_of_fp8(tmp_path, kind):
    """Powers of two for 32 and 128 of a row and for blocks, numbers for a row or a matrix."""
    generator = torch.Generator().manual_seed(2)
    shapes: dict[str, Any] = {
        "mxfp8": lambda r, c: (r, c // 32), "e8m0": lambda r, c: (r, c // 128),
        "blocks": lambda r, c: (r // 128, c // 128), "rows": lambda r, c: (r, 1),
        "vector": lambda r, c: (r,), "matrix": lambda r, c: (1,), "scalar": lambda r, c: (),
    }  # fmt: skip
    tensors: dict[str, Tensors] = {}
    wide, largest = {}, {}
    for seed, (name, rows, columns) in enumerate(MATRICES):
        shape = shapes[kind](rows, columns)
        q = fp8_numbers(rows, columns, seed)
        if kind in ("mxfp8", "e8m0", "blocks"):
            powers = torch.randint(118, 124, shape, generator=generator).byte()
            saved = powers if kind == "mxfp8" else powers.view(torch.float8_e8m0fnu)
            scale = torch.ldexp(torch.ones(shape), powers.int() - 127)
        else:
            saved = scale = torch.rand(shape, generator=generator) / 64 + 0.01
        suffix = "weight_scale_inv" if kind == "mxfp8" else "weight_scale"
        tensors[name] = {"weight": q, suffix: saved}
        scale = scale.reshape(shape if len(shape) == 2 else (-1, 1))
        for axis, size in enumerate((rows, columns)):
            scale = scale.repeat_interleave(size // scale.shape[axis], axis)
        wide[name] = q.float() * scale
        top = scale.view(rows // 128, 128, columns // 128, 128).amax(dim=(1, 3))
        largest[name] = top.repeat_interleave(128, 0).repeat_interleave(128, 1)
    folder = stored(tmp_path, kind, tensors)
    plain, packed = read(folder, 0), read(folder, 0, fp8=True)
    for name, wanted in meaning(wide).items():
        assert torch.equal(getattr(plain, name)[0], wanted.bfloat16())
        found, top = dequantized(packed, name)[0], meaning(largest)[name]
        if kind in ("rows", "vector"):
            assert torch.equal(found, rounded(wanted))
            continue
        assert torch.equal(getattr(packed, f"{name}_scale")[0], top[::128, ::128])
        exact = wanted.abs() >= 2.0**-6 * top
        assert torch.equal(found[exact], wanted[exact])
        assert bool(((found - wanted).abs() <= 2.0**-10 * top).all())
        changed = float((found != wanted).float().mean())
        assert 0.01 < changed < 0.2 if kind in ("mxfp8", "e8m0") else changed == 0.0


def rounded(wide: torch.Tensor) -> torch.Tensor:
    return widened(*to_blocks(wide.unsqueeze(0)))[0]


@pytest.mark.parametrize("group", [32, 128])
def test_int4_of_compressed_tensors(tmp_path, group):
    """Kimi-K2: four bits and an offset of 8, the lowest bits first, with a scale for each group."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensors] = {}
    wide = {}
    for name, rows, columns in MATRICES:
        numbers = torch.randint(-8, 8, (rows, columns), generator=generator)
        scale = (torch.rand(rows, columns // group, generator=generator) + 0.5).bfloat16()
        shifted = (numbers + 8).view(rows, -1, 8) << torch.arange(0, 32, 4)
        words = shifted.sum(-1)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        sizes = torch.tensor([rows, columns])
        tensors[name] = {"weight_packed": words, "weight_scale": scale, "weight_shape": sizes}
        wide[name] = numbers.float() * scale.float().repeat_interleave(group, 1)
    folder = stored(tmp_path, "int4", tensors)
    plain, packed = read(folder, 0), read(folder, 0, fp8=True)
    for name, wanted in meaning(wide).items():
        assert torch.equal(getattr(plain, name)[0], wanted.bfloat16())
        assert torch.equal(dequantized(packed, name)[0], rounded(wanted))
    for name in tensors:
        tensors[name]["weight_zero_point"] = torch.zeros(1)
    with pytest.raises(InvalidArgument, match="w1.weight_zero_point, which weft does not read"):
        read(stored(tmp_path, "int4", tensors), 0)


def test_mxfp4_of_compressed_tensors(tmp_path):
    """Kimi-K3: the same numbers as DeepSeek-V4's, under other names."""
    tensors, meant = deepseek_v4()
    renamed = {
        name.replace(".weight", ".weight_packed").replace(".scale", ".weight_scale").replace(
            "ffn", "block_sparse_moe"
        ): tensor.view(torch.uint8)
        for name, tensor in tensors.items()
    }  # fmt: skip
    folder = save(tmp_path, renamed)
    found = dequantized(read(folder, 2, fp8=True), "gate_up")
    assert torch.equal(found, meant.gate_up[[2]].float())
    assert torch.equal(read(folder, 2).down, meant.down[[2]])


def test_only_what_the_experts_need_is_read(tmp_path, monkeypatch):
    """Slices of fused tensors, and matrices of the experts that were asked for."""
    whole = ExpertWeights.stack(CONFIG, experts_of())
    fused = {f"{NAME}.gate_up_proj": whole.gate_up, f"{NAME}.down_proj": whole.down}
    asked: list[tuple[str, Any]] = []
    real = safetensors.safe_open

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, key: Any) -> torch.Tensor:
            asked.append((self.name, key))
            found = self.inner[key]
            assert isinstance(found, torch.Tensor)
            return found

    class File:
        def __init__(self, *given: Any, **options: Any) -> None:
            self.inner = real(*given, **options)
            self.keys = self.inner.keys

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            self.inner.__exit__(None, None, None)

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.inner.get_slice(name))

    monkeypatch.setattr(safetensors, "safe_open", File)
    same(read(save(tmp_path, fused), 2), ExpertWeights.stack(CONFIG, experts_of()[2:3]))
    assert asked == [(f"{NAME}.gate_up_proj", 2), (f"{NAME}.down_proj", 2)]
    asked.clear()
    same(read(save(tmp_path, separate()), 1), ExpertWeights.stack(CONFIG, experts_of()[1:2]))
    wanted = [f"{NAME}.1.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert asked == [(name, ...) for name in wanted]


@pytest.mark.gpu
@pytest.mark.parametrize("store", [dict, in_fp8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_gpu_holds_the_same_bits(tmp_path, store, fp8):
    folder = save(tmp_path, store(separate()))
    found = read(folder, *range(EXPERTS), fp8=fp8, device="cuda")
    assert all(tensor.is_cuda for tensor in found.tensors)
    same(found, read(folder, *range(EXPERTS), fp8=fp8))


def test_what_was_read_is_the_callers(tmp_path):
    folder = save(tmp_path, separate())
    before = (folder / "model.safetensors").read_bytes()
    found = read(folder, 0)
    found.gate_up.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def replace_all(tensors: Tensors, others: Tensors) -> None:
    """Put other tensors in the place of all."""
    tensors.clear()
    tensors.update(others)


WRONG: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda t: t.pop(f"{NAME}.1.up_proj.weight"),
        rf"model.safetensors has no tensor {NAME}.1.up_proj.weight; {NAME}.* are "
        "1.down_proj.weight, 1.gate_proj.weight",
    ),
    "misshapen": (
        lambda t: t.update({f"{NAME}.1.up_proj.weight": torch.ones(64, 256)}),
        r"has .*1.up_proj.weight \[64, 256\]; the config wants \[128, 256\]: take MoEConfig.from",
    ),
    "dtype": (
        lambda t: t.update({f"{NAME}.1.up_proj.weight": torch.ones(128, 256, dtype=torch.int16)}),
        "up_proj.weight as I16; weft reads it as F32, BF16, F16, F8_E4M3, U8, I8",
    ),
    "no scale": (
        lambda t: t.update(
            {f"{NAME}.1.up_proj.weight": torch.ones(128, 256).to(torch.float8_e4m3fn)}
        ),
        r"has no tensor .*1.up_proj.weight_scale_inv; weights need scales: FP8 for each 128",
    ),
    "biases": (
        lambda t: t.update({f"{NAME}.gate_up_proj_bias": torch.ones(4, 256)}),
        "have biases, the config has biased=False",
    ),
    "MXFP4 of another shape": (
        lambda t: replace_all(
            t,
            {
                f"{NAME}.{name}_proj_blocks": torch.ones(4, dtype=torch.uint8)
                for name in ("gate_up", "down")
            },
        ),
        r"gate_up_proj_blocks \[4\]; the config wants \[4, 256, 8, 16\]",
    ),
    "MXFP4 without scales": (
        lambda t: replace_all(
            t,
            {
                f"{NAME}.gate_up_proj_blocks": torch.ones(4, 256, 8, 16, dtype=torch.uint8),
                f"{NAME}.down_proj_blocks": torch.ones(4, 256, 4, 16, dtype=torch.uint8),
            },
        ),
        "no tensor .*gate_up_proj_scales; MXFP4 weights need a scale for each 32 of a row",
    ),
    "two models": (
        lambda t: t.update({f"other.{NAME}.0.up_proj.weight": torch.ones(1)}),
        "experts of layer 3 under the prefixes 'model' and 'other.model': pass one .* prefix=",
    ),
    "another layer": (
        lambda t: [t.update({k.replace("layers.3", "layers.7"): t.pop(k)}) for k in list(t)],
        r"layer is 3; .*model.safetensors has no experts of it, layers 7..7 have some",
    ),
    "dense": (lambda t: [t.pop(k) for k in list(t)], "no experts of it, no layer has any"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_are_wrong(tmp_path, what):
    change, words = WRONG[what]
    tensors = separate()
    change(tensors)
    with pytest.raises(InvalidArgument, match=words):
        read(save(tmp_path, tensors or {"embedding": torch.ones(1)}), 0, 1)


def test_config_with_biases_that_are_not_there(tmp_path):
    with pytest.raises(InvalidArgument, match="have no biases, the config has biased=True"):
        read(save(tmp_path, separate()), 0, config=replace(CONFIG, biased=True))


def test_scales_of_other_blocks(tmp_path):
    tensors = in_fp8(separate())
    name = f"{NAME}.0.gate_proj.weight_scale_inv"
    tensors[name] = torch.ones(64, 1)
    with pytest.raises(InvalidArgument, match=r"scale_inv \[64, 1\] beside weights \[128, 256\]"):
        read(save(tmp_path, tensors), 0, fp8=True)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors", "m.bin", 7]
)
def test_an_index_that_leaves_the_folder(tmp_path, file):
    inside = tmp_path / "inside"
    inside.mkdir()
    save(tmp_path, separate())
    write_index(inside, dict.fromkeys(separate(), file))
    with pytest.raises(InvalidArgument, match=r"index.json names (the|a) file "):
        read(inside, 0)


def test_links_inside_the_folder_are_followed(tmp_path):
    """As the hub's cache lays its snapshots out."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (tmp_path / "blobs").mkdir()
    save(tmp_path / "blobs", separate())
    (folder / "model-1.safetensors").symlink_to("../blobs/model.safetensors")
    write_index(folder, dict.fromkeys(separate(), "model-1.safetensors"))
    same(read(folder, 0), ExpertWeights.stack(CONFIG, experts_of()[:1]))


def test_files_that_are_wrong(tmp_path):
    with pytest.raises(InvalidArgument, match="it has neither model.safetensors.index.json nor"):
        read(tmp_path, 0)
    with pytest.raises(InvalidArgument, match="folder is 7; it must be the path of a folder"):
        read(7, 0)  # type: ignore[arg-type]
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint at all")
    with pytest.raises(InvalidArgument, match=r"cannot read .*model.safetensors': "):
        read(tmp_path, 0)
    save(tmp_path, separate())
    cut = (tmp_path / "model.safetensors").read_bytes()[:-7]
    (tmp_path / "model.safetensors").write_bytes(cut)
    with pytest.raises(InvalidArgument, match=r"cannot read .*model.safetensors': "):
        read(tmp_path, 0)
    save(tmp_path, separate(), {"embedding": torch.ones(1)})
    write_index(tmp_path, dict.fromkeys(separate(), "model-1.safetensors"))
    with pytest.raises(InvalidArgument, match=r"model-1.* has no tensor .*, though .*index.json"):
        read(tmp_path, 0)
    write_index(tmp_path, dict.fromkeys(separate(), "gone.safetensors"))
    with pytest.raises(InvalidArgument, match=r"cannot read .*gone.safetensors': No such file"):
        read(tmp_path, 0)
    for strange in ([1], None, "x"):
        write_index(tmp_path, strange)
        with pytest.raises(InvalidArgument, match="has no object 'weight_map'"):
            read(tmp_path, 0)
    for text in ("{", "[" * 200_000):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(InvalidArgument, match="cannot read the checkpoint's index"):
            read(tmp_path, 0)
    write_index(tmp_path, dict.fromkeys(separate(), "\ud800.safetensors"))
    with pytest.raises(InvalidArgument, match="index.json names a file whose name is no text"):
        read(tmp_path, 0)


def test_without_safetensors(tmp_path, monkeypatch):
    folder = save(tmp_path, separate())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InvalidArgument, match="checkpoints need safetensors.*'checkpoint' extra"):
        read(folder, 0)
