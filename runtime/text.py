"""Text to token ids and back: a bundle's tokenizer, incremental decoding, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import BundleError, RequestError
from dflash_ort.models.manifest import CHAT_TEMPLATE, TOKENIZER, Manifest
from dflash_ort.models.spec import ModelSpec
from dflash_ort.runtime.chat_template import ChatTemplate, Message

Prompt = str | Sequence[Message] | Sequence[int]
"""Text, chat messages, or token ids."""


class Detokenizer:
    """Decodes a growing answer piece by piece, never half a character.

    Bytes of an unfinished character are held back until it is complete, or shown as U+FFFD at the end.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = ""
        self._start = self._read = 0
        # ids[start:read] decode to ``before``, which is shown: context that a decoder may join to what follows.

    def feed(self, token: int) -> str:
        """Text that this token completes, often empty."""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        self._before = self._decode(self._start)
        return text

    def flush(self) -> str:
        """What an answer that ends in the middle of a character still has to show."""
        return self._new_text()

    def _new_text(self) -> str:
        text = self._decode(self._start)
        if text.startswith(self._before):
            return text[len(self._before) :]
        # A broken character changed how the decoder reads the byte tokens before it, which are shown already.
        return self._decode(self._read)

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)
        return text


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        from tokenizers import Tokenizer

        path = directory / TOKENIZER
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise BundleError(f"'{path}' cannot be read ({_one_line(error)}); export the bundle again") from error
        template = directory / CHAT_TEMPLATE
        self.template: ChatTemplate | None = None
        entry = manifest.files.get(CHAT_TEMPLATE)
        self.template_sha256 = entry.sha256 if entry else None
        if CHAT_TEMPLATE in manifest.files:
            try:
                source = template.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BundleError(f"'{template}' cannot be read ({error}); export the bundle again") from error
            self.template = ChatTemplate(source, self._special_tokens(manifest.target))

    def _special_tokens(self, spec: ModelSpec) -> dict[str, str]:
        """What templates call bos_token and eos_token."""
        ids = {"bos_token": spec.bos_token_id, "eos_token": next(iter(spec.eos_token_ids), None)}
        return {name: self.tokenizer.id_to_token(token) or "" for name, token in ids.items() if token is not None}

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    def encode(self, prompt: Prompt, *, raw: bool, template_arguments: Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt: text (one user message, or as it stands when ``raw``), chat messages, or ids
        themselves.
        """
        if isinstance(prompt, bytes):
            raise RequestError("the prompt is bytes; expected text, messages or token ids, so decode it first")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise RequestError("the prompt is empty; expected some text")
            if raw or self.template is None:
                return self._ids(prompt, special=True)
            prompt = [{"role": "user", "content": prompt}]
        items: list[Any] = list(prompt)
        if not items:
            raise RequestError("the prompt is empty; expected text, messages or token ids")
        if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in items):
            return [int(item) for item in items]
        return self._ids(self._render(items, template_arguments), special=False)

    def _render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        if self.template is None:
            raise RequestError("this bundle has no chat template, so it cannot take messages; pass text instead")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f"a message is {str(message)[:60]!r}; expected an object with 'role' and 'content'")
        return self.template.render(messages, arguments)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        """``special`` adds what the tokenizer puts around a text (a begin token); templates have it already."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError("the prompt holds lone surrogates, which are not text; pass valid Unicode") from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        if not ids:
            raise RequestError("the prompt has no tokens; expected some text")
        return ids


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
