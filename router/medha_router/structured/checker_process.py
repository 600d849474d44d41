"""Grammars checked in a process of their own, off the event loop.

    check ──> kept? ──no──> fair queue by tenant ──> process, a grammar at a time ──> kept

The process limits the CPU time and memory of a check. What it answers is kept, a refusal too, so
that clients which repeat a schema wait once.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import collections
import hashlib
import sys
import time

import msgspec

from medha.errors import EngineError, Refusal, RequestError
from medha_router.structured.check_messages import LENGTH, Check, Checked
from medha_router.structured.sources import GrammarSource
from medha_router.tokenization.fair_queue import BYTES_PER_S, FairQueue, Shares, due_s

COMPILE_S = 0.2
"""CPU time of compiling a grammar: a rank spends as much, while a batch waits."""
WAIT_S = 30.0
ANSWER_S = 60.0
"""For the process to load a tokenizer and check a grammar, on a machine that is busy."""
MAX_TOKENIZERS = 8
KEPT_CHARS = 16 << 20
ENTRY_CHARS = 256

Name = tuple[str, bytes]


class GrammarChecker:
    """Checks grammars for one event loop; the process starts with the first.

    `compile_s` limits the CPU time of compiling a grammar, `wait_s` the time until it is checked.
    """

    def __init__(self, *, compile_s: float = COMPILE_S, wait_s: float = WAIT_S) -> None:
        self._compile_s, self._wait_s = compile_s, wait_s
        self._shares = Shares()
        self._queue: FairQueue[_Waiting] = FairQueue(self._shares)
        self._running: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        # Tokenizers that the process holds, and what it answered: the last used is the last.
        self._loaded: dict[str, None] = {}
        self._kept: collections.OrderedDict[Name, Checked] = collections.OrderedDict()
        self._kept_chars = 0

    async def check(self, key: str, tokenizer: bytes, source: GrammarSource, tenant: str) -> str:
        """Return the grammar in the form that engines take, for the tokenizer named `key`.

        Raises RequestError naming the field if the grammar is invalid or exceeds a limit, and
        Refusal if others' grammars take too long.
        """
        waiting = _Waiting(key, tokenizer, source, tenant.encode())
        checked = self._find(waiting.name)
        if checked is None:
            self._queue.put(waiting)
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._run())
            try:
                async with asyncio.timeout(self._wait_s):
                    checked = await waiting.checked
            except TimeoutError:
                raise Refusal(
                    "overloaded", "too many grammars wait to be checked: retry later"
                ) from None
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
        """End the process; grammars that wait are not checked."""
        for waiting in self._queue.drain():
            waiting.checked.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._end()

    async def _run(self) -> None:
        """Check grammars until none waits; clients may leave meanwhile."""
        while (waiting := self._queue.take()) is not None:
            self._shares.start(waiting.tenant)
            began_s = time.monotonic()
            try:
                checked = self._find(waiting.name) or await self._ask(waiting)
            except EngineError as error:
                if not waiting.abandoned:
                    waiting.checked.set_exception(error)
                continue
            finally:
                spent_s = time.monotonic() - began_s
                self._shares.charge(waiting.tenant, int(spent_s * BYTES_PER_S))
            self._keep(waiting.name, checked)
            if not waiting.abandoned:
                waiting.checked.set_result(checked)

    async def _ask(self, waiting: _Waiting) -> Checked:
        key, source = waiting.key, waiting.source
        new = key not in self._loaded
        self._loaded.pop(key, None)
        forget = next(iter(self._loaded)) if len(self._loaded) >= MAX_TOKENIZERS else ""
        self._loaded.pop(forget, None)
        tokenizer = waiting.tokenizer if new else b""
        job = Check(key, tokenizer, source.kind, source.text, source.calls, self._compile_s, forget)
        checked: Checked | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                checked = await self._exchange(msgspec.msgpack.encode(job))
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            raise EngineError(
                f"the process that checks grammars failed ({type(error).__name__}): retry"
            ) from error
        finally:
            if checked is None:
                await self._end()
        if checked.loaded:
            self._loaded[key] = None
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

    def _find(self, name: Name) -> Checked | None:
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)

    def _keep(self, name: Name, checked: Checked) -> None:
        if name in self._kept or checked.timed:
            return
        self._kept[name] = checked
        self._kept_chars += _chars(checked)
        while self._kept_chars > KEPT_CHARS:
            _, oldest = self._kept.popitem(last=False)
            self._kept_chars -= _chars(oldest)


class _Waiting:
    """A grammar that waits to be checked."""

    def __init__(self, key: str, tokenizer: bytes, source: GrammarSource, tenant: bytes) -> None:
        self.key, self.tokenizer, self.source, self.tenant = key, tokenizer, source, tenant
        text = f"{source.kind}:{source.calls}:{source.text}"
        self.name = key, hashlib.blake2b(text.encode()).digest()
        self.due_s = due_s(time.monotonic(), len(source.text))
        self.checked: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()

    @property
    def abandoned(self) -> bool:
        return self.checked.done()


def _chars(checked: Checked) -> int:
    return ENTRY_CHARS + len(checked.grammar) + len(checked.error)
