"""The tokenizer of a GGUF file, rebuilt for the `tokenizers` library.

Two families: byte-level BPE ("gpt2"), whose merges are listed, and SentencePiece BPE ("llama"),
whose merges follow from the pieces' scores. What text is split on before merging is named by
`tokenizer.ggml.pre`; the patterns are those of the models' own tokenizers, as llama.cpp maps them.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from chatkv.errors import ModelError
from chatkv.model.gguf_file import GGUFFile
from chatkv.model.one_line import one_line

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASELESS}|\p{{N}}{{1,3}}|{_SPACES}"
_QWEN2 = rf"{_CASELESS}|\p{{N}}|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Applied one after another, each splitting what the ones before it left whole.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# These look a whole word up before they try to merge it.
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}
# The original tokenizer composes characters; llama.cpp leaves that out.
_COMPOSES = {"qwen2"}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Raises ModelError for a family or a pre-tokenizer that is not known."""
    kind = file.require("tokenizer.ggml.model")
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens, types)
    else:
        raise ModelError(
            f"{file.path}: tokenizer {kind!r} is not supported (supported: gpt2, llama)"
        )
    _add_tokens(tokenizer, tokens, types)
    return tokenizer


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _PATTERNS:
        raise ModelError(
            f"{file.path}: pre-tokenizer {pre!r} is not known (known: {', '.join(_PATTERNS)})"
        )
    # A merge is written "left right"; a lone space can be neither half, but may begin the left one.
    merges = []
    for merge in file.require("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    tokenizer = _tokenizer(
        file,
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=pre in _WHOLE_WORDS_FIRST,
    )
    if pre in _COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in _PATTERNS[pre]]
    add_prefix_space = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    scores: list[float] = file.require("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = _tokenizer(
        file,
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges_by_score(tokens, types, scores),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=tokens[unknown],
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        # A step of the normaliser and not a Metaspace: text that begins with a space gets two, as
        # SentencePiece and llama.cpp do it.
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored third first.

    Only normal pieces take part: with the others, `</` and `s>` typed by a user would merge into
    the control token `</s>`.
    """
    score = {t: s for t, kind, s in zip(tokens, types, scores, strict=True) if kind == NORMAL}
    merges = [
        (token[:cut], token[cut:])
        for token in score
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    return sorted(merges, key=lambda pair: -score[pair[0] + pair[1]])


def _tokenizer(file: GGUFFile, **parts: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**parts))
    except Exception as error:  # the library raises plain Exception, for instance for a bad merge
        raise ModelError(f"{file.path}: its tokenizer is damaged: {one_line(error)}") from error


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens become special; user-defined ones are matched whole in any text."""
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)
