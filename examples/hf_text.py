"""What ``run_glue.py`` and ``run_clm.py`` share: a tokenizer for text at hand."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}


def word_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """The most frequent words of these texts."""
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=[*SPECIAL.values()], show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)
