# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task, and its trained checkpoint."""

import importlib
import json
from itertools import islice
from types import ModuleType

import pytest

from models.arithmetic.arithmetic import HELD_OUT, is_held_out, questions
from weft.cli.demo import CHECKPOINT

pytest.importorskip("transformers", minversion="5.23")

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


def test_the_checkpoint_is_as_train_saves_it(train, tmp_path):
    """Compare configuration, tokenizer and questions; the weights have 4000 steps."""
    tokenizer = train.make_tokenizer()
    train.save(tmp_path, train.make_model(tokenizer), tokenizer)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in CHECKPOINT.iterdir())
    for name in names:
        if name.endswith("config.json"):
            ours, new = (json.loads((at / name).read_text()) for at in (CHECKPOINT, tmp_path))
            assert {**new, "transformers_version": 0} == {**ours, "transformers_version": 0}
        elif name.endswith(".safetensors"):
            assert (CHECKPOINT / name).stat().st_size == (tmp_path / name).stat().st_size
        else:
            assert (CHECKPOINT / name).read_text() == (tmp_path / name).read_text(), name
