"""A byte tokenizer that needs no download: one token per byte, then a few special ones."""

from __future__ import annotations

from pathlib import Path

EOS, MASK, PAD = 256, 257, 258
LEAST_VOCAB = PAD + 1
TINY_VOCAB = 264


def save_tokenizer(
    folder: Path,
    vocab_size: int = TINY_VOCAB,
    *,
    eos: str = "<eos>",
    chat: tuple[str, ...] = (),
) -> None:
    """Write tokenizer files with ids below `vocab_size`: bytes, eos, <mask>, <pad>, spares.

    chat: special tokens of a chat format, which take the first spare ids.

    Raises:
        ValueError: a vocabulary too small for them.
    """
    least = LEAST_VOCAB + len(chat)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size: expected at least {least} for a byte tokenizer, found {vocab_size}"
        )
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {eos: EOS, "<mask>": MASK, "<pad>": PAD}
    vocab |= {name: LEAST_VOCAB + i for i, name in enumerate(chat)}
    vocab |= {f"<extra_{i}>": i for i in range(least, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (eos, *chat)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>", mask_token="<mask>"
    )
    fast.save_pretrained(folder)
