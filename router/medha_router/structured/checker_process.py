"""Grammars checked in a process of their own, off the event loop, within limits of time.

If a check exceeds its time or memory, the process ends and the next check starts another. Checked
grammars are kept, so that clients which repeat a schema wait once.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import collections
import hashlib
import sys

import msgspec

from medha.errors import EngineError, RequestError
from medha_router.structured.check_messages import LENGTH, Check, Checked
from medha_router.structured.sources import GrammarSource

CHECK_S = 5.0
LOAD_S = 60.0
MAX_TOKENIZERS = 4
KEPT_CHARS = 16 << 20


class GrammarChecker:
    """Checks grammars for one event loop, one at a time; the process starts with the first.

    `check_s` limits a check.
    """

    def __init__(self, *, check_s: float = CHECK_S) -> None:
        self._check_s = check_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._loaded: set[str] = set()
        self._kept: collections.OrderedDict[tuple[str, bytes], Checked] = collections.OrderedDict()
        self._kept_chars = 0

    async def check(self, key: str, tokenizer: bytes, source: GrammarSource) -> str:
        """Return the grammar in the form that engines take, for the tokenizer named `key`.

        Raises RequestError naming the field if the grammar is invalid or exceeds a limit.
        """
        name = key, hashlib.blake2b(f"{source.kind}:{source.text}".encode()).digest()
        checked = self._kept.get(name)
        if checked is None:
            async with self._turn:
                checked = await self._ask(key, tokenizer, source)
            self._keep(name, checked)
        if not checked.loaded:
            raise RequestError(
                f"{source.param}: this model's tokenizer is not fit for it ({checked.error}); "
                "leave it out",
                code="unsupported_parameter",
                param=source.param,
            )
        if checked.error:
            raise RequestError(
                f"{source.param} is no {source.kind} that an output can follow: {checked.error}",
                code="invalid_value",
                param=source.param,
            )
        return checked.grammar

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def _ask(self, key: str, tokenizer: bytes, source: GrammarSource) -> Checked:
        new = key not in self._loaded
        if new and len(self._loaded) >= MAX_TOKENIZERS:
            await self._end()
        limit_s = self._check_s + (LOAD_S if new else 0.0)
        finished = False
        try:
            async with asyncio.timeout(limit_s):
                job = Check(key, tokenizer if new else b"", source.kind, source.text)
                checked = await self._exchange(msgspec.msgpack.encode(job))
            finished = True
        except TimeoutError:
            raise _too_complex(source, f"takes more than {self._check_s:g} s to check") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _too_complex(source, "needs more memory than a check may take") from None
        except OSError as error:
            raise EngineError(f"grammars cannot be checked: {error.strerror}") from None
        finally:
            if not finished:
                await self._end()
        if checked.loaded:
            self._loaded.add(key)
        return checked

    async def _exchange(self, payload: bytes) -> Checked:
        process = self._process
        if process is None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "medha_router.structured.checker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        sink, source = process.stdin, process.stdout
        if sink is None or source is None:
            raise EngineError("the process that checks grammars has no pipes")
        sink.write(LENGTH.pack(len(payload)) + payload)
        await sink.drain()
        (length,) = LENGTH.unpack(await source.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await source.readexactly(length), type=Checked)

    async def _end(self) -> None:
        process, self._process = self._process, None
        self._loaded.clear()
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _keep(self, name: tuple[str, bytes], checked: Checked) -> None:
        if name in self._kept:
            return
        self._kept[name] = checked
        self._kept_chars += len(checked.grammar) + len(checked.error)
        while self._kept_chars > KEPT_CHARS:
            _, oldest = self._kept.popitem(last=False)
            self._kept_chars -= len(oldest.grammar) + len(oldest.error)


def _too_complex(source: GrammarSource, why: str) -> RequestError:
    return RequestError(
        f"{source.param} is too complex: it {why}; simplify it",
        code="invalid_value",
        param=source.param,
    )
