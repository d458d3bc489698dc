"""Trains the tokenizer: byte-level BPE whose digits are single tokens, and writes its files.

python model/training/vocabulary.py --text train.txt --out FOLDER
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, EOS, USER, ASSISTANT)
SAMPLE_BYTES = 48_000_000

# An answer starts with a blank, as the value did in the text: the same tokens, so it can be copied.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|> ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no {token}"
    return found


def _sample(text: str) -> Iterator[str]:
    """Yield documents spread evenly over the text, about SAMPLE_BYTES in all."""
    documents = text.split("\0")
    yield from documents[:: max(1, len(text) // SAMPLE_BYTES)]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Return a tokenizer that reproduces any UTF-8 text and puts BOS before it."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so that a code in the text can be copied figure by figure.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(text), trainer)
    bos = id_of(tokenizer, BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer of the embedded model.")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=16384)
    args = parser.parse_args()
    tokenizer = train_tokenizer(args.text.read_text(), args.vocab_size)
    write_tokenizer(tokenizer, args.out, max_tokens=args.max_tokens)


if __name__ == "__main__":
    main()
