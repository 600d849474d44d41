"""A small but real tokenizer: byte-level BPE trained on generated text, with a chat template.

Special tokens and template follow Llama 3. Ids beyond the text's merges are reserved tokens, so the
vocabulary has exactly the requested size. The same seed and size give the same files.
"""

from __future__ import annotations

import json
import pathlib
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
BEGIN, END, TURN_END = 0, 1, 4
SMALLEST_VOCAB = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}"
    "<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

WORDS = pathlib.Path(__file__).with_name("english_words.txt")


def write_tokenizer(folder: pathlib.Path, vocab: int, max_tokens: int, seed: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `vocab` ids (at least SMALLEST_VOCAB)."""
    train(vocab, seed).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BEGIN],
        "eos_token": SPECIALS[TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(vocab: int, seed: int) -> Tokenizer:
    """Train a tokenizer of exactly `vocab` ids; the first are the special tokens, in order."""
    if vocab < SMALLEST_VOCAB:
        raise ValueError(f"vocab is {vocab}: must be at least {SMALLEST_VOCAB} (bytes, specials)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_text(seed, words=20 * vocab), trainer)
    missing = vocab - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(missing)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[BEGIN]} $A", special_tokens=[(SPECIALS[BEGIN], BEGIN)]
    )
    return tokenizer


def sample_text(seed: int, words: int) -> list[str]:
    """Return lines of English and made-up words, `words` in all."""
    dice, known = random.Random(seed), WORDS.read_text().split()
    lines, line = [], []
    for _ in range(words):
        line.append(dice.choice(known) if dice.random() < 0.6 else _made_up(dice))
        if dice.random() < 0.08:
            lines.append(" ".join(line).capitalize() + dice.choice((".", ".", "?", ",")))
            line = []
    return [*lines, " ".join(line)]


def _made_up(dice: random.Random) -> str:
    vowels = ("a", "e", "i", "o", "u", "ar", "en")
    syllables = [dice.choice("bcdfghklmnprstvw") + dice.choice(vowels) for _ in range(3)]
    return "".join(syllables[: dice.randint(2, 3)])
