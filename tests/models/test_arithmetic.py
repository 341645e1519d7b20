# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task, its trainer on a smaller model, and the checkpoint that was trained."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from itertools import islice
from types import ModuleType

import pytest

from models.arithmetic.arithmetic import HELD_OUT, is_held_out, questions
from weft.cli.demo import CHECKPOINT, read_questions

transformers = pytest.importorskip("transformers", minversion="5.23")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So small a model is trained in seconds by one thread, and in minutes by two of a busy CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train() -> ModuleType:
    """The trainer, which imports a model of transformers: seconds that collecting must not take."""
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
        found = re.fullmatch(r"(.+)=(\d+)\. (.+)=(\d+)\. #### (\d+)", each.answer)
        assert found is not None
        first, between, second, result, final = found.groups()
        assert each.question.startswith(first)
        assert second.startswith(between)
        assert _sum(first) == int(between) >= 0
        assert _sum(second) == int(result) == int(final) == _sum(each.question)


def _sum(text: str) -> int:
    return sum(int(number) for number in re.findall(r"[+-]?\d+", text))


def test_a_row_teaches_answers_alone(train):
    tokenizer = train.make_tokenizer()
    stream = questions(0, held_out=False)
    ids, labels = next(train.rows(tokenizer, stream, train.ROW))
    assert len(ids) == len(labels) == train.ROW
    text = tokenizer.decode(ids)
    assert text.startswith("Question: ")
    assert text.count("\n\nQuestion: ") >= 3
    taught = tokenizer.decode([label for label in labels if label >= 0])
    assert "Question" not in taught
    assert taught.startswith(text.partition("Answer:")[2].partition("Question")[0])


@pytest.mark.slow
def test_training_lowers_the_loss_and_saves(train, tmp_path):
    torch.manual_seed(0)
    tokenizer = train.make_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8, "moe_intermediate_size": 16}
    model = train.make_model(tokenizer, **sizes, num_experts=4, num_experts_per_tok=2)
    losses = train.train(model, tokenizer, steps=120, batch=4, rate=1e-2, length=64)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    train.save(tmp_path, model, tokenizer)
    kept = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert kept.dtype == torch.bfloat16
    for name, weight in model.state_dict().items():
        assert torch.equal(kept.state_dict()[name], weight), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_experts"] == config["num_local_experts"] == 4


def test_the_checkpoint_is_as_train_saves_it(train, tmp_path):
    """Configuration, tokenizer and questions; the weights are of 4000 steps."""
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
    """All of the first ten questions, as when it was trained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    known = read_questions(CHECKPOINT / "questions.jsonl")
    assert len(known) == train.SAVED
    asked = known[:10]
    batch = tokenizer([each.prompt for each in asked], return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(each.is_right(text) for each, text in zip(asked, texts, strict=True)) == 10
    assert [text.strip() for text in texts] == [each.answer for each in asked]
