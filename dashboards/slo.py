"""Do users get what they were told? Latencies, attainment, and how fast the budget burns."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import STEP, WHOLE, Query, heat, increase, quantile, quantiles, rate, share

MET, MISSED = "medha_slo_attained_total", "medha_slo_missed_total"


def _latency(what: str, name: str, says: str) -> tuple[Panel, ...]:
    return tuple(
        Panel(title=f"{what} by {label}", says=f"{says} By {words}.", unit="s",
              queries=quantiles(name, label))
        for label, words in (("class", "class of request"), ("length", "length of the prompt"))
    )  # fmt: skip


def _burn() -> Panel:
    queries = tuple(
        Query(f"({share(MISSED, MET, by=('class',), over=over)}) / (1 - $objective)",
              f"{{{{class}}}} over {words}")
        for over, words in ((STEP, "a point"), ("1h", "1 h"), ("6h", "6 h"))
    )  # fmt: skip
    return Panel(
        title="Error budget burn",
        says="How many times faster than allowed the error budget is spent: at 1 it lasts exactly "
        "as long as it should. The budget is what the objective above leaves for misses.",
        queries=queries,
    )


BOARD = Board("slo", "Medha / SLO", "Do users get what they were told?", (
    Row("Is the word kept?", (
        Panel(title="Attainment", kind="number", unit="percentunit", width=4,
              says="Share of the requests of the time shown that met their SLO; refused ones count "
              "as missed.", queries=(Query(share(MET, MISSED, over=WHOLE), "attained"),)),
        Panel(title="Requests", kind="number", width=4, says="Requests that ended in the time "
              "shown.", queries=(Query(increase("medha_requests_total"), "ended"),)),
        Panel(title="Promises broken", kind="number", width=4, says="Promised deadlines of the "
              "time shown that passed before the first token.",
              queries=(Query(increase("medha_promises_total", outcome="broken"), "broken"),)),
        Panel(title="Requests by outcome", kind="areas", unit="reqps", says="Requests that ended, "
              "by how: finished, refused, failed, or left by their client.",
              queries=(Query(rate("medha_requests_total", "outcome"), "{{outcome}}"),)),
        Panel(title="Attainment by class", unit="percentunit", says="Share of requests that met "
              "their SLO, by class.",
              queries=(Query(share(MET, MISSED, by=("class",)), "{{class}}"),)),
        Panel(title="Attainment by length", unit="percentunit", says="Share of requests that met "
              "their SLO, by length of the prompt: long prompts must not pay for short ones, nor "
              "short ones for long ones.",
              queries=(Query(share(MET, MISSED, by=("length",)), "{{length}}"),)),
        _burn(),
        Panel(title="Promises", unit="reqps", says="Deadlines promised, kept and broken.",
              queries=(Query(rate("medha_promises_total", "outcome"), "{{outcome}}"),)),
        Panel(title="Margin of promises", kind="heat", unit="s", says="How long before its "
              "deadline a promised request's first token came; below zero the promise was broken.",
              queries=(heat("medha_promise_margin_seconds"),)),
        Panel(title="Refused", unit="reqps", says="Requests refused, by reason.",
              queries=(Query(rate("medha_requests_refused_total", "reason"), "{{reason}}"),)),
    )),
    Row("First token", _latency("TTFT", "medha_request_ttft_seconds", "Arrival to first token.")),
    Row("Every further token", (
        *_latency("TPOT", "medha_request_tpot_seconds", "Mean time per token after the first."),
        Panel(title="Gap between tokens", unit="s", says="Between two tokens of a stream: what a "
              "reader sees as a stutter.", queries=quantiles("medha_inter_token_seconds", "class")),
        Panel(title="Worst gap by length", unit="s", says="99th percentile of the gap between two "
              "tokens, by length of the prompt.",
              queries=(Query(quantile(0.99, "medha_inter_token_seconds", "length"),
                             "{{length}} p99"),)),
    )),
    Row("The whole answer", _latency("End to end", "medha_request_e2e_seconds",
                                     "Arrival to last token.")),
    Row("Tokens", (
        Panel(title="Prompt tokens", kind="areas", says="Prompt tokens per second of accepted "
              "requests, by tenant.",
              queries=(Query(rate("medha_prompt_tokens_total", "tenant"), "tenant {{tenant}}"),)),
        Panel(title="Output tokens", kind="areas", says="Tokens per second sent to clients, by "
              "tenant.", queries=(Query(rate("medha_output_tokens_total", "tenant"),
                                        "tenant {{tenant}}"),)),
    )),
))  # fmt: skip
