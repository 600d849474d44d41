"""Taking requests in: from what a client asks to runs that wait for a replica; knows no HTTP.

`begin` holds a request while no replica serves its model, has its prompt made into tokens, gives it
a deadline from its class or headers, and asks admission: a promise, a place without one, or a
Refusal at once. Everything after that is the ledger's and the exchange's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from medha.config import RouterConfig
from medha.demand import Demand
from medha.errors import Refusal, RequestError
from medha.request import Request
from medha.scheduling.placement import Option
from medha_router.detokenizer import Vocabulary
from medha_router.editions import Edition
from medha_router.encoding import Prompt
from medha_router.ledger import Ledger
from medha_router.metering import Meter
from medha_router.models import ServedModel
from medha_router.openai import MAX_INT64, Ask
from medha_router.runs import Answer, Run
from medha_router.slo import SloAsk
from medha_router.streams import Output
from medha_router.tokenizer import TokenizerPool

MAX_STOP_TOKENS = 64
LEARN_POLL_S = 0.05

T = TypeVar("T")


class Service:
    """One router's front: lives on one event loop; `clock` gives its monotonic seconds.

    `wall_s` is the Unix time that responses carry; `draw_bits` gives random bits, for ids and for
    the seeds of requests that bring none.
    """

    def __init__(
        self, config: RouterConfig, models: Mapping[str, ServedModel], ledger: Ledger,
        tokens: TokenizerPool, meter: Meter, demand: Demand, *, clock: Callable[[], float],
        wall_s: Callable[[], float], draw_bits: Callable[[int], int],
    ) -> None:  # fmt: skip
        self._config, self._ledger, self._tokens, self._meter = config, ledger, tokens, meter
        self._demand = demand
        self._clock, self._wall_s, self._draw_bits = clock, wall_s, draw_bits
        self._log = logging.getLogger("medha.router")
        self._holding = 0
        self._learns_until_s = clock() + (config.learn_s if config.learn else 0.0)
        self.models = models
        self.draining = False
        self.started = int(wall_s())

    @property
    def live(self) -> int:
        """Requests that are not over yet."""
        return len(self._ledger) + self._holding

    @property
    def ready(self) -> bool:
        """New requests are welcome. A router without replicas is: it holds what comes."""
        return not self.draining

    def new_id(self) -> str:
        """A name for a request, unlike any other's."""
        return f"{self._draw_bits(96):024x}"

    def drain(self) -> None:
        """Refuse what is new; what runs is finished."""
        self.draining = True

    def model(self, name: str) -> ServedModel:
        """The model of that name; raises RequestError."""
        model = self.models.get(name)
        if model is None:
            raise RequestError(
                f"The model `{name[:80]}` does not exist; this server has "
                f"{', '.join(sorted(self.models)) or 'none yet'}",
                status=404, code="model_not_found", param="model",
            )  # fmt: skip
        return model

    async def vocabulary(self, name: str) -> Vocabulary:
        """The model's, once a replica serves it; raises RequestError or Refusal."""
        edition = await self._open(await self._known(name))
        if edition.vocabulary is None:
            raise RequestError(f"model {name[:80]} has no tokenizer yet", status=503)
        return edition.vocabulary

    async def encode(
        self, name: str, *, chat: bool, raw: bytes, special: bool, opening: bool
    ) -> tuple[Prompt, ServedModel]:
        """Tokens of one prompt, for `/tokenize`; raises RequestError or Refusal."""
        model = await self._known(name)
        edition = await self._open(model)
        job = edition.encode_job(
            chat=chat, raw=raw, salt=model.salt(""), special=special, generation_prompt=opening
        )
        prompts = await self._hold(self._tokens.encode(job))
        if len(prompts) != 1:
            raise RequestError(
                f"prompt is a list of {len(prompts)}: /tokenize takes one",
                code="invalid_value", param="prompt",
            )  # fmt: skip
        return prompts[0], model

    async def begin(self, id: str, ask: Ask, slo: SloAsk, tenant: str = "") -> Answer:
        """Take a request in; raises RequestError (it cannot be served) or Refusal (not now).

        Cancelling this while it waits leaves nothing behind.
        """
        arrival_s = self._clock()
        model = await self._known(ask.model)
        slo_class = model.slo_class(slo)
        answer = Answer(
            id=id, ask=ask, slo_class=slo_class, tenant=tenant, arrival_s=arrival_s,
            created=int(self._wall_s()),
        )  # fmt: skip
        try:
            answer.held = not model.ready
            edition = await self._open(model)
            prompts = await self._hold(self.encoded(answer, model, edition))
            while not edition.open:  # its replicas left meanwhile
                answer.held = answer.held or not model.ready
                edition = await self._open(model)
                prompts = await self._hold(self.encoded(answer, model, edition))
            self._prepare(answer, model, edition, prompts, slo)
            self._admit(answer, model)
        except Refusal as refusal:
            now = self._clock()
            self._meter.refused(model.name, slo_class.name, refusal.code, now)
            for run in answer.runs:
                self._meter.refused_run(run, refusal, now)
            self._log.info("refused: %s", refusal.code, extra={"fields": {"request": id}})
            raise
        return answer

    def cancel(self, answer: Answer) -> None:
        """The client left; nothing happens when the answer is over."""
        self._ledger.cancel(answer, self._clock())

    async def _known(self, name: str) -> ServedModel:
        """The model of that name. A router that has just started may hear of it in a moment."""
        while name not in self.models and self._clock() < self._learns_until_s:
            await self._hold(asyncio.sleep(LEARN_POLL_S))
        return self.model(name)

    async def _open(self, model: ServedModel) -> Edition:
        """The edition that a new request is for, once there is one; raises Refusal."""
        if self.draining:
            raise Refusal("draining", "this router is shutting down: retry", retry_after_s=1.0)
        while not model.ready:
            if self._holding >= self._config.max_queue:
                raise Refusal("overloaded", "too many requests wait for a replica: retry later")
            wait_s = model.patience_s(self._config.no_replica_timeout_s)
            with self._demand.holding(model.name):
                await self._hold(model.wait_open(wait_s))
        return model.edition()

    async def encoded(
        self, answer: Answer, model: ServedModel, edition: Edition
    ) -> tuple[Prompt, ...]:
        """What a request asks, in the tokens of one edition; raises RequestError."""
        ask = answer.ask
        job = edition.encode_job(
            chat=ask.chat, raw=ask.raw, salt=model.salt(answer.tenant), texts=ask.echo
        )
        return await self._tokens.encode(job)

    async def _hold(self, waiting: Awaitable[T]) -> T:
        self._holding += 1
        try:
            return await waiting
        finally:
            self._holding -= 1

    def _prepare(
        self, answer: Answer, model: ServedModel, edition: Edition, prompts: Iterable[Prompt],
        slo: SloAsk,
    ) -> None:  # fmt: skip
        """A run for each output: its limits, its deadline, how it is sampled."""
        ask = answer.ask
        ends = self._ends(ask, edition)
        seed = ask.sampling.seed if ask.seeded else self._draw_bits(63)
        salt = model.salt(answer.tenant)
        for place, prompt in enumerate(prompts):
            most = self._most(ask, model, prompt)
            request = self._request(answer, model, edition, prompt, most, slo)
            idle_tpot_s = model.dispatch.idle_tpot_s(prompt.length, edition.key)
            for index in range(place * ask.n, (place + 1) * ask.n):
                sampling = msgspec.structs.replace(
                    ask.sampling, seed=(seed + index) & MAX_INT64, stop_tokens=ends
                )
                mine = msgspec.structs.replace(request, id=f"{answer.id}.{index}")
                answer.runs.append(
                    Run(answer=answer, index=index, prompt=prompt, request=mine, salt=salt,
                        sampling=sampling, output=_output(ask, edition, ends),
                        edition=edition.key, idle_tpot_s=idle_tpot_s)
                )  # fmt: skip

    def retell(self, run: Run, model: ServedModel, edition: Edition, prompt: Prompt) -> None:
        """The run, which has no token yet, goes over to another edition; raises RequestError."""
        ask = run.answer.ask
        ends = self._ends(ask, edition)
        run.request = msgspec.structs.replace(
            run.request,
            prompt_tokens=prompt.length,
            max_output_tokens=self._most(ask, model, prompt),
            work_s=model.dispatch.idle_work_s(prompt.length, prompt.hashes, edition.key),
        )
        run.sampling = msgspec.structs.replace(run.sampling, stop_tokens=ends)
        run.output = _output(ask, edition, ends)
        run.prompt, run.edition = prompt, edition.key
        run.idle_tpot_s = model.dispatch.idle_tpot_s(prompt.length, edition.key)

    def _ends(self, ask: Ask, edition: Edition) -> tuple[int, ...]:
        """Tokens that end an output of it; raises RequestError where the request names others."""
        _check_bias(ask, edition.hello.shape.vocab)
        if ask.ignore_eos:
            return ask.sampling.stop_tokens
        both = edition.hello.stop_tokens + ask.sampling.stop_tokens
        return tuple(dict.fromkeys(both))[:MAX_STOP_TOKENS]

    def _most(self, ask: Ask, model: ServedModel, prompt: Prompt) -> int:
        return model.output_tokens(
            prompt, ask.max_output_tokens, self._config.default_output_tokens, ask.chat
        )

    def _request(
        self, answer: Answer, model: ServedModel, edition: Edition, prompt: Prompt, most: int,
        slo: SloAsk,
    ) -> Request:  # fmt: skip
        """Deadline and targets: the request's own where its headers give them, else its class's."""
        slo_class = answer.slo_class
        work_s = model.dispatch.idle_work_s(prompt.length, prompt.hashes, edition.key)
        return Request(
            id=answer.id,
            arrival_s=answer.arrival_s,
            prompt_tokens=prompt.length,
            max_output_tokens=most,
            ttft_deadline_s=slo.ttft_s or slo_class.slo.ttft_deadline_s(work_s),
            tpot_s=slo.tpot_s or slo_class.slo.tpot_s,
            work_s=work_s,
            slo_class=slo_class.name,
            tenant=answer.tenant,
            weight=slo_class.weight,
        )

    def _admit(self, answer: Answer, model: ServedModel) -> None:
        """All runs wait, or none does. What waited for the first replica is not refused now that
        it is there, however late: it goes on without a promise if it must."""
        now = self._clock()
        dispatch, slo_class = model.dispatch, answer.slo_class
        dispatch.check_room(self._config.max_queue)
        if answer.held:
            slo_class = msgspec.structs.replace(slo_class, when_infeasible="relegate")
        admitted: list[Run] = []
        options: list[Option] = []
        age_s = now - answer.arrival_s
        try:
            for run in answer.runs:
                run.waiting_since_s = now
                verdict = dispatch.admit(run, slo_class, now)
                run.request = msgspec.structs.replace(run.request, promised=verdict.promised)
                run.promise_given = verdict.promised
                admitted.append(run)
                options.append(verdict.option)
                answer.predicted_s = age_s + max(each.finish_s for each in options)
        except Refusal:
            for run in admitted:
                dispatch.drop(run.id, None, now)
            raise
        if all(run.request.promised for run in answer.runs):
            answer.promise_s = max(run.request.ttft_deadline_s for run in answer.runs)
        self._ledger.add(answer)
        self._meter.admitted(answer)
        for run, option in zip(answer.runs, options, strict=True):
            if answer.held:
                self._meter.arrived_at_none(run, now)
            else:
                self._meter.arrived(run, option, age_s, now)


def _output(ask: Ask, edition: Edition, ends: tuple[int, ...]) -> Output:
    if edition.vocabulary is None:
        raise Refusal("no_replica", "the replicas of this model are gone: retry later")
    return Output(edition.vocabulary, ask.stops, frozenset(ends))


def _check_bias(ask: Ask, vocab: int) -> None:
    for token in ask.sampling.logit_bias:
        if token >= vocab:
            raise RequestError(
                f"logit_bias names the token {token}: this model's vocabulary has {vocab} tokens",
                code="invalid_value", param="logit_bias",
            )  # fmt: skip
