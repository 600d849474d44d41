"""From a client's parameters to generations that wait for a replica, without HTTP.

`begin` waits until a replica serves the model, encodes the prompt, sets the deadline from the QoS
class or the headers, and asks admission: a promise, relegation, or a Refusal at once. After that,
the request table and the replica client process the request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from medha.config import RouterConfig
from medha.errors import Refusal, RequestError
from medha.fleet.admission import attainable_tpot_s
from medha.fleet.demand import DemandWindow
from medha.fleet.offers import PlacementOption
from medha.fleet.prefix_index import page_name_parts, salt_of
from medha.fleet.shared_room import SharedRoom
from medha.messages import BAD_BIAS, TOKEN_BYTES, Sampling, from_bytes
from medha.request import Request
from medha_router.auth import Client
from medha_router.generation import ClientRequest, Generation
from medha_router.models import ModelRegistry, ModelVersion, ServedModel
from medha_router.protocol import (
    MAX_BIAS,
    MAX_INT64,
    MAX_LOGPROBS,
    GenerationParams,
    SloOverride,
    TokenizeParams,
    check_biased,
    check_min_tokens,
)
from medha_router.request_table import RouterState
from medha_router.structured.checker_process import GrammarChecker
from medha_router.structured.output_parser import BEGINS, ENDS
from medha_router.structured.sources import GrammarSource
from medha_router.structured.tool_calls import MARKS, Format, begins_of
from medha_router.tokenization.detokenizer import OutputStream
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.wire import Prompt
from medha_router.turns import TURN_S, in_turns

MAX_STOP_TOKENS = 64
MAX_OUTPUTS = 64
MAX_SCORED_TOKENS = 32_768
MAX_SCORES = MAX_SCORED_TOKENS * (1 + MAX_LOGPROBS)
"""Log probabilities of the prompts of a request: about 37 MB of JSON."""
LEARN_POLL_S = 0.05
REMEMBERED_SALTS = 4096
LONG_TOKENS = 65_536
FORECAST_ROUNDS = 4
MAX_LISTED = 20
ROUNDING = 1e-9

T = TypeVar("T")


class Service:
    """Admits the requests of one router, on one event loop.

    `salt_secret` keeps the names of cached pages unguessable. `wall_s` gives the Unix time for
    responses, and `draw_bits` random bits: for ids, and for the seeds of requests without one.
    """

    def __init__(
        self,
        config: RouterConfig,
        state: RouterState,
        tokens: TokenizerPool,
        demand: DemandWindow,
        *,
        grammars: GrammarChecker,
        salt_secret: bytes,
        wall_s: Callable[[], float],
        draw_bits: Callable[[int], int],
    ) -> None:
        self._config, self.tokens, self._demand = config, tokens, demand
        self._grammars = grammars
        self._meter, self._salt_secret = state.meter, salt_secret
        self._requests, self._metrics = state.requests, state.metrics
        self._clock, self._wall_s, self._draw_bits = state.clock, wall_s, draw_bits
        self._log = logging.getLogger("medha.router")
        self._salts: dict[tuple[str, str], bytes] = {}  # by model, with its adapter, and owner
        self._holding = SharedRoom(config.max_queue)
        self._learns_until_s = self._clock() + (config.learn_s if config.learn else 0.0)
        self.models: ModelRegistry = state.models
        self.draining = False
        self.started = int(wall_s())

    @property
    def live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests) + self._holding.held

    @property
    def ready(self) -> bool:
        """True unless the router drains. A router without replicas is ready: it holds requests."""
        return not self.draining

    def new_id(self) -> str:
        """Draw the id of a request."""
        return f"{self._draw_bits(96):024x}"

    def drain(self) -> None:
        """Refuse new requests and finish the others."""
        self.draining = True

    def model(self, name: str) -> tuple[ServedModel, str]:
        """Return a served model and an adapter ("": none); raises RequestError if the name is
        unknown, or is empty while there are several models."""
        named = self.models.named(name)
        if named is None and not name:
            raise RequestError(
                f"model is missing: this server has {self._served()}; name one",
                code="invalid_value",
                param="model",
            )
        if named is None:
            raise RequestError(
                f"The model `{name[:80]}` does not exist; this server has {self._served()}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return named

    def _served(self) -> str:
        """Return the served names for a message, the first ones if there are many."""
        names, count = self.models.first_names(MAX_LISTED)
        shown = ", ".join(names) or "none yet"
        return f"{shown} and {count - len(names)} more" if count > len(names) else shown

    async def detokenize(self, name: str, raw: bytes, client: Client) -> memoryview:
        """Return the answer of `/detokenize` for JSON token ids; raises RequestError or Refusal."""
        self._meter.arrive(client.tenant, client.limits, self._clock())
        version = await self._open(*await self._known(name, client.owner), client.owner)
        text = self.tokens.detokenize(version.tokenizer_key, raw, client.owner)
        return await self._hold(text, client.owner)

    async def encode(self, params: TokenizeParams, client: Client) -> tuple[Prompt, ServedModel]:
        """Encode one prompt for `/tokenize`; raises RequestError or Refusal."""
        self._meter.arrive(client.tenant, client.limits, self._clock())
        model, adapter = await self._known(params.model, client.owner)
        version = await self._open(model, adapter, client.owner)
        if params.tools:
            _check_takes_tools(version, adapter)
        job = version.encode_job(
            chat=params.chat,
            raw=params.raw,
            salt=self._salt(params.model or model.name, client.cache_owner),
            adapter=adapter,
            special=params.special,
            ending=params.ending,
            tools=params.tools,
            template_values=params.template_values,
        )
        job = msgspec.structs.replace(job, page_tokens=0, vocab=0)
        prompts = await self._hold(self.tokens.encode(job, client.owner), client.owner)
        if len(prompts) != 1:
            raise RequestError(
                f"prompt is a list of {len(prompts)}: /tokenize takes one",
                code="invalid_value",
                param="prompt",
            )
        return prompts[0], model

    async def begin(
        self, id: str, params: GenerationParams, slo: SloOverride, client: Client
    ) -> ClientRequest:
        """Admit a request; raises RequestError (never servable) or Refusal (not now).

        The task may be cancelled at any time: nothing of the request is left.
        """
        arrival_s, owner = self._clock(), client.owner
        model, adapter = await self._known(params.model, owner)
        if not params.model:
            params = msgspec.structs.replace(params, model=model.name)
        slo_class = model.slo_class(slo)
        if client.weight != 1.0:
            slo_class = msgspec.structs.replace(slo_class, weight=slo_class.weight * client.weight)
        client_request = ClientRequest(
            id=id,
            params=params,
            model=model.name,
            adapter=adapter,
            slo_class=slo_class,
            client=client,
            arrival_s=arrival_s,
            created=int(self._wall_s()),
        )
        try:
            self._meter.arrive(client.tenant, client.limits, arrival_s)
            client_request.held = not model.ready
            version = await self._open(model, adapter, owner)
            grammar = ""
            if params.grammar is not None:
                checked = self._checked_grammar(params.grammar, client_request, version)
                grammar = await self._hold(checked, owner)
            prompts = await self._hold(self._encoded(client_request, model, version, slo), owner)
            while not version.open:  # its replicas left during the encoding
                client_request.held = client_request.held or not model.ready
                version = await self._open(model, adapter, owner)
                prompts = await self._hold(
                    self._encoded(client_request, model, version, slo), owner
                )
            self._prepare(client_request, model, version, prompts, slo, grammar)
            self._count(client_request)
            try:
                self._admit(client_request, model)
            except Exception:
                self._uncount(client_request)
                raise
        except Refusal as refusal:
            now = self._clock()
            self._metrics.refused(model.name, slo_class.name, refusal.code, now)
            for generation in client_request.generations:
                self._metrics.refused_generation(generation, refusal, now)
            fields = client_request.log_fields
            self._log.info("refused: %s", refusal.code, extra={"fields": fields})
            client_request.close()
            raise
        return client_request

    def cancel(self, client_request: ClientRequest) -> None:
        """End a request whose response has ended or whose client disconnected."""
        self._requests.cancel(client_request, self._clock())
        self._uncount(client_request)

    def _count(self, client_request: ClientRequest) -> None:
        """Count a request towards the limits of its tenant; raises Refusal."""
        client, cost = client_request.client, client_request.cost
        self._meter.begin(client.tenant, client.limits, cost, self._clock())
        client_request.counted = cost

    def _uncount(self, client_request: ClientRequest) -> None:
        client, cost = client_request.client, client_request.counted
        if cost is not None:
            client_request.counted = None
            tokens = client_request.output_tokens
            self._meter.end(client.tenant, client.limits, cost, tokens, self._clock())

    async def _known(self, name: str, owner: str) -> tuple[ServedModel, str]:
        """Return a model and an adapter; a router that has just started waits a moment to learn
        them."""
        while self.models.named(name) is None and self._clock() < self._learns_until_s:
            if not name and self.models:
                break  # there are several
            await self._hold(asyncio.sleep(LEARN_POLL_S), owner)
        return self.model(name)

    async def _open(self, model: ServedModel, adapter: str, owner: str) -> ModelVersion:
        """Wait until a version of the model is open and choose one with the adapter; raises
        Refusal."""
        if self.draining:
            raise Refusal("draining", "this router is shutting down: retry", retry_after_s=1.0)
        while not model.ready:
            if not self._holding.fits(owner, 1):
                raise Refusal("overloaded", "too many requests wait for a replica: retry later")
            wait_s = model.patience_s(self._config.no_replica_timeout_s)
            with self._demand.holding(model.name):
                await self._hold(model.wait_open(wait_s), owner)
        return model.choose_version(adapter)

    async def encode_for(
        self, client_request: ClientRequest, model: ServedModel, version: ModelVersion
    ) -> tuple[Prompt, ...]:
        """Encode the prompts of a request for one version; raises RequestError."""
        params = client_request.params
        job = version.encode_job(
            chat=params.chat,
            raw=params.raw,
            salt=self._salt(params.model, _cache_owner(client_request)),
            adapter=client_request.adapter,
            texts=params.echo,
            special=params.special,
            limit_tokens=model.max_context_tokens if params.kept_tokens is None else 0,
            tools=params.tools.raw if params.tools is not None else b"",
            template_values=params.template_values,
            ending=params.ending,
        )
        if params.kept_tokens is not None:
            job = msgspec.structs.replace(job, page_tokens=0)  # they have other pages
        prompts = await self.tokens.encode(job, client_request.client.owner)
        if params.kept_tokens is None:
            return prompts
        most, side = params.kept_tokens
        if most < 0:
            limit = model.max_context_tokens
            most = limit - max(1, params.max_output_tokens or 0)
            most = most if most > 0 else limit - 1
        special: list[int] = []
        if params.special and version.vocabulary is not None:
            special = version.vocabulary.tokenizer.encode("").ids
        kept = [_cut(prompt.tokens, most, side, special) for prompt in prompts]
        page_bytes = TOKEN_BYTES * version.hello.page_tokens
        names = [await in_turns(page_name_parts(part, page_bytes, job.salt)) for part in kept]
        return tuple(Prompt(part, b"".join(parts)) for part, parts in zip(kept, names, strict=True))

    async def _encoded(
        self,
        client_request: ClientRequest,
        model: ServedModel,
        version: ModelVersion,
        slo: SloOverride,
    ) -> tuple[Prompt, ...]:
        """Encode the prompts, and prepare the forecasts for them in turns of the loop.

        A Load that arrives in between may undo them, but not in the last turn.
        """
        prompts = await self.encode_for(client_request, model, version)
        dispatcher, class_tpot_s = model.dispatcher, client_request.slo_class.slo.tpot_s
        tpot_s = slo.tpot_s or class_tpot_s
        lengths = [prompt.length for prompt in prompts]
        longest, matched = max(lengths), prompts if sum(lengths) > LONG_TOKENS else ()
        for _ in range(FORECAST_ROUNDS):
            paused, began_s = False, self._clock()
            for _ in itertools.chain(
                *(dispatcher.match_ahead(prompt.hashes) for prompt in matched),
                dispatcher.extend_forecasts(longest, version.key, class_tpot_s, tpot_s),
            ):
                if self._clock() - began_s > TURN_S:
                    await asyncio.sleep(0)
                    paused, began_s = True, self._clock()
            if not paused:
                break
        return prompts

    def _salt(self, model: str, owner: str) -> bytes:
        """Return the first name of cached pages, which only requests of the same owner share."""
        salt = self._salts.get((model, owner))
        if salt is None:
            if len(self._salts) >= REMEMBERED_SALTS:
                self._salts.clear()
            salt = self._salts[model, owner] = salt_of(model, owner, self._salt_secret)
        return salt

    async def _hold(self, waiting: Awaitable[T], owner: str) -> T:
        self._holding.hold(owner, 1)
        try:
            return await waiting
        finally:
            self._holding.hold(owner, -1)

    def _prepare(
        self,
        client_request: ClientRequest,
        model: ServedModel,
        version: ModelVersion,
        prompts: Sequence[Prompt],
        slo: SloOverride,
        grammar: str,
    ) -> None:
        """Add a generation for each output: limits, deadline, sampling."""
        params = client_request.params
        tool_calls = _tool_calls(params, version, client_request.adapter)
        client_request.splits_thinking = (
            self._config.split_thinking and params.chat and params.grammar is None
        )
        stop_tokens = self._stop_tokens(params, version)
        seed = params.sampling.seed if params.seeded else self._draw_bits(63)
        settings = msgspec.structs.replace(
            self._with_defaults(params, version),
            stop_tokens=stop_tokens,
            grammar=grammar,
            seed=seed & MAX_INT64,
        )
        settings = _without_bad_words(settings, client_request, version)
        salt = self._salt(params.model, _cache_owner(client_request))
        _check_size(params, prompts)
        for position, prompt in enumerate(prompts):
            if params.sampling.prompt_logprobs is not None:
                prompt = _scorable(prompt)
            max_output_tokens = self._max_output_tokens(params, model, prompt)
            request = self._request(client_request, model, version, prompt, max_output_tokens, slo)
            least_tpot_s = model.dispatcher.least_tpot_s(prompt.length, version.key)
            attainable_s = attainable_tpot_s(request.tpot_s, least_tpot_s)
            if slo.tpot_s is None and request.tpot_s < attainable_s:
                request = msgspec.structs.replace(request, tpot_s=attainable_s)
            for index in range(position * params.n, (position + 1) * params.n):
                sampling, own_request = settings, request
                if index:  # else they have its seed and id
                    sampling = msgspec.structs.replace(settings, seed=(seed + index) & MAX_INT64)
                    own_id = f"{client_request.id}.{index}"
                    own_request = msgspec.structs.replace(request, id=own_id)
                client_request.generations.append(
                    Generation(
                        client_request=client_request,
                        index=index,
                        prompt=prompt,
                        request=own_request,
                        salt=salt,
                        sampling=sampling,
                        output=_output_stream(client_request, version, stop_tokens, prompt),
                        version=version.key,
                        least_tpot_s=least_tpot_s,
                        tool_calls=tool_calls,
                    )
                )

    def change_version(
        self, generation: Generation, model: ServedModel, version: ModelVersion, prompt: Prompt
    ) -> None:
        """Change the version of a generation without tokens; raises RequestError."""
        client_request = generation.client_request
        params = client_request.params
        tool_calls = _tool_calls(params, version, client_request.adapter)
        stop_tokens = self._stop_tokens(params, version)
        sampling = msgspec.structs.replace(generation.sampling, stop_tokens=stop_tokens)
        sampling = _without_bad_words(sampling, client_request, version)
        least_tpot_s = model.dispatcher.least_tpot_s(prompt.length, version.key)
        generation.request = msgspec.structs.replace(
            generation.request,
            prompt_tokens=prompt.length,
            tpot_s=attainable_tpot_s(generation.request.tpot_s, least_tpot_s),
            max_output_tokens=self._max_output_tokens(params, model, prompt),
            work_s=model.dispatcher.idle_work_s(
                prompt.length,
                prompt.hashes,
                version.key,
                client_request.slo_class.slo.tpot_s,
            ),
        )
        if params.sampling.prompt_logprobs is not None:
            prompt = _scorable(prompt)
        generation.sampling, generation.prompt_logprobs = sampling, []
        generation.output = _output_stream(client_request, version, stop_tokens, prompt)
        generation.tool_calls = tool_calls
        generation.prompt, generation.version = prompt, version.key
        generation.thinking_begins = None
        generation.least_tpot_s = least_tpot_s

    async def _checked_grammar(
        self, grammar: GrammarSource, client_request: ClientRequest, version: ModelVersion
    ) -> str:
        """Return the grammar for the engine; raises RequestError or Refusal."""
        tools = client_request.params.tools
        if grammar.of_answer and tools is not None and client_request.params.calls_tools:
            form = version.form_of_calls(client_request.adapter)
            grammar = msgspec.structs.replace(grammar, calls=begins_of(form, tools.names))
        key, tokenizer = version.tokenizer_key, version.tokenizer
        return await self._grammars.check(key, tokenizer, grammar, client_request.client.owner)

    def _with_defaults(self, params: GenerationParams, version: ModelVersion) -> Sampling:
        """Return the sampling with the checkpoint's defaults where the request is silent."""
        defaults = version.hello.defaults.given() if self._config.generation_defaults else {}
        used = {name: value for name, value in defaults.items() if name in params.silent}
        return msgspec.structs.replace(params.sampling, **used) if used else params.sampling

    def _stop_tokens(self, params: GenerationParams, version: ModelVersion) -> tuple[int, ...]:
        """Return the tokens that end an output; raises RequestError for an invalid logit_bias."""
        _check_bias(params, version.hello.shape.vocab)
        if params.ignore_eos:
            return params.sampling.stop_tokens
        stop_tokens = version.hello.stop_tokens + params.sampling.stop_tokens
        return tuple(dict.fromkeys(stop_tokens))[:MAX_STOP_TOKENS]

    def _max_output_tokens(
        self, params: GenerationParams, model: ServedModel, prompt: Prompt
    ) -> int:
        most = model.output_tokens(
            prompt, params.max_output_tokens, self._config.default_output_tokens, params.chat
        )
        if params.max_output_tokens is None:
            check_min_tokens(params.sampling.min_tokens, most)
        return most

    def _request(
        self,
        client_request: ClientRequest,
        model: ServedModel,
        version: ModelVersion,
        prompt: Prompt,
        max_output_tokens: int,
        slo: SloOverride,
    ) -> Request:
        """Make the request of the first output: deadline and targets from its headers, else from
        its class."""
        slo_class = client_request.slo_class
        work_s = model.dispatcher.idle_work_s(
            prompt.length, prompt.hashes, version.key, slo_class.slo.tpot_s
        )
        return Request(
            id=f"{client_request.id}.0",
            arrival_s=client_request.arrival_s,
            prompt_tokens=prompt.length,
            max_output_tokens=max_output_tokens,
            ttft_deadline_s=slo.ttft_s or slo_class.slo.ttft_deadline_s(work_s),
            tpot_s=slo.tpot_s or slo_class.slo.tpot_s,
            work_s=work_s,
            slo_class=slo_class.name,
            tenant=client_request.tenant,
            weight=slo_class.weight,
        )

    def _admit(self, client_request: ClientRequest, model: ServedModel) -> None:
        """Admit all generations, or none.

        A request that waited for the first replica is never refused for its deadline: it is
        relegated instead, and so are outputs that empty replicas cannot hold with the others.
        """
        now = self._clock()
        dispatcher, slo_class = model.dispatcher, client_request.slo_class
        outputs = len(client_request.generations)
        dispatcher.check_room(client_request.tenant, outputs)
        if client_request.held:
            slo_class = msgspec.structs.replace(slo_class, when_infeasible="relegate")
        admitted: list[Generation] = []
        options: list[PlacementOption] = []
        age_s, part, taken = now - client_request.arrival_s, 0.0, 0.0
        try:
            for generation in client_request.generations:
                generation.waiting_since_s = now
                if outputs > 1 and generation.index % client_request.params.n == 0:
                    part = 1.0 / max(1, dispatcher.most_together(generation))
                taken += part
                if taken > 1.0 + ROUNDING:
                    slo_class = msgspec.structs.replace(slo_class, when_infeasible="relegate")
                decision = dispatcher.admit(generation, slo_class, now)
                generation.request = msgspec.structs.replace(
                    generation.request,
                    promised=decision.promised,
                    beyond_share=decision.beyond_share,
                )
                generation.promise_given = decision.promised and dispatcher.keeps_promises
                admitted.append(generation)
                options.append(decision.option)
        except Refusal:
            for generation in admitted:
                dispatcher.drop(generation.id, None, now)
            raise
        client_request.predicted_s = age_s + max([option.finish_s for option in options])
        promised_s = [
            generation.request.ttft_deadline_s
            for generation in admitted
            if generation.promise_given
        ]
        if len(promised_s) == len(admitted):
            client_request.promise_s = max(promised_s)
        self._requests.add(client_request)
        self._metrics.admitted(client_request)
        for generation, option in zip(admitted, options, strict=True):
            if client_request.held:
                self._metrics.arrived_held(generation, now)
            else:
                self._metrics.arrived(generation, option, age_s, now)


def _output_stream(
    client_request: ClientRequest,
    version: ModelVersion,
    stop_tokens: tuple[int, ...],
    prompt: Prompt,
) -> OutputStream:
    params = client_request.params
    if version.vocabulary is None:
        raise Refusal("no_replica", "the replicas of this model are gone: retry later")
    thinking = (BEGINS, ENDS) if client_request.splits_thinking else ()
    shown = thinking + (MARKS if params.calls_tools else ())
    return OutputStream(
        version.vocabulary,
        params.stops,
        frozenset(stop_tokens),
        None if params.shows_special else shown,
        offset=len(prompt.text or "") if params.echo else 0,
        empty=params.max_output_tokens == 0,
        min_tokens=params.sampling.min_tokens,
        shows_stop=params.shows_stop,
    )


def _cache_owner(client_request: ClientRequest) -> str:
    """Return who shares cached pages: of one owner, requests with the same salt."""
    owner, salt = client_request.client.cache_owner, client_request.params.cache_salt
    return f"\0{len(owner)}:{owner}{salt}" if salt else owner


def _check_size(params: GenerationParams, prompts: Sequence[Prompt]) -> None:
    """Raise RequestError if a request has more outputs, or more to score, than one may have."""
    outputs = len(prompts) * params.n
    if outputs > MAX_OUTPUTS:
        raise RequestError(
            f"{len(prompts)} prompts with n {params.n} make {outputs} outputs: at most "
            f"{MAX_OUTPUTS}; send several requests",
            code="invalid_value",
            param="prompt",
        )
    alternatives = params.sampling.prompt_logprobs
    if alternatives is None:
        return
    scores = sum(prompt.length for prompt in prompts) * params.n * (1 + alternatives)
    if scores > MAX_SCORES:
        raise RequestError(
            f"the prompts have {scores} log probabilities, of all outputs with their "
            f"alternatives: at most {MAX_SCORES}; send several requests",
            code="invalid_value",
            param="messages" if params.chat else "prompt",
        )


def _cut(tokens: bytes, most: int, side: str, special: Sequence[int]) -> bytes:
    """Return the last tokens of a prompt if `side` is left, after `special` ones that open it, else
    the first ones."""
    if side == "right" or len(tokens) <= TOKEN_BYTES * most:
        return tokens[: TOKEN_BYTES * most]
    first = from_bytes(tokens[: TOKEN_BYTES * len(special)]).tolist()
    opening = sum(itertools.takewhile(bool, map(operator.eq, first, special)))
    opening = min(opening, most - 1)
    return tokens[: TOKEN_BYTES * opening] + tokens[-TOKEN_BYTES * (most - opening) :]


def _without_bad_words(
    sampling: Sampling, client_request: ClientRequest, version: ModelVersion
) -> Sampling:
    """Return sampling that forbids bad words, those of one token by a bias; raises RequestError if
    no allowed token is left."""
    params, stop_tokens = client_request.params, sampling.stop_tokens
    if not params.bad_words and not params.sampling.logit_bias:
        return sampling
    if params.bad_words and version.key not in client_request.bad_words:
        client_request.bad_words[version.key] = _encoded_words(params.bad_words, version)
    words = client_request.bad_words.get(version.key, ())
    bad = {word[0] for word in words if len(word) == 1}
    bias = params.sampling.logit_bias | dict.fromkeys(bad, BAD_BIAS)
    check_biased(bias)
    allowed = {token for token, value in params.sampling.logit_bias.items() if value > MAX_BIAS}
    if allowed and allowed <= {*bad, *(stop_tokens if params.sampling.min_tokens else ())}:
        raise RequestError(
            "allowed_token_ids holds only tokens that bad_words or min_tokens forbid: allow "
            "another one",
            code="invalid_value",
            param="allowed_token_ids",
        )
    return msgspec.structs.replace(
        sampling, logit_bias=bias, bad_words=tuple(word for word in words if len(word) > 1)
    )


def _encoded_words(words: Sequence[str], version: ModelVersion) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words. As in vLLM, a word is also what follows a space."""
    if version.vocabulary is None:
        raise Refusal("no_replica", "the replicas of this model are gone: retry later")
    encode = version.vocabulary.tokenizer.encode
    encoded: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        first, spaced = (
            tuple(encode(space + word.lstrip(" "), add_special_tokens=False).ids)
            for space in ("", " ")
        )
        if not first:
            raise RequestError(
                f"bad_words[{index}] is {word[:60]!r}, which has no tokens: leave it out",
                code="invalid_value",
                param=f"bad_words[{index}]",
            )
        encoded[first] = None
        if spaced[-len(first) :] != first:
            encoded[spaced] = None
    return tuple(encoded)


def _scorable(prompt: Prompt) -> Prompt:
    """Return the prompt without page names, so that every token of it is computed."""
    if prompt.length > MAX_SCORED_TOKENS:
        raise RequestError(
            f"the prompt has {prompt.length} tokens: log probabilities are given of at most "
            f"{MAX_SCORED_TOKENS}; shorten it",
            code="invalid_value",
            param="prompt",
        )
    return msgspec.structs.replace(prompt, hashes=b"")


def _tool_calls(params: GenerationParams, version: ModelVersion, adapter: str) -> Format | None:
    """Return how calls of tools are written; raises RequestError if the model takes no tools."""
    if params.tools is None or not params.calls_tools:
        return None
    taught = _check_takes_tools(version, adapter)
    forms: dict[str, Format] = {"required": "array", "named": "named"}
    return forms.get(params.tools.choice, taught)


def _check_takes_tools(version: ModelVersion, adapter: str) -> Format:
    """Return the form of calls that the chat template teaches; raises RequestError for none."""
    taught = version.form_of_calls(adapter)
    if taught is None:
        raise RequestError(
            "tools: the chat template of this model takes none; leave them out",
            code="unsupported_parameter",
            param="tools",
        )
    return taught


def _check_bias(params: GenerationParams, vocab: int) -> None:
    for token, value in params.sampling.logit_bias.items():
        if token >= vocab:
            field = "logit_bias" if value <= MAX_BIAS else "allowed_token_ids"
            raise RequestError(
                f"{field} has the token {token}: this model's vocabulary has {vocab} tokens",
                code="invalid_value",
                param=field,
            )
