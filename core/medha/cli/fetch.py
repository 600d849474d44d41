"""`medha fetch`: download a checkpoint from an http(s) address into a folder, file by file.

    <uri>/config.json, tokenizer.json                         required
    <uri>/tokenizer_config.json, generation_config.json, …    optional
    <uri>/model.safetensors.index.json and its shards, else model.safetensors

or of an adapter: adapter_config.json and adapter_model.safetensors.

A file gets its name once it is complete, and JSON or safetensors as the name says. A broken
transfer resumes where it stopped, with back-off; a complete file is not fetched again.
"""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Callable

import httpx
import msgspec

from medha.checkpoints.checkpoint_files import tensor_headers
from medha.checkpoints.json_fields import read_json
from medha.errors import CheckpointError

NEEDED = ("config.json", "tokenizer.json")
WELCOME = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
TRIES, FIRST_PAUSE_S = 6, 0.5
TIMEOUT = httpx.Timeout(30.0)


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def fetch(
    uri: str,
    folder: pathlib.Path,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
    *,
    adapter: bool = False,
) -> None:
    """Download the checkpoint, or the `adapter`, at `uri` into `folder`; raises CheckpointError.

    A query of `uri`, such as a token, is sent with the address of each file.
    """
    address = _address(uri)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"FOLDER is {folder}: must be a folder that can be written ({error.strerror}); name "
            "another"
        ) from None
    with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client:
        source = _Source(client, address, folder, say, pause)
        for name in ADAPTER if adapter else NEEDED:
            source.bring(name)
        if adapter:
            return
        for name in WELCOME:
            source.bring(name, optional=True)
        for name in _shards(folder / INDEX) if source.bring(INDEX, optional=True) else (WHOLE,):
            source.bring(name)


def _address(uri: str) -> httpx.URL:
    try:
        address = httpx.URL(uri)
    except httpx.InvalidURL:
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host:
        raise CheckpointError(
            f"URI is {uri}: must be an http or https address, such as https://example.com/llama; "
            "for a folder of this machine set spec.model.source.hostPath"
        )
    return address


def _shards(index: pathlib.Path) -> tuple[str, ...]:
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{index.name} is not an index of weights ({error})") from None
    for name in names:
        if not SHARD.fullmatch(name):
            raise CheckpointError(
                f"{index.name} names {name!r}: must be a *.safetensors in the same folder"
            )
    return tuple(sorted(names))


class _Source:
    """Source address and target folder of a download."""

    def __init__(
        self,
        client: httpx.Client,
        address: httpx.URL,
        folder: pathlib.Path,
        say: Callable[[str], None],
        pause: Callable[[float], None],
    ) -> None:
        self._client, self._address, self._folder = client, address, folder
        self._say, self._pause = say, pause

    def bring(self, name: str, optional: bool = False) -> bool:
        """Download a file; returns False for a missing optional file, raises for a required one."""
        whole, part = self._folder / name, self._folder / f"{name}.part"
        if whole.exists():
            self._say(f"{name}: kept; remove it to fetch it again")
            return True
        why = ""
        for attempt in range(TRIES):
            try:
                status = self._transfer(name, part)
            except (httpx.HTTPError, OSError) as error:
                why = str(error) or type(error).__name__
            else:
                if status < 400:
                    self._check(name, part)
                    part.rename(whole)
                    self._say(f"{name}: {whole.stat().st_size:,} bytes")
                    return True
                if optional and status in (403, 404):
                    return False
                why = f"HTTP {status}"
                if status < 500 and status != 429:
                    break
            if attempt + 1 < TRIES:
                self._pause(FIRST_PAUSE_S * 2.0**attempt)
        raise CheckpointError(
            f"{self._shown(name)} cannot be fetched ({why}): correct the address (source.uri), or "
            "make the files available there"
        )

    def _check(self, name: str, part: pathlib.Path) -> None:
        """Raise CheckpointError for a complete file of another kind, such as a web page, or one
        that was cut before; remove it."""
        try:
            if name.endswith(".json"):
                read_json(part)
            elif name.endswith(".safetensors"):
                tensor_headers(part)
        except CheckpointError as error:
            part.unlink()
            fault = re.split("[:;] fetch", str(error).removeprefix(f"{part} "))[0]
            raise CheckpointError(
                f"{self._shown(name)} {fault}: correct the address (source.uri), or the file there"
            ) from None

    def _of(self, name: str) -> httpx.URL:
        return self._address.copy_with(path=f"{self._address.path.rstrip('/')}/{name}")

    def _shown(self, name: str) -> str:
        """Return the address of a file without the secrets that it may hold."""
        return str(self._of(name).copy_with(query=None, userinfo=b""))

    def _transfer(self, name: str, part: pathlib.Path) -> int:
        """Transfer the rest of a file once; returns the HTTP status."""
        done = part.stat().st_size if part.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
        with self._client.stream("GET", self._of(name), headers=headers) as answer:
            if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.unlink()
                raise httpx.ReadError("the part fetched before does not match")
            if answer.status_code >= 400:
                return answer.status_code
            goes_on = answer.status_code == httpx.codes.PARTIAL_CONTENT
            with part.open("ab" if goes_on else "wb") as file:
                for piece in answer.iter_raw():
                    file.write(piece)
        return answer.status_code
