"""Exception tree, split by whose fault an error is and who can fix it.

    MedhaError
    ├── UserError            the user or client can fix it: exit code 2, HTTP 4xx
    │   ├── SpecError        a field of a MedhaReplica or a setting
    │   ├── CheckpointError  a model file: missing, corrupt, or of another shape
    │   ├── SetupError       this machine: a port in use, no GPU, a missing package
    │   ├── UserErrors       several of these
    │   └── RequestError     a request's body or header
    ├── Refusal              admission refuses and names the earliest feasible time: 400, 429 or 503
    ├── ProtocolError        a peer sent an invalid message
    └── EngineError          a rank, a transfer or a collective failed while serving

Every message names the field, its value, the expectation and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class MedhaError(Exception):
    """Root of all errors that Medha raises."""


class UserError(MedhaError):
    """Error that the user or client can fix."""


class SpecError(UserError):
    """A field breaks a rule: `field is value: expected; remedy`.

    `field` is a dotted path such as `spec.parallelism.tp`.
    """

    def __init__(self, field: str, value: object, expected: str, remedy: str) -> None:
        self.field, self.value, self.expected, self.remedy = field, value, expected, remedy
        super().__init__(f"{field} is {_shown(value)}: {expected}; {remedy}")


class CheckpointError(UserError):
    """A model file is missing, corrupt or of another shape; the message names file and remedy."""


class SetupError(UserError):
    """A missing resource of the machine: a free port, a GPU, a package."""


class UserErrors(UserError):
    """Several errors that the user can fix, a line each."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in errors))


class RequestError(UserError):
    """An invalid request.

    `status` is the HTTP status (4xx), `code` and `param` follow OpenAI's error object.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        self.status, self.code, self.param = status, code, param
        super().__init__(message)


class Refusal(MedhaError):
    """Refusal by admission.

    `code` is one of `deadline_infeasible`, `overloaded`, `rate_limit_exceeded`, `tpot_infeasible`,
    `context_length_exceeded`, `no_replica`; `earliest_ttft_s` is the TTFT that could be promised
    (seconds after arrival, None if unknown), `idle_ttft_s` the TTFT of an idle replica,
    `least_tpot_s` the smallest TPOT target that is accepted at this prompt length;
    `retry_after_s` the time until capacity is expected.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        earliest_ttft_s: float | None = None,
        idle_ttft_s: float | None = None,
        least_tpot_s: float | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.code, self.retry_after_s, self.least_tpot_s = code, retry_after_s, least_tpot_s
        self.earliest_ttft_s, self.idle_ttft_s = earliest_ttft_s, idle_ttft_s
        super().__init__(message)


class ProtocolError(MedhaError):
    """A peer sent a message that is malformed, too long, out of order or of another version."""


class EngineError(MedhaError):
    """A rank, a transfer or a collective failed while serving."""


def _shown(value: object) -> str:
    plain = isinstance(value, str) and value != "" and value.isprintable()
    text = str(value) if plain else repr(value)
    return text if len(text) <= 160 else f"{text[:78]}...{text[-79:]}"
