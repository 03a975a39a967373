"""Tokenizers: bytes, which need no file, or a local Hugging Face tokenizer directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

BYTE = "byte"


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

    eos_id: int
    pad_id: int

    @property
    def vocab_size(self) -> int:
        """Size an embedding needs; every id is below it."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same text could give other ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; no special token is added."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; special tokens are left out."""

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text as an unsigned integer array."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes files from which ``transformers.AutoTokenizer`` loads a tokenizer with the same ids."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then the special ids ``bos``, ``eos`` and ``pad``.

    ``vocab_size`` is 320, not 259: low precision GEMMs want multiples of 32 or 64. Ids 259 to 319 never
    occur.
    """

    bos_id, eos_id, pad_id = 256, 257, 258
    bos_token, eos_token, pad_token = "<|bos|>", "<|eos|>", "<|pad|>"
    vocab_size = 320
    fingerprint = "byte-v1"

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        values = [int(i) for i in ids]
        for value in values:
            if not 0 <= value < self.vocab_size:
                raise ValueError(f"token id {value} is outside the byte vocabulary, 0..{self.vocab_size - 1}")
        return bytes(v for v in values if v < 256).decode(errors="replace")

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(errors="replace"), dtype=np.uint8) for text in texts]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes a byte-level BPE without merges, whose ids equal ours.

        The one difference: a Hugging Face tokenizer reads ``<|eos|>`` inside a text as the special token
        (unless told ``split_special_tokens=True``), ours as seven bytes.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocab = {character: byte for byte, character in enumerate(_byte_characters())}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special.values()])
        PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="right", **special
        ).save_pretrained(os.fspath(directory))


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in the byte-level BPE convention.

    A byte whose Latin-1 character is visible stands for itself; the others are, in order, U+0100 and
    following.
    """
    characters, spare = [], 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters


class HuggingFaceTokenizer:
    """A tokenizer directory on this machine, read through ``transformers.AutoTokenizer``."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(
                'a tokenizer directory needs transformers: pip install "lumen-train[train]"; '
                'tokenizer "byte" needs nothing'
            ) from error
        path = Path(directory).expanduser()
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers raises many kinds for an unusable directory
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"tokenizer {str(directory)!r}: no Hugging Face tokenizer can be loaded from that directory "
                f"(it needs tokenizer.json, or a vocabulary and tokenizer_config.json): {reason}"
            ) from error
        if self.inner.eos_token_id is None:
            raise ValueError(
                f"tokenizer {str(directory)!r} names no eos_token, which separates documents; "
                "add it to tokenizer_config.json"
            )
        self.eos_id = int(self.inner.eos_token_id)
        pad = self.inner.pad_token_id
        self.pad_id = self.eos_id if pad is None else int(pad)
        self.fingerprint = _directory_fingerprint(path)

    @property
    def vocab_size(self) -> int:
        return max(len(self.inner), self.eos_id + 1, self.pad_id + 1)

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        if not texts:
            return []
        rows = self.inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(row, dtype=np.uint32) for row in rows["input_ids"]]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        self.inner.save_pretrained(os.fspath(directory))


def _directory_fingerprint(path: Path) -> str:
    """Digest of the tokenizer's own files; weights lying beside them are left out."""
    digest = hashlib.sha256()
    names = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
    weights = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
    for file in sorted({f for pattern in names for f in path.glob(pattern) if f.name not in weights}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"hf-{digest.hexdigest()[:32]}"


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """``"byte"`` or a local Hugging Face tokenizer directory; nothing is downloaded."""
    if name == BYTE:
        return ByteTokenizer()
    if not os.path.isdir(os.path.expanduser(os.fspath(name))):
        raise ValueError(f'tokenizer {os.fspath(name)!r} is neither "byte" nor an existing directory')
    return HuggingFaceTokenizer(name)
