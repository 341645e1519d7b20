# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task, and its trained checkpoint."""

from __future__ import annotations

import importlib
import json
import re
from itertools import islice
from types import ModuleType

import pytest

from models.arithmetic.arithmetic import HELD_OUT, is_held_out, questions
from weft.cli.demo import CHECKPOINT, read_questions

transformers = pytest.importorskip("transformers", minversion="5.23")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def train() -> ModuleType:
    """Import the trainer, which imports transformers: too slow for collection."""
    return importlib.import_module("models.arithmetic.train")


def test_training_never_sees_a_held_out_question():
    learnt = {each.question for each in islice(questions(0, held_out=False), 20_000)}
    kept = [each.question for each in islice(questions(1, held_out=True), 2_000)]
    assert not learnt & set(kept)
    assert all(map(is_held_out, kept))
    drawn = sum(map(is_held_out, (f"{a}+{b}+1=" for a in range(1, 100) for b in range(1, 100))))
    assert 0.5 < drawn / 99**2 / HELD_OUT < 2


def test_every_step_of_an_answer_is_right():
    for each in islice(questions(5, held_out=True), 500):
        results = re.fullmatch(r"(.+)=(\d+)\. (.+)=(\d+)\. #### (\d+)", each.answer)
        assert results is not None
        first, between, second, result, final = results.groups()
        assert each.question.startswith(first)
        assert second.startswith(between)
        assert _sum(first) == int(between) >= 0
        assert _sum(second) == int(result) == int(final) == _sum(each.question)


def _sum(text: str) -> int:
    return sum(int(number) for number in re.findall(r"[+-]?\d+", text))


def test_the_checkpoint_is_as_train_saves_it(train, tmp_path):
    """Compare configuration, tokenizer and questions; the weights have 4000 steps."""
    tokenizer = train.make_tokenizer()
    train.save(tmp_path, train.make_model(tokenizer), tokenizer)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in CHECKPOINT.iterdir())
    for name in names:
        if name.endswith("config.json"):
            ours, new = (json.loads((at / name).read_text()) for at in (CHECKPOINT, tmp_path))
            assert {**new, "transformers_version": ours.get("transformers_version")} == {
                **ours,
                "transformers_version": ours.get("transformers_version"),
            }
        elif name.endswith(".safetensors"):
            assert (CHECKPOINT / name).stat().st_size == (tmp_path / name).stat().st_size
        else:
            assert (CHECKPOINT / name).read_text() == (tmp_path / name).read_text(), name


def test_the_checkpoint_answers(train):
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    known = read_questions(CHECKPOINT / "questions.jsonl")
    assert len(known) == train.SAVED
    asked = known[:10]
    batch = tokenizer([each.prompt for each in asked], return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(each.is_correct(text) for each, text in zip(asked, texts, strict=True)) == 10
    assert [text.strip() for text in texts] == [each.answer for each in asked]
