"""Makes a tokenizer from ``tiktoken.model``, which checkpoints of Kimi have in place of
tokenizer.json.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dist_aclgraph.errors import ModelError
from dist_aclgraph.shapes.json_files import read_text
from dist_aclgraph.text.token_bytes import byte_of_char

NUM_RESERVED = 256  # number of ids for added tokens, after the ids of the vocabulary
# Each match of this pattern is divided into tokens separately. The pattern is ``pat_str`` in
# tokenization_kimi.py of moonshotai/Kimi-K2-Instruct. The regular expressions of the package
# ``tokenizers`` (Oniguruma) give the same matches.
_UPPER, _LOWER = (
    rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tiktoken(path: Path, added: Mapping[int, AddedToken]) -> Tokenizer:
    """Return the tokenizer of a file in which each line has a token's bytes in base64
    and its rank.

    A token's rank is its id. Two neighbours are merged if they form another token. The merge that
    forms the token with the lowest rank comes first.

    Args:
        added: added tokens by id. The vocabulary's ids are followed by ``NUM_RESERVED`` ids; each
            of these ids without an added token gets a reserved token.

    Raises:
        ModelError: the file cannot be read.
    """
    ranks = _read_ranks(path)
    char_of = {byte: char for char, byte in byte_of_char().items()}
    texts = {token: "".join(map(char_of.__getitem__, token)) for token in ranks}
    merges = [
        (texts[token[:i]], texts[token[i:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for i in range(1, len(token))
        if token[:i] in texts and token[i:] in texts
    ]
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ids = range(len(ranks), len(ranks) + NUM_RESERVED)
    reserved = (AddedToken(f"<|reserved_token_{i}|>", special=True, normalized=False) for i in ids)
    tokenizer.add_tokens([added.get(i, token) for i, token in zip(ids, reserved, strict=True)])
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ModelError(
                f"{path}: line {number} is {line!r:.80}; it must be a token in base64 and a number"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(
            f"{path}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}"
        )
    return ranks
