"""A process that makes tokens: `python -m medha_router.tokenizer_process FD`.

Reads jobs from the socket that it inherits as FD and answers each in turn: renders the chat
template, tokenises, and names the pages. It holds no secret and no connection; whoever started it
may kill it at any time. It ends when the socket closes.
"""

from __future__ import annotations

import signal
import socket
import sys

import msgspec
import numpy as np
from tokenizers import Tokenizer

from medha import prefix
from medha.errors import CheckpointError, RequestError
from medha_router import encoding, prompts
from medha_router.detokenizer import Vocabulary, text_of
from medha_router.template import ChatTemplate


class Encoder:
    """One checkpoint's tokenizer and template; raises CheckpointError when they do not load."""

    def __init__(self, files: encoding.TokenizerFiles) -> None:
        self._vocabulary = Vocabulary(files.tokenizer)
        self._tokenizer: Tokenizer = self._vocabulary.tokenizer
        self._template = ChatTemplate(files.template, files.config)

    def encode(self, job: encoding.Encode) -> encoding.Encoded:
        """Tokens of the job's prompts; raises RequestError when the client can mend it."""
        if job.chat:
            messages = prompts.read_messages(job.raw)
            text = self._template.render(messages, generation_prompt=job.generation_prompt)
            ids: list[str | list[int]] = [self._ids(text, special=False)]
            texts: list[str | list[int]] = [text]
        else:
            texts = prompts.read_prompts(job.raw)
            ids = [
                self._ids(given, special=job.add_special_tokens)
                if isinstance(given, str)
                else self._checked(given)
                for given in texts
            ]
        return encoding.Encoded(
            tuple(
                self._prompt(tokens, given, job) for tokens, given in zip(ids, texts, strict=True)
            )
        )

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def _checked(self, tokens: list[int]) -> list[int]:
        if tokens and max(tokens) >= self._vocabulary.size:
            raise RequestError(
                f"prompt holds the token id {max(tokens)}: this model's vocabulary has "
                f"{self._vocabulary.size} tokens",
                code="invalid_value", param="prompt",
            )  # fmt: skip
        return tokens

    def _prompt(
        self, ids: str | list[int], given: str | list[int], job: encoding.Encode
    ) -> encoding.Prompt:
        tokens = np.asarray(ids, dtype="<i4")
        hashes = b"".join(prefix.chain(tokens, job.page_tokens, job.salt))
        text = None
        if job.texts:
            text = given if isinstance(given, str) else text_of(self._vocabulary, given)
        return encoding.Prompt(tokens.tobytes(), hashes, text)


def answer(encoders: dict[str, Encoder], job: encoding.Job) -> encoding.Outcome:
    """Do one job; what the client or the checkpoint can mend comes back as an outcome."""
    try:
        if isinstance(job, encoding.LoadFiles):
            encoders[job.files.key] = Encoder(job.files)
            return encoding.Loaded()
        return encoders[job.key].encode(job)
    except CheckpointError as error:
        return encoding.Loaded(error=str(error))
    except RequestError as error:
        return encoding.Declined(str(error), error.status, error.code, error.param)


def serve(link: socket.socket) -> None:
    """Answer jobs until the link closes."""
    decoder = msgspec.msgpack.Decoder(encoding.Job)
    encoders: dict[str, Encoder] = {}
    while True:
        try:
            frame = encoding.receive_frame(link)
        except ConnectionResetError:
            return
        outcome = answer(encoders, decoder.decode(frame))
        encoding.send_frame(link, msgspec.msgpack.encode(outcome))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which closes the link
    with socket.socket(fileno=int(sys.argv[1])) as link:
        serve(link)


if __name__ == "__main__":
    main()
