# SPDX-License-Identifier: Apache-2.0
"""Experts from checkpoints: layouts, quantisation, declarations, reads, and invalid files."""

import contextlib
import functools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.gemm.cases import decode_mxfp4
from tests.moe.layers import dequantize_blocks, dequantized
from tests.moe.test_mxfp4 import padded_with_zeros
from weft.errors import InvalidArgument
from weft.json_files import read_json
from weft.moe import RELU2, SWIGLU, Expert, ExpertWeights, MoEConfig, Routing
from weft.moe.experts.quantize import quantize_blocks

safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file

LAYER, EXPERTS = 3, 4
CONFIG = MoEConfig(256, 128, Routing(EXPERTS, 2))
BIASED = replace(CONFIG, biased=True)
NAME = f"model.layers.{LAYER}.mlp.experts"
MATRICES = ("gate_up", "down")
Tensors = dict[str, torch.Tensor]


@functools.cache
def experts_of(config: MoEConfig = CONFIG) -> list[Expert]:
    return [Expert.seeded(config, seed) for seed in range(EXPERTS)]


def stacked(*experts: int, config: MoEConfig = CONFIG) -> ExpertWeights:
    """Return the tensors of these experts in a checkpoint of `experts_of(config)`."""
    every = experts_of(config)
    return ExpertWeights.stack(config, [every[expert] for expert in experts])


def separate(config: MoEConfig = CONFIG) -> Tensors:
    result: Tensors = {}
    parts = config.gating.num_projections
    for index, expert in enumerate(experts_of(config)):
        tensors = (*expert.gate_up.chunk(parts), expert.down)
        for name, tensor in zip(("gate", "up", "down")[-1 - parts :], tensors, strict=True):
            result[f"{NAME}.{index}.{name}_proj.weight"] = tensor.contiguous()
    return result


def save(folder: Path, *shards: Tensors) -> Path:
    """Save a checkpoint as one file, or as several with an index."""
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
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def read(folder: Path, *experts: int, **options: Any) -> ExpertWeights:
    options = {"config": CONFIG, **options}
    result = ExpertWeights.from_safetensors(folder, LAYER, experts, **options)
    device = result.gate_up.device
    assert device.type == torch.device(options.get("device", "cpu")).type
    result.check(options["config"], len(experts), device, fp8=options.get("fp8", False))
    return result


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
    (folder / "model-1.safetensors").rename(folder / "blob")  # the hub's cache has such links
    (folder / "model-1.safetensors").symlink_to("blob")
    with torch.device("meta"):  # the caller's default device does not matter
        result = read(folder, 2, 0, 2)
    same(result, stacked(2, 0, 2))
    result.gate_up.zero_()  # these tensors are the caller's
    same(read(folder, 2), stacked(2))
    assert read(folder).gate_up.shape == (0, 256, 256)
    for dtype in (torch.float16, torch.float32):
        config = replace(CONFIG, dtype=dtype)
        same(
            read(folder, 1, config=config),
            ExpertWeights.stack(config, [Expert.seeded(CONFIG, 1).to(dtype)]),
        )


def test_experts_without_a_gate(tmp_path):
    """Separate, fused, and of a size that FP8 pads with zeros; gates belong to other configs."""
    config = replace(CONFIG, gating=RELU2)
    folder = save(tmp_path, separate(config))
    same(read(folder, 2, 0, config=config), stacked(2, 0, config=config))
    same(read(folder, 2, config=config, fp8=True), stacked(2, config=config).to_fp8())
    with pytest.raises(InvalidArgument, match=r"has no tensor .*0\.gate_proj\.weight"):
        read(folder, 0)
    whole = stacked(*range(EXPERTS), config=config)
    stem = f"backbone.layers.{LAYER}.mixer.experts."
    fused = {f"{stem}up_proj": whole.gate_up, f"{stem}down_proj": whole.down}
    same(read(save(tmp_path, fused), 3, 1, config=config), stacked(3, 1, config=config))
    save(tmp_path, separate())
    with pytest.raises(InvalidArgument, match="gate_proj.weight, which weft does not read"):
        read(tmp_path, 0, config=config)


@pytest.mark.parametrize("gating", [SWIGLU, RELU2], ids=["gated", "ungated"])
def test_unquantised_experts_are_zero_padded(tmp_path, gating):
    small = replace(CONFIG, hidden=160, intermediate=96, gating=gating)
    folder, whole = save(tmp_path, separate(small)), stacked(1, config=small)
    values = {name: getattr(whole, name) for name in MATRICES}
    wide = replace(small, hidden=256, intermediate=128)
    padded = ExpertWeights(**padded_with_zeros(values, False, gating.num_projections))
    same(read(folder, 1, config=wide), padded)
    same(read(folder, 1, config=wide, fp8=True), padded.to_fp8())
    with pytest.raises(InvalidArgument, match=r"\[96, 160\]; the config expects \[128, 384\]"):
        read(folder, 1, config=replace(wide, hidden=384), fp8=True)
    mixed = separate(small)
    mixed[f"{NAME}.1.up_proj.weight"] = mixed[f"{NAME}.1.up_proj.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(InvalidArgument, match=r"as F8_E4M3, .*pads only unquantised experts"):
        read(save(tmp_path, mixed), 1, config=wide, fp8=True)


@pytest.mark.parametrize("prefix", ["", "language_model.model."])
@pytest.mark.parametrize("layout", ["fused", "llama", "gpt-oss"])
def test_fused_layouts(tmp_path, layout, prefix):
    config = replace(CONFIG, biased=layout == "gpt-oss")
    assert config.hidden == 2 * config.intermediate, "shapes do not tell the layouts apart"
    whole = stacked(*range(EXPERTS), config=config)
    gate_up, down = whole.gate_up, whole.down
    stem = f"{prefix}layers.{LAYER}.mlp.experts."
    tensors: Tensors = {}
    if layout == "gpt-oss":
        gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)
        assert whole.gate_up_bias is not None
        assert whole.down_bias is not None
        bias = torch.stack(whole.gate_up_bias.chunk(2, dim=1), dim=2).flatten(1)
        tensors |= {f"{stem}gate_up_proj_bias": bias, f"{stem}down_proj_bias": whole.down_bias}
    if layout == "llama":
        stem = stem.replace("mlp", "feed_forward")
    if layout != "fused":
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    tensors[f"{stem}gate_up_proj"] = gate_up.contiguous()
    tensors[f"{stem}down_proj"] = down.contiguous()
    folder, expected = save(tmp_path, tensors), stacked(3, 1, config=config)
    same(read(folder, 3, 1, config=config), expected)
    same(read(folder, 3, 1, config=config, fp8=True), expected.to_fp8())


def mxfp4_of(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales of all experts, with a limited range in each row."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator).byte()
    scales = torch.randint(118, 130, (EXPERTS, rows, columns // 32), generator=generator).byte()
    return values, scales


def gpt_oss(config: MoEConfig = BIASED) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return MXFP4 as GPT-OSS stores it, and its values."""
    wide, inner, hidden = 2 * config.intermediate, config.intermediate, config.hidden
    gate_up, down = mxfp4_of(wide, hidden, 1), mxfp4_of(hidden, inner, 2)
    biases = torch.randn(EXPERTS, wide).bfloat16(), torch.randn(EXPERTS, hidden).bfloat16()
    tensors = {f"{NAME}.gate_up_proj_bias": biases[0], f"{NAME}.down_proj_bias": biases[1]}
    for name, (values, scales) in (("gate_up", gate_up), ("down", down)):
        tensors[f"{NAME}.{name}_proj_blocks"] = values.unflatten(2, (-1, 16))
        tensors[f"{NAME}.{name}_proj_scales"] = scales
    apart = torch.cat((torch.arange(0, wide, 2), torch.arange(1, wide, 2)))
    return tensors, {
        "gate_up": decode_mxfp4(*gate_up)[:, apart].bfloat16(),
        "down": decode_mxfp4(*down).bfloat16(),
        "gate_up_bias": biases[0][:, apart],
        "down_bias": biases[1],
    }


def holds(weights: ExpertWeights, values: dict[str, torch.Tensor], *, packed: bool) -> None:
    for name, expected in values.items():
        result = getattr(weights, name)
        if packed and name in MATRICES:
            result, expected = dequantized(weights, name), expected.float()
        assert torch.equal(result, expected), name


def test_mxfp4_of_other_sizes_is_zero_padded(tmp_path):
    small = replace(CONFIG, hidden=160, intermediate=96, biased=True)
    tensors, values = gpt_oss(small)
    one, folder = {name: tensor[1:2] for name, tensor in values.items()}, save(tmp_path, tensors)
    holds(read(folder, 1, config=small), one, packed=False)
    with pytest.raises(InvalidArgument, match="fp8 is True for intermediate 96 and hidden 160"):
        read(folder, 1, config=small, fp8=True)
    with pytest.raises(
        InvalidArgument, match=r"\[4, 192, 5, 16\]; the config expects \[4, 256, 12"
    ):
        read(folder, 1, config=replace(small, hidden=384, intermediate=128), fp8=True)
    packed = read(folder, 1, config=replace(small, hidden=256, intermediate=128), fp8=True)
    holds(packed, padded_with_zeros(one, False), packed=True)


def deepseek_v4() -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return MXFP4 as DeepSeek-V4 stores it, and its values."""
    tensors: Tensors = {}
    result = {"w1": mxfp4_of(128, 256, 1), "w3": mxfp4_of(128, 256, 2), "w2": mxfp4_of(256, 128, 3)}
    for name, (values, scales) in result.items():
        for expert in range(EXPERTS):
            key = f"layers.{LAYER}.ffn.experts.{expert}.{name}"
            tensors[f"{key}.weight"] = values[expert].view(torch.int8).clone()
            tensors[f"{key}.scale"] = scales[expert].view(torch.float8_e8m0fnu).clone()
    gate, up, down = (decode_mxfp4(*each).bfloat16() for each in result.values())
    return tensors, {"gate_up": torch.cat((gate, up), dim=1), "down": down}


def kimi_k3() -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return the same with the names of compressed-tensors."""
    tensors, values = deepseek_v4()
    new_names = {".weight": ".weight_packed", ".scale": ".weight_scale", "ffn": "block_sparse_moe"}
    for old, new in new_names.items():
        tensors = {k.replace(old, new): v.view(torch.uint8) for k, v in tensors.items()}
    return tensors, values


@pytest.mark.parametrize("make", [gpt_oss, deepseek_v4, kimi_k3])
def test_mxfp4(tmp_path, make):
    tensors, values = make()
    config = replace(CONFIG, biased="gate_up_bias" in values)
    folder, chosen = save(tmp_path, tensors), {name: t[[2, 0]] for name, t in values.items()}
    packed = read(folder, 2, 0, config=config, fp8=True)
    assert packed.gate_up.dtype == torch.uint8
    holds(packed, chosen, packed=True)
    holds(read(folder, 2, 0, config=config), chosen, packed=False)


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


class Format(NamedTuple):
    """How a matrix is stored: numbers, rows and columns of a scale's block (0: all), scales."""

    numbers: str
    rows: int = 1
    columns: int = 1
    scales: str = "float"  # or "bfloat16"; powers of two in "e8m0" or "bytes"; a "vector", "scalar"


# With a declaration each, of quantization_config.
FORMATS = {
    "plain": Format("plain"),
    **{f"fp8 {a} x {b}": Format("fp8", a, b) for a, b in ((128, 128), (64, 64), (1, 32), (1, 128))},
    "fp8 row": Format("fp8", 1, 0),
    "fp8 matrix": Format("fp8", 0, 0),
    **{f"int4 {group}": Format("int4", 1, group) for group in (32, 64, 96, 128)},
}
READ = {*FORMATS} - {"fp8 64 x 64", "int4 64", "int4 96"}
OTHER_SCALES = {
    "mxfp8": Format("fp8", 1, 32, "bytes"),
    "e8m0": Format("fp8", 1, 128, "e8m0"),
    "e8m0 blocks": Format("fp8", 128, 128, "e8m0"),
    "bfloat16 blocks": Format("fp8", 128, 128, "bfloat16"),
    "fp8 row, vector": Format("fp8", 1, 0, "vector"),
    "fp8 matrix, scalar": Format("fp8", 0, 0, "scalar"),
}


class Drawn(NamedTuple):
    """A matrix: its tensors by suffix, its values and the scale of each."""

    parts: Tensors
    values: torch.Tensor
    scale: torch.Tensor


def draw_matrix(chance: torch.Generator, form: Format, rows: int, columns: int) -> Drawn:
    if form.numbers == "plain":
        values = torch.randn(rows, columns, generator=chance).bfloat16()
        return Drawn({"weight": values}, values.float(), torch.ones(rows, columns))
    down, across = form.rows or rows, form.columns or columns
    size = (-(-rows // down), -(-columns // across))
    if form.scales in ("e8m0", "bytes"):
        powers = torch.randint(118, 124, size, generator=chance).byte()
        scale = torch.ldexp(torch.ones(size), powers.int() - 127)
        saved = powers if form.scales == "bytes" else powers.view(torch.float8_e8m0fnu)
    else:
        saved = scale = (torch.rand(size, generator=chance) + 0.5).bfloat16().float()
        forms = {"vector": saved.ravel(), "scalar": saved.sum(), "bfloat16": saved.bfloat16()}
        saved = forms.get(form.scales, saved)
    wide = scale.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
    if form.numbers == "fp8":
        codes = torch.randint(0, 256, (rows, columns), generator=chance).byte()  # all but NaN
        q = torch.where(codes & 127 == 127, codes - 1, codes).view(torch.float8_e4m3fn)
        inverse = form.scales == "bytes" or form.rows > 1  # DeepSeek's name
        name = "weight_scale_inv" if inverse else "weight_scale"
        return Drawn({"weight": q, name: saved}, q.float() * wide, wide)
    # Four bits and an offset of 8, the lowest bits first.
    numbers = torch.randint(-8, 8, (rows, columns), generator=chance)
    words = ((numbers + 8).view(rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    parts = {"weight_packed": words, "weight_scale": saved.bfloat16()}
    parts["weight_shape"] = torch.tensor([rows, columns])
    return Drawn(parts, numbers.float() * wide, wide)


def declaration(name: str) -> dict[str, Any] | None:
    numbers, down, across, _ = FORMATS[name]
    if numbers == "plain":
        return None
    if numbers == "fp8" and down == across != 0:
        return {"quant_method": "fp8", "weight_block_size": [down, across]}
    strategy = "group" if across else "channel" if down else "tensor"
    weights: dict[str, Any] = {"num_bits": 4 if numbers == "int4" else 8, "strategy": strategy}
    weights |= {"type": "int" if numbers == "int4" else "float", "symmetric": True}
    weights |= {"group_size": across or None}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def draw_layer(
    form: Format, hidden: int = 256, inner: int = 128, seed: int = 0, minimax: bool = False
) -> tuple[Tensors, list[Drawn]]:
    """Draw two experts in a format, with MiniMax's or Qwen's names; return the first."""
    chance = torch.Generator().manual_seed(seed)
    stem, names = NAME, ("gate_proj", "up_proj", "down_proj")
    if minimax:
        stem = f"language_model.model.layers.{LAYER}.block_sparse_moe.experts"
        names = ("w1", "w3", "w2")
    tensors: Tensors = {}
    first: list[Drawn] = []
    for expert in range(2):
        for name, rows, columns in zip(
            names, (inner, inner, hidden), (hidden, hidden, inner), strict=True
        ):
            drawn = draw_matrix(chance, form, rows, columns)
            tensors |= {f"{stem}.{expert}.{name}.{k}": v.clone() for k, v in drawn.parts.items()}
            first += [] if expert else [drawn]
    return tensors, first


def whole_matrices(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"gate_up": torch.cat(parts[:2]), "down": parts[2]}


KINDS = ("fp8 128 x 128", "fp8 row", "fp8 matrix", "int4 32", "int4 128", *OTHER_SCALES)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_every_form(tmp_path, kind):
    form = (FORMATS | OTHER_SCALES)[kind]
    tensors, drawn = draw_layer(form, minimax=True)
    folder = save(tmp_path, tensors)
    plain, packed = read(folder, 0), read(folder, 0, fp8=True)
    scales = whole_matrices([each.scale for each in drawn])
    for name, values in whole_matrices([each.values for each in drawn]).items():
        assert torch.equal(getattr(plain, name)[0], values.bfloat16())
        result = dequantized(packed, name)[0]
        if form.numbers == "int4" or kind.startswith("fp8 row"):
            assert torch.equal(result, dequantize_blocks(*quantize_blocks(values.unsqueeze(0)))[0])
            continue
        top = scales[name].unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax(dim=(1, 3))
        assert torch.equal(getattr(packed, f"{name}_scale")[0], top)
        top = top.repeat_interleave(128, 0).repeat_interleave(128, 1)
        exact = values.abs() >= 2.0**-6 * top
        assert torch.equal(result[exact], values[exact])
        assert bool(((result - values).abs() <= 2.0**-10 * top).all())
        changed = float((result != values).float().mean())
        assert 0.01 < changed < 0.2 if form.rows == 1 else changed == 0.0


def test_a_checkpoint_is_read_right_or_refused(tmp_path):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(60):
        stored = chance.choice([*FORMATS])
        declared = chance.choice([None, stored, stored, chance.choice([*FORMATS])])
        unit = 96 if stored == "int4 96" else 32
        sizes = unit * chance.choice((1, 3, 4)), unit * chance.choice((1, 2, 4))
        tensors, drawn = draw_layer(FORMATS[stored], *sizes, chance.randrange(1 << 30))
        declare(save(tmp_path, tensors), declared and declaration(declared))
        case = f"{stored} declared as {declared}, {sizes}, seed {seed}"
        refusal, weights = "", None
        try:
            weights = read(
                tmp_path, 0, config=replace(CONFIG, hidden=sizes[0], intermediate=sizes[1])
            )
        except InvalidArgument as error:
            refusal = str(error)
        if weights is None:
            outcomes["refused"] += 1
            assert NAME in refusal or "quantization_config" in refusal, (case, refusal)
            whole = stored == "fp8 128 x 128" or all(size % 128 == 0 for size in sizes)
            assert not (stored == declared and stored in READ and whole), (case, refusal)
            continue
        outcomes["read"] += 1
        for name, values in whole_matrices([each.values for each in drawn]).items():
            assert torch.equal(getattr(weights, name)[0], values.bfloat16()), case
    assert min(outcomes.values()) > 5, outcomes


def test_the_models_own_stack_is_read_and_others_by_prefix(tmp_path):
    tensors = separate()
    tensors |= {name.replace("model.", "mtp."): 2 * tensor for name, tensor in tensors.items()}
    save(tmp_path, tensors)
    same(read(tmp_path, 0), stacked(0))
    assert torch.equal(read(tmp_path, 0, prefix="mtp").down, 2 * stacked(0).down)
    with pytest.raises(InvalidArgument, match="prefix is 'visual'; .* 'model' and 'mtp'"):
        read(tmp_path, 0, prefix="visual")


def test_only_what_the_experts_need_is_read(tmp_path, monkeypatch):
    """Only slices of fused tensors, and matrices of the requested experts, are read."""
    reads: list[tuple[str, Any]] = []
    real = safetensors.safe_open

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, key: Any) -> Any:
            reads.append((self.name, key))
            return self.inner[key]

    @contextlib.contextmanager
    def noted(*args: Any, **options: Any) -> Iterator[Any]:
        with real(*args, **options) as inner:
            yield SimpleNamespace(
                keys=inner.keys, get_slice=lambda name: Slice(name, inner.get_slice(name))
            )

    monkeypatch.setattr(safetensors, "safe_open", noted)
    whole = stacked(*range(EXPERTS))
    fused = {f"{NAME}.gate_up_proj": whole.gate_up, f"{NAME}.down_proj": whole.down}
    same(read(save(tmp_path, fused), 2), stacked(2))
    assert reads == [(f"{NAME}.gate_up_proj", 2), (f"{NAME}.down_proj", 2)]
    reads.clear()
    same(read(save(tmp_path, separate()), 1), stacked(1))
    assert reads == [(f"{NAME}.1.{name}_proj.weight", ...) for name in ("gate", "up", "down")]


def in_fp8() -> Tensors:
    return draw_layer(FORMATS["fp8 128 x 128"])[0]


@pytest.mark.gpu
@pytest.mark.parametrize("store", [separate, in_fp8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_gpu_holds_the_same_bits(tmp_path, store, fp8):
    folder = save(tmp_path, store())
    result = read(folder, 0, 1, fp8=fp8, device="cuda")
    assert all(tensor.is_cuda for tensor in result.tensors)
    same(result, read(folder, 0, 1, fp8=fp8))


Change = Callable[[Tensors], object]
UP = "1.up_proj.weight"


def int4() -> Tensors:
    return draw_layer(FORMATS["int4 32"])[0]


def blocks_alone() -> Tensors:
    tensors, _ = gpt_oss(CONFIG)
    return {name: tensor for name, tensor in tensors.items() if name.endswith("_blocks")}


def put(name: str, *size: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Change:
    return lambda t: t.update({f"{NAME}.{name}": torch.full(size, value).to(dtype)})


E4M3, ONE_OF_THEM = torch.float8_e4m3fn, "a matrix has one of them"
WRONG: list[tuple[Callable[[], Tensors], Change, str]] = [
    (separate, lambda t: t.pop(f"{NAME}.{UP}"),
     rf"no tensor {NAME}.{UP}; {NAME}.* are 1.down_proj.weight, 1.gate_proj.weight"),
    (separate, put(UP, 64, 256), r"\[64, 256\]; the config expects \[128, 256\]: use MoEConfig"),
    (separate, put(UP, 128, 256, dtype=torch.int16),
     "up_proj.weight as I16; weft reads it as F32, BF16, F16, F8_E4M3, U8, I8"),
    (separate, put(UP, 128, 256, dtype=E4M3),
     "no tensor .*1.up_proj.weight_scale_inv; weights need scales: FP8 one per 128"),
    (separate, put("gate_up_proj_bias", 4, 256), "have biases, but the config has biased=False"),
    (blocks_alone, lambda t: t.update({name: torch.ones(4, dtype=torch.uint8) for name in t}),
     r"gate_up_proj_blocks \[4\]; the config expects \[4, 256, 8, 16\]"),
    (blocks_alone, len,
     "no tensor .*gate_up_proj_scales; MXFP4 weights need one scale per 32 columns"),
    (separate, lambda t: t.update({f"other.{NAME}.0.up_proj.weight": torch.ones(1)}),
     "experts of layer 3 under the prefixes 'model' and 'other.model': pass one .* prefix="),
    (dict, lambda t: t.update({f"{NAME.replace('3', '7')}.0.up_proj.weight": torch.ones(1)}),
     "layer is 3, but .*model.safetensors has no .*layers: 7..7"),
    (dict, lambda t: t.update(embedding=torch.ones(1)), "no experts of it .layers: none"),
    (in_fp8, put("0.gate_proj.weight_scale_inv", 64, 1),
     r"inv \[64, 1\] beside weights \[128, 256\]"),
    *((in_fp8, put("0.up_proj.weight_scale_inv", 1, 2, value=value), "in the scales .*up_proj")
      for value in (float("nan"), float("inf"), -1.0)),
    # Tensors that would be left unread.
    (int4, put("0.up_proj.weight_zero_point", 1), "weight_zero_point, which weft does not read"),
    (separate, put("0.up_proj.weight_scale", 1, 1), "beside unquantised weights"),
    (in_fp8, put("0.up_proj.weight_scale", 1, 1), ONE_OF_THEM),
    (int4, put("0.up_proj.weight", 128, 256), ONE_OF_THEM),
    (separate, put("0.up_proj.bias", 128), "up_proj.bias, which weft does not read"),
    (separate, put("gate_up_proj", 2, 256, 256), "beside fused experts"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "change", "words"), WRONG)
def test_invalid_tensors_are_refused(tmp_path, base, change, words):
    tensors = base()
    change(tensors)
    with pytest.raises(InvalidArgument, match=words):
        read(save(tmp_path, tensors), 0, 1)


def test_invalid_declarations_are_refused(tmp_path):
    save(tmp_path, in_fp8())
    for method in ("gptq", "awq", "bitsandbytes", "modelopt", None):
        declare(tmp_path, {"quant_method": method})
        with pytest.raises(InvalidArgument, match=f"quant_method .* is {method!r}; weft reads FP8"):
            read(tmp_path, 0)
    plain = {"modules_to_not_convert": ["lm_head", f"model.layers.{LAYER}.mlp"]}
    declare(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128], **plain})
    with pytest.raises(InvalidArgument, match="says that these experts are plain"):
        read(tmp_path, 0)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InvalidArgument, match="have no biases, but the config has biased=True"):
        read(save(tmp_path, separate()), 0, config=BIASED)


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
    else:
        path.write_bytes(texts.get(what, "\0\xff{").encode("latin-1"))
    with pytest.raises(InvalidArgument, match="the model's config .*config.json"):
        read_json(path, "the model's config")


INDEX = "model.safetensors.index.json"
OUTSIDE = ("../b.safetensors", "/etc/b.safetensors", "a/../../b.safetensors", "m.bin", 7)
FILES: list[tuple[str, object, str]] = [  # a file's name, its text or the index's map, the error
    ("other", "", "it has neither model.safetensors.index.json nor"),
    ("model.safetensors", "not a checkpoint at all", r"cannot read .*model.safetensors': "),
    (
        INDEX,
        {"": "model.safetensors"},
        r"model.safetensors.* has no tensor .*, though .*index.json",
    ),
    (INDEX, {"": "gone.safetensors"}, r"cannot read .*gone.safetensors': No such file"),
    *((INDEX, strange, "has no object 'weight_map'") for strange in ([1], None, 3)),
    (INDEX, "{", "cannot read the checkpoint's index"),
    (INDEX, {"": "\ud800.safetensors"}, "index.json names a file with an invalid name"),
    *((INDEX, {"": outside}, r"index.json names (the|a) file ") for outside in OUTSIDE),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES)
def test_invalid_files_are_refused(tmp_path, name, content, words):
    (tmp_path.parent / "b.safetensors").write_bytes(b"")
    if name == INDEX:
        save(tmp_path, {"embedding": torch.ones(1)})
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    else:
        every = isinstance(content, dict)
        write_index(tmp_path, dict.fromkeys(separate(), content[""]) if every else content)
    with pytest.raises(InvalidArgument, match=words):
        read(tmp_path, 0)


def test_cut_files_and_missing_packages_are_refused(tmp_path, monkeypatch):
    file = save(tmp_path, separate()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(InvalidArgument, match=r"cannot read .*model.safetensors': "):
        read(tmp_path, 0)
    with pytest.raises(InvalidArgument, match="folder is 7; it must be the path of a folder"):
        read(7, 0)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InvalidArgument, match="checkpoints need safetensors.*'checkpoint' extra"):
        read(tmp_path, 0)
