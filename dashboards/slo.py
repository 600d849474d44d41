"""Dashboard of SLOs: latencies, attainment, promises and burn rate of the error budget."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import STEP, WHOLE, Query, heat, increase, quantile, quantiles, rate, share

MET, MISSED = "medha_slo_attained_total", "medha_slo_missed_total"
BY_TENANT = "medha_tenant_requests_total"


def _latency(what: str, name: str, description: str) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            title=f"{what} by {label}",
            description=f"{description} By {words}.",
            unit="s",
            queries=quantiles(name, label),
        )
        for label, words in (("class", "class of request"), ("length", "length of the prompt"))
    )


def _burn() -> Panel:
    queries = tuple(
        Query(
            f"({share(MISSED, MET, by=('class',), over=over)}) / (1 - $objective)",
            f"{{{{class}}}} over {words}",
        )
        for over, words in ((STEP, "a point"), ("1h", "1 h"), ("6h", "6 h"))
    )
    return Panel(
        title="Error budget burn",
        description="Spending of the error budget, relative to the allowed rate: at 1 it lasts "
        "exactly its period. The budget is the share of misses that the objective allows.",
        queries=queries,
    )


BOARD = Board(
    "slo",
    "Medha / SLO",
    "Do users get the promised latencies?",
    (
        Row(
            "Is the word kept?",
            (
                Panel(
                    title="Attainment",
                    kind="number",
                    unit="percentunit",
                    width=4,
                    description="Share of the requests of the time shown that met their SLO; "
                    "refused ones count "
                    "as missed.",
                    queries=(Query(share(MET, MISSED, over=WHOLE), "attained"),),
                ),
                Panel(
                    title="Requests",
                    kind="number",
                    width=4,
                    description="Requests that ended in the time shown.",
                    queries=(Query(increase("medha_requests_total"), "ended"),),
                ),
                Panel(
                    title="Promises broken",
                    kind="number",
                    width=4,
                    description="Promises broken in the time shown: the first token was late.",
                    queries=(Query(increase("medha_promises_total", outcome="broken"), "broken"),),
                ),
                Panel(
                    title="Requests by outcome",
                    kind="areas",
                    unit="reqps",
                    description="Requests that ended, "
                    "by how: finished, refused, failed, or left by their client.",
                    queries=(Query(rate("medha_requests_total", "outcome"), "{{outcome}}"),),
                ),
                Panel(
                    title="Attainment by class",
                    unit="percentunit",
                    description="Share of requests that met their SLO, by class.",
                    queries=(Query(share(MET, MISSED, by=("class",)), "{{class}}"),),
                ),
                Panel(
                    title="Attainment by length",
                    unit="percentunit",
                    description="Share of requests that met "
                    "their SLO, by length of the prompt: long prompts must not pay for "
                    "short ones, nor "
                    "short ones for long ones.",
                    queries=(Query(share(MET, MISSED, by=("length",)), "{{length}}"),),
                ),
                _burn(),
                Panel(
                    title="Promises",
                    unit="reqps",
                    description="Deadlines promised, kept and broken.",
                    queries=(Query(rate("medha_promises_total", "outcome"), "{{outcome}}"),),
                ),
                Panel(
                    title="Margin of promises",
                    kind="heat",
                    unit="s",
                    description="How long before its "
                    "deadline a promised request's first token came; below zero the "
                    "promise was broken.",
                    queries=(heat("medha_promise_margin_seconds"),),
                ),
                Panel(
                    title="Refused",
                    unit="reqps",
                    description="Requests refused, by reason.",
                    queries=(Query(rate("medha_requests_refused_total", "reason"), "{{reason}}"),),
                ),
            ),
        ),
        Row(
            "First token", _latency("TTFT", "medha_request_ttft_seconds", "Arrival to first token.")
        ),
        Row(
            "Every further token",
            (
                *_latency(
                    "TPOT", "medha_request_tpot_seconds", "Mean time per token after the first."
                ),
                Panel(
                    title="Gap between tokens",
                    unit="s",
                    description="Gap between tokens of a stream; a long gap is a visible stutter.",
                    queries=quantiles("medha_inter_token_seconds", "class"),
                ),
                Panel(
                    title="Worst gap by length",
                    unit="s",
                    description="99th percentile of the gap between tokens, by prompt length.",
                    queries=(
                        Query(
                            quantile(0.99, "medha_inter_token_seconds", "length"), "{{length}} p99"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "The whole answer",
            _latency("End to end", "medha_request_e2e_seconds", "Arrival to last token."),
        ),
        Row(
            "Tenants",
            (
                Panel(
                    title="Attainment by tenant",
                    unit="percentunit",
                    description="Share of a tenant's requests that met their SLO; refused ones "
                    "count as missed.",
                    queries=(
                        Query(
                            f"{rate(BY_TENANT, 'tenant', outcome='attained')}"
                            f" / ({rate(BY_TENANT, 'tenant')} > 0)",
                            "tenant {{tenant}}",
                        ),
                    ),
                ),
                Panel(
                    title="Requests by tenant",
                    kind="areas",
                    unit="reqps",
                    description="Requests per second that ended, by tenant and outcome.",
                    queries=(
                        Query(
                            rate(BY_TENANT, "tenant", "outcome"), "tenant {{tenant}} {{outcome}}"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Tokens",
            (
                Panel(
                    title="Prompt tokens",
                    kind="areas",
                    description="Prompt tokens per second of accepted requests, by tenant.",
                    queries=(
                        Query(rate("medha_prompt_tokens_total", "tenant"), "tenant {{tenant}}"),
                    ),
                ),
                Panel(
                    title="Output tokens",
                    kind="areas",
                    description="Tokens per second sent to clients, by tenant.",
                    queries=(
                        Query(rate("medha_output_tokens_total", "tenant"), "tenant {{tenant}}"),
                    ),
                ),
            ),
        ),
    ),
)
