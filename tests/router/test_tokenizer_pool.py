"""Tokenizer processes: lanes, time limits, chat templates and their sandbox."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.errors import CheckpointError, EngineError, RequestError
from medha.fleet.prefix_index import chain
from medha.messages import from_bytes
from medha_router.protocol import INTERNAL_ERROR
from medha_router.tokenization.chat_template import ChatTemplate
from medha_router.tokenization.detokenizer import Vocabulary, text_of
from medha_router.tokenization.encoder import TokenizerProcess
from medha_router.tokenization.lane import BATCH_S, JOB_S
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.wire import (
    Declined,
    Encode,
    Encoded,
    FrameReader,
    LoadFiles,
    Prompt,
    TokenizerFiles,
    send_frame,
)

SALT = b"salt"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
# Loading a template renders a prompt with tools.
SPIN = b"{% for a in range(9999) if not tools %}{% for b in range(9999) %}" + (
    b"{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}"
)


class Segments:
    """A link from which bytes arrive in segments."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        ends = [*sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
        self._segments = [data[start:end] for start, end in itertools.pairwise([0, *ends])]

    def recv(self, size: int) -> bytes:
        segment = self._segments.pop(0) if self._segments else b""
        if rest := segment[size:]:
            self._segments.insert(0, rest)
        return segment[:size]

    def recv_into(self, buffer: memoryview) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def sendall(self, data: bytes) -> None:
        self._segments.append(bytes(data))

    @property
    def sent(self) -> bytes:
        return b"".join(self._segments)


Frames = st.lists(st.tuples(st.binary(max_size=40), st.sampled_from([0, 1, 900, 40_000])))


@given(Frames, st.lists(st.integers(0, 100_000)))
def test_frames_arrive_as_they_were_sent_however_they_are_cut(
    frames: list[tuple[bytes, int]], cuts: list[int]
) -> None:
    out = Segments(b"", [])
    for message, size in frames:
        send_frame(out, message, [b"x" * (size // 2), b"y" * (size - size // 2)])  # type: ignore[arg-type]
    segments = Segments(out.sent, cuts)
    reader = FrameReader(segments, bytearray, bytearray)  # type: ignore[arg-type]
    for message, size in frames:
        payload = b"x" * (size // 2) + b"y" * (size - size // 2)
        assert [*map(bytes, reader.receive())] == [message, payload]
    with pytest.raises(ConnectionResetError):
        reader.receive()


def job(raw: object, *, chat: bool = False, key: str = "good", **changes: object) -> Encode:
    encode_job = Encode(key=key, chat=chat, raw=json.dumps(raw).encode(), page_tokens=4, salt=SALT)
    return msgspec.structs.replace(encode_job, **changes)


@pytest.fixture(scope="module")
def pool(byte_level_json: bytes) -> Iterator[TokenizerPool]:
    tokenizer_pool = TokenizerPool(job_s=5.0)
    tokenizer_pool.add(
        TokenizerFiles(key="good", tokenizer=byte_level_json, template=b"{{ messages[0].content }}")
    )
    tokenizer_pool.add(TokenizerFiles(key="spin", tokenizer=byte_level_json, template=SPIN))
    tokenizer_pool.add(TokenizerFiles(key="broken", tokenizer=b"{}"))
    yield tokenizer_pool
    tokenizer_pool.close()


def test_pages_are_named_by_the_chain_of_the_whole_prompt(pool: TokenizerPool) -> None:
    (prompt,) = asyncio.run(pool.encode(job("say ten chars")))
    tokens = from_bytes(prompt.tokens)
    assert prompt.length == len("say ten chars")
    assert prompt.hashes == b"".join(chain(tokens, 4, SALT))
    assert len(prompt.hashes) == 16 * (prompt.length // 4)


def test_token_ids_pass_through_and_can_be_echoed_as_text(pool: TokenizerPool) -> None:
    (encoded,) = asyncio.run(pool.encode(job("héé")))
    ids = from_bytes(encoded.tokens).tolist()
    (prompt,) = asyncio.run(pool.encode(job(ids, texts=True)))
    assert prompt.tokens == encoded.tokens and prompt.text == "héé"


def test_an_error_of_the_client_names_the_field(pool: TokenizerPool) -> None:
    with pytest.raises(RequestError) as caught:
        asyncio.run(pool.encode(job([{"role": "user", "content": 5}], chat=True)))
    assert caught.value.param == "messages[0].content"


def test_a_wrong_value_whose_key_stands_twice_is_the_clients_error(pool: TokenizerPool) -> None:
    raw = b'[{"role":"user","content":[{"type":5}],"content":"xy"}]'
    with pytest.raises(RequestError, match="expected `str`, got `int`") as caught:
        asyncio.run(pool.encode(msgspec.structs.replace(job([], chat=True), raw=raw)))
    assert caught.value.status == 400


def test_a_fault_of_a_tokenizer_is_the_answer_of_one_job(
    byte_level_json: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    process = TokenizerProcess()
    process.answer(LoadFiles(TokenizerFiles(key="good", tokenizer=byte_level_json)), bytearray())
    answers = [
        process.answer(job("a", key=key), bytearray(b'"a"'))[0] for key in ("unknown", "good")
    ]
    assert answers[0] == Declined(INTERNAL_ERROR, 500, "internal_error", None)
    assert isinstance(answers[1], Encoded)
    assert [record.message for record in caplog.records] == ["a job of a tokenizer failed"]
    caplog.clear()  # or `_no_defect` finds it


def test_files_that_do_not_load_are_a_checkpoint_error(pool: TokenizerPool) -> None:
    with pytest.raises(CheckpointError):
        asyncio.run(pool.encode(job("a", key="broken")))
    assert asyncio.run(pool.encode(job("a")))


def test_an_endless_template_is_killed_and_the_next_job_is_served(
    pool: TokenizerPool,
) -> None:
    with pytest.raises(RequestError, match="within 5 s") as caught:
        asyncio.run(pool.encode(job(MESSAGES, chat=True, key="spin")))
    assert caught.value.code == "tokenizer_timeout"
    (prompt,) = asyncio.run(pool.encode(job("abc")))
    assert prompt.length == 3


def test_short_jobs_that_are_sent_together_fail_and_are_killed_one_by_one(
    pool: TokenizerPool, byte_level_json: bytes
) -> None:
    template = b"{% if messages[0].content == 'spin' %}" + SPIN + b"{% endif %}"
    template += b"{{ messages[0].content }}"
    pool.add(TokenizerFiles(key="some", tokenizer=byte_level_json, template=template))

    async def scene() -> list[object]:
        texts: list[object] = [f"text {number}" for number in range(60)]
        texts[5], texts[20] = 5, "spin"
        contents = [[{"role": "user", "content": text}] for text in texts]
        jobs = [pool.encode(job(content, chat=True, key="some")) for content in contents]
        return await asyncio.gather(*jobs, return_exceptions=True)

    for number, outcome in enumerate(asyncio.run(scene())):
        match outcome:
            case (Prompt() as prompt,):
                assert prompt.length == len(f"text {number}")
            case RequestError():
                assert outcome.code == {5: "invalid_value", 20: "tokenizer_timeout"}[number]
            case _:
                raise AssertionError(f"{number}: {outcome!r}")


def test_a_process_that_waits_for_a_cpu_is_not_killed_with_its_batch(
    byte_level_json: bytes,
) -> None:
    async def scene() -> None:
        pool = TokenizerPool()
        pool.add(TokenizerFiles(key="good", tokenizer=byte_level_json))
        await pool.warm("good")
        while not all(lane._loaded for lane in pool._lanes):
            await asyncio.sleep(0.01)
        processes = [lane._process for lane in pool._lanes if lane._process is not None]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        jobs = [asyncio.create_task(pool.encode(job(f"{number}"))) for number in range(99)]
        await asyncio.sleep(3 * BATCH_S)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        assert len(await asyncio.gather(*jobs)) == 99
        assert [lane._process for lane in pool._lanes] == processes
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def test_short_chats_with_many_tools_do_not_fill_the_link(
    pool: TokenizerPool, byte_level_json: bytes
) -> None:
    pool.add(TokenizerFiles(key="tools", tokenizer=byte_level_json, template=b"{{ tools }}"))
    tools = json.dumps([{"type": "function", "function": {"name": "x" * 30_000}}]).encode()

    async def scene() -> list[tuple[Prompt, ...]]:
        jobs = [job(MESSAGES, chat=True, key="tools", tools=tools) for _ in range(40)]
        async with asyncio.timeout(60):
            return await asyncio.gather(*map(pool.encode, jobs))

    assert all(prompt.length > 30_000 for (prompt,) in asyncio.run(scene()))


def test_a_short_prompt_does_not_wait_for_a_long_one(pool: TokenizerPool) -> None:
    async def both() -> list[str]:
        done: list[str] = []

        async def encode(name: str, text: str) -> None:
            (prompt,) = await pool.encode(job(text))
            assert prompt.length == len(text)
            done.append(name)

        await pool.warm("good")
        lane = pool._lanes[-1]
        while "good" not in lane._loaded:
            await asyncio.sleep(0.001)
        assert lane._process is not None
        lane._process.send_signal(signal.SIGSTOP)  # the book takes as long as the test wants
        book = asyncio.create_task(encode("book", " ".join(map(str, range(200_000)))))
        while not lane._sent:
            await asyncio.sleep(0.001)
        await encode("greeting", "hi")
        lane._process.send_signal(signal.SIGCONT)
        await book
        return done

    assert asyncio.run(both()) == ["greeting", "book"]


def test_a_long_prompt_has_the_tokens_and_names_of_one_pass(pool: TokenizerPool) -> None:
    text = "some words, " * 20_000
    (prompt,) = asyncio.run(pool.encode(job([text, "short"], texts=True)))[:1]
    assert prompt.length == len(text) and prompt.text == text
    assert prompt.hashes == b"".join(chain(from_bytes(prompt.tokens), 4, SALT))


def test_a_prompt_that_cannot_fit_is_declined_early(pool: TokenizerPool) -> None:
    text = "some words, " * 20_000
    for limit, sentence in ((1000, "are at least"), (60_000, "has more than 60000 tokens")):
        with pytest.raises(RequestError, match=sentence) as caught:
            asyncio.run(pool.encode(job(text, limit_tokens=limit, salt=b"new")))
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("raw", ["say <|end|>", [5, 258], "some words, " * 20_000 + "<|end|>"])
def test_a_token_that_only_the_tokenizer_has_is_declined(pool: TokenizerPool, raw: object) -> None:
    with pytest.raises(RequestError, match=r"token id 258.*of 258 tokens, does not") as caught:
        asyncio.run(pool.encode(job(raw, vocab=258, salt=b"own")))
    assert caught.value.param == "prompt"
    assert asyncio.run(pool.encode(job(raw, vocab=259, salt=b"own")))


def test_another_tenants_prompt_does_not_wait_for_the_books_of_one(pool: TokenizerPool) -> None:
    async def scene() -> list[str]:
        done: list[str] = []

        async def encode(name: str, size: int) -> None:
            text = "".join(f"{name}{number} " for number in range(size))
            (prompt,) = await pool.encode(job(text), name)
            assert prompt.length == len(text)
            done.append(name)

        books = [asyncio.create_task(encode("a", 200_000)) for _ in range(3)]
        while not pool._lanes[-1].open:
            await asyncio.sleep(0.001)
        await encode("b", 20_000)
        assert len(done) == 1
        await asyncio.gather(*books)
        return done

    assert asyncio.run(scene()) == ["b", "a", "a", "a"]


def test_a_job_whose_client_left_ends_and_other_jobs_of_its_process_start_again(
    byte_level_json: bytes,
) -> None:
    async def scene() -> None:
        pool = TokenizerPool()
        for key, template in (("good", b""), ("spin", SPIN)):
            pool.add(TokenizerFiles(key=key, tokenizer=byte_level_json, template=template))
            await pool.warm(key)
        text = "".join(f"{number} " for number in range(200_000))
        book = asyncio.create_task(pool.encode(job(text)))
        while not pool._lanes[-1].open:
            await asyncio.sleep(0.001)
        long_chat = [{"role": "user", "content": "x" * 70_000}]
        spinning = asyncio.create_task(pool.encode(job(long_chat, chat=True, key="spin")))
        await asyncio.sleep(0.3)
        spinning.cancel()
        started_s = time.monotonic()
        (prompt,) = await book
        assert prompt.length == len(text)
        assert time.monotonic() - started_s < JOB_S
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def test_a_long_list_of_token_ids_is_read_without_python_integers(pool: TokenizerPool) -> None:
    ids = [number % 256 for number in range(100_000)]
    (prompt,) = asyncio.run(pool.encode(job(ids)))
    assert from_bytes(prompt.tokens).tolist() == ids


def test_a_large_answer_of_token_ids_and_of_their_text_is_made_in_a_process(
    pool: TokenizerPool, byte_level_json: bytes
) -> None:
    ids = [number * 7 % 256 for number in range(100_000)]
    answer = asyncio.run(pool.detokenize("good", json.dumps(ids).encode(), ""))
    assert json.loads(bytes(answer)) == {"prompt": text_of(Vocabulary(byte_level_json), ids)}
    tokens = np.asarray(ids, "<i4").tobytes()
    answer = asyncio.run(pool.format_tokens(tokens, ""))
    assert json.loads(bytes(answer)) == ids


def test_a_closed_pool_fails_running_and_waiting_jobs_and_skips_cancelled_ones(
    byte_level_json: bytes,
) -> None:
    async def scene() -> None:
        pool = TokenizerPool()
        pool.add(TokenizerFiles(key="spin", tokenizer=byte_level_json, template=SPIN))
        jobs = [job(MESSAGES, chat=True, key="spin") for _ in range(3)]
        running, gone, waiting = [
            asyncio.ensure_future(pool.encode(encode_job)) for encode_job in jobs
        ]
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.to_thread(pool.close)
        for failed in (running, waiting):
            with pytest.raises(EngineError):
                await failed
        assert gone.cancelled()

    asyncio.run(scene())


# --- the lane that is lent to the loop ------------------------------------------------------------


async def warmed(byte_level_json: bytes, template: bytes = b"") -> TokenizerPool:
    """Return a pool whose lanes have all loaded the tokenizer."""
    pool = TokenizerPool()
    pool.add(TokenizerFiles(key="good", tokenizer=byte_level_json, template=template))
    await pool.warm("good")
    while not all(lane._loaded and lane.idle for lane in pool._lanes):
        await asyncio.sleep(0.01)
    return pool


async def encoded(pool: TokenizerPool, text: str) -> None:
    (prompt,) = await pool.encode(job(text))
    assert prompt.length == len(text)
    assert prompt.hashes == b"".join(chain(from_bytes(prompt.tokens), 4, SALT))


def test_short_texts_reach_the_process_without_a_thread(byte_level_json: bytes) -> None:
    async def scene() -> None:
        pool = await warmed(byte_level_json)
        threads = [pathlib.Path(f"/proc/self/task/{lane.native_id}/status") for lane in pool._lanes]
        before = [switches(status.read_text()) for status in threads]
        for number in range(100):
            await encoded(pool, f"text {number}")
        assert [switches(status.read_text()) for status in threads] == before
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def switches(status: str) -> int:
    """Number of times that a thread has waited."""
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.parametrize("seed", range(4))
def test_jobs_of_all_kinds_at_once_have_their_results(byte_level_json: bytes, seed: int) -> None:
    async def scene() -> None:
        pool, draw = await warmed(byte_level_json), random.Random(seed)

        async def work() -> None:
            for _ in range(12):
                match draw.randrange(8):
                    case 0:
                        answer = await pool.detokenize("good", b"[104,105]", "t")
                        assert json.loads(bytes(answer))["prompt"] == text_of(
                            Vocabulary(byte_level_json), [104, 105]
                        )
                    case 1:
                        await encoded(pool, "x" * draw.randrange(13_000, 100_000))
                    case 2:
                        with pytest.raises(RequestError):
                            await pool.encode(job(5))
                    case 3:
                        task = asyncio.create_task(encoded(pool, "left"))
                        await asyncio.sleep(0)
                        task.cancel()
                    case _:
                        await encoded(pool, "y" * draw.randrange(1, 12_000))

        async with asyncio.timeout(60):
            await asyncio.gather(*(work() for _ in range(24)))
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def test_texts_in_a_process_that_dies_are_encoded_by_others(byte_level_json: bytes) -> None:
    async def scene() -> None:
        pool = await warmed(byte_level_json)
        for _ in range(3):
            lane = pool._lanes[0]
            assert lane._process is not None
            lane._process.send_signal(signal.SIGSTOP)
            jobs = [asyncio.create_task(encoded(pool, f"{number}")) for number in range(40)]
            await asyncio.sleep(0.01)
            assert lane.lent
            lane._process.kill()
            await asyncio.gather(*jobs)
            while not (lane._loaded and lane.idle):
                await asyncio.sleep(0.01)
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def test_texts_are_encoded_while_the_router_can_open_no_more_files(byte_level_json: bytes) -> None:
    async def scene() -> None:
        pool = await warmed(byte_level_json)
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, usual[1]))
        try:
            async with asyncio.timeout(10):
                await asyncio.gather(*(encoded(pool, f"text {number}") for number in range(40)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        async with asyncio.timeout(30):
            while not pool._lanes[0].lent:  # the lane's thread may still be at work
                await encoded(pool, "text")
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def test_a_text_that_takes_too_long_ends_its_process_and_no_other_text(
    byte_level_json: bytes,
) -> None:
    async def scene() -> None:
        template = b"{% if messages[0].content == 'spin' %}" + SPIN + b"{% endif %}"
        pool = await warmed(byte_level_json, template + b"{{ messages[0].content }}")
        texts = [f"text {number}" for number in range(20)]
        texts[3] = "spin"
        chats = [[{"role": "user", "content": text}] for text in texts]
        jobs = [asyncio.create_task(pool.encode(job(chat, chat=True))) for chat in chats]
        spinning = jobs.pop(3)
        async with asyncio.timeout(10):
            for number, (prompt,) in enumerate(await asyncio.gather(*jobs)):
                assert prompt.length == len(f"text {number + (number >= 3)}")
        spinning.cancel()
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def test_a_template_that_makes_a_short_chat_long_is_encoded_in_steps(
    byte_level_json: bytes,
) -> None:
    async def scene() -> None:
        pool = await warmed(byte_level_json, b"{{ 'word ' * 20000 }}")
        for _ in range(3):
            (prompt,) = await pool.encode(job(MESSAGES, chat=True))
            assert prompt.length == 100_000
        await asyncio.to_thread(pool.close)

    asyncio.run(scene())


def test_a_template_has_what_hugging_face_templates_expect() -> None:
    source = (
        b"{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        b"{{ m | tojson }}{% generation %}!{% endgeneration %}{% endfor %}"
        b"{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%Y')[:2] }}"
    )
    config = json.dumps({"bos_token": {"content": "<s>"}}).encode()
    text = ChatTemplate(source, config).render(
        [{"role": "user", "content": "é"}, {"role": "tool", "content": "x"}]
    )
    assert text == '<s>{"role": "user", "content": "é"}!>20'


def test_the_template_of_the_config_is_used_without_a_template_file() -> None:
    config = json.dumps(
        {
            "chat_template": [
                7,
                {"name": "default", "template": "D"},
                {"name": "tool_use", "template": "T"},
            ]
        }
    )
    assert ChatTemplate(b"", config.encode()).render(MESSAGES, ending="bare") == "D"


@pytest.mark.parametrize(
    ("source", "config", "sentence"),
    [
        (b"{{ a }", b"", "chat_template.jinja is not a Jinja template (line 1: unexpected '}')"),
        (
            b"a\n{% if b %}",
            b"",
            "chat_template.jinja is not a Jinja template (line 2: Unexpected end ",
        ),
        (
            b"{{ a | nosuch }}",
            b"",
            "chat_template.jinja is not a Jinja template (line 1: No filter nam",
        ),
        (
            b"{{" + b"(" * 5_000,
            b"",
            "chat_template.jinja is not a Jinja template (it is nested too de",
        ),
        (b"{% break %}", b"", "chat_template.jinja is not a Jinja template ('break' outside loop)"),
        (b"\xff", b"", "chat_template.jinja is not UTF-8"),
        (
            b"",
            b'{"chat_template": "{% for %}"}',
            "chat_template in tokenizer_config.json is not a Jin",
        ),
        (b"", b"{", "tokenizer_config.json does not load"),
    ],
)
def test_an_invalid_template_is_reported_in_one_line(
    source: bytes, config: bytes, sentence: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(source, config)
    message = str(caught.value)
    assert message.startswith(sentence)
    assert "\n" not in message and message.endswith("again")


def test_a_refusing_template_is_the_clients_error() -> None:
    template = ChatTemplate(b"{{ raise_exception('roles must alternate') }}", b"")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_model_without_a_template_names_the_route_to_use() -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        ChatTemplate(b"", b"").render(MESSAGES)


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_a_template_cannot_reach_out_of_its_sandbox(attack: str) -> None:
    with pytest.raises(RequestError, match="refuses"):
        ChatTemplate(attack.encode(), b"").render(MESSAGES)


def test_token_bytes_are_little_endian_int32(pool: TokenizerPool) -> None:
    (prompt,) = asyncio.run(pool.encode(job([1, 2, 258])))
    assert np.frombuffer(prompt.tokens, "<i4").tolist() == [1, 2, 258]
