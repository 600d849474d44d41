"""A client's request of one generation, as the router keeps it."""

from __future__ import annotations

from collections.abc import Sequence

from medha.request import Request, SloClass
from medha_router.auth import Client
from medha_router.generation import ClientRequest, Generation
from medha_router.protocol import read_completion
from medha_router.tokenization.detokenizer import OutputStream, Vocabulary
from medha_router.tokenization.wire import Prompt


def new_generation(classes: Sequence[SloClass], vocabulary: Vocabulary, version: str) -> Generation:
    """Return the generation of a completion of four tokens for the model `tiny`."""
    params = read_completion(b'{"model": "tiny", "prompt": "say ok"}')
    request = ClientRequest(
        id="a",
        params=params,
        model="tiny",
        slo_class=classes[0],
        client=Client(),
        arrival_s=0.0,
        created=0,
    )
    generation = Generation(
        client_request=request,
        index=0,
        prompt=Prompt(bytes(16), b""),
        salt=b"",
        request=Request(id="a.0", arrival_s=0.0, prompt_tokens=4, max_output_tokens=99),
        sampling=params.sampling,
        output=OutputStream(vocabulary),
        version=version,
        least_tpot_s=0.0,
    )
    request.generations.append(generation)
    return generation
