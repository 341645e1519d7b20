"""Write a byte-level tokenizer, 256 bytes and 3 special tokens, into each folder.

make_tokenizer.py DIR...
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<s>", "</s>"]
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": 1 << 20,
    "clean_up_tokenization_spaces": False,
    "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
}
TEXT = "12+7=19\nhello é"

if __name__ == "__main__":
    names = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode(TEXT).ids
    if len(ids) != len(TEXT.encode()) or tokenizer.decode(ids) != TEXT:
        sys.exit("a text does not come back from the tokenizer")
    for folder in map(Path, sys.argv[1:]):
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
