"""The checkpoint's tokenizer and chat template; the only place below the server that imports transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError, RequestError


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, folder: Path, vocab: int):
        """Loads the tokenizer files of a checkpoint folder.

        Raises:
            ConfigError: there are none, they are unreadable, or they know more tokens than the model.
        """
        if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
            raise ConfigError(f"{folder} has no tokenizer.json; copy the tokenizer files of the original checkpoint")
        # Imported here: transformers takes seconds to import, and planning or quantising does not need it.
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: the tokenizer cannot be read: {error}") from error
        if len(self._tokenizer) > vocab:
            raise ConfigError(f"{folder}: the tokenizer knows {len(self._tokenizer)} tokens, the model {vocab}")
        self.eos_ids = _eos_ids(folder, self._tokenizer.eos_token_id)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds unless told otherwise."""
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def encode_long(self, text: str) -> list[int]:
        """Token ids of a long text without special tokens; longer than the model's context is no mistake here."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, ready: bool = True) -> list[int]:
        """Token ids of a conversation through the checkpoint's chat template.

        Args:
            messages: role and content of each.
            ready: whether the text ends where an answer begins; else where the last message ends.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise RequestError("this checkpoint has no chat template; use a plain prompt (without --chat)")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ready)
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """End tokens: of generation_config.json, else of config.json, and the tokenizer's own."""
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            value = read_json(folder / name).get("eos_token_id")
            if value is not None:
                found.update(value if isinstance(value, list) else [value])
                break
    return frozenset(found)
