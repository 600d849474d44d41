"""What runs where, is there room, and does KV move as it should?"""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import Query, count_rate, level, quantiles, rate

HITS, ASKED = "medha_prefix_cache_hits_total", "medha_prefix_cache_queries_total"
KEPT = "exported_namespace"
USED = level("medha_kv_pages", "model", state="used")


def _gpu(title: str, says: str, metric: str, unit: str) -> Panel:
    # Its `namespace` is that of the pod that has the GPU, unless Prometheus puts its own over it.
    own, kept = (f'{metric}{{{label}=~"$namespace"}}' for label in ("namespace", KEPT))
    expr = f"avg by (Hostname, gpu) ({own} or {kept})"
    return Panel(title=title, says=f"{says} From NVIDIA's DCGM exporter, where it runs.",
                 unit=unit, width=8,
                 queries=(Query(expr, "{{Hostname}} GPU {{gpu}}"),))  # fmt: skip


BOARD = Board("fleet", "Medha / Fleet", "What runs, is there room, does KV move?", (
    Row("Replicas and groups", (
        Panel(title="Replicas", says="As routers know them: serving, draining, joining. The lowest "
              "count of any router.",
              queries=(Query(level("medha_replicas", "model", "state", how="min"),
                             "{{model}} {{state}}"),)),
        Panel(title="KVP groups", says="Groups by state, and how many should run.", queries=(
            Query(level("medha_kvp_groups", "state"), "{{state}}"),
            Query(level("medha_kvp_wanted_groups"), "wanted"))),
        Panel(title="Generations", says="Each change of a replica's running groups makes a new "
              "one: steps are growth, shrinking or a loss.",
              queries=(Query(level("medha_kvp_generation", "model", "instance", how="max"),
                             "{{model}} {{instance}}"),)),
        Panel(title="Ranks and programs started anew", unit="ops", says="Ranks that controllers "
              "lost, and programs that pods started again.", queries=(
                  Query(rate("medha_rank_restarts_total", "model"), "{{model}} ranks"),
                  Query(rate("medha_pod_restarts_total", "program"), "pods' {{program}}"))),
        Panel(title="Requests moved", unit="reqps", says="Requests that began anew on another "
              "replica, since theirs was lost.",
              queries=(Query(rate("medha_requests_moved_total", "model"), "{{model}}"),)),
        Panel(title="Messages not understood", unit="ops", says="Messages from peers that did not "
              "decode: versions differ, or a stranger speaks.",
              queries=(Query(rate("medha_messages_rejected_total", "peer"), "from a {{peer}}"),)),
    )),
    Row("KV pages", (
        Panel(title="Pages in use", unit="percentunit", says="Pages that sequences hold, over all.",
              queries=(Query(f"{USED} / ({level('medha_kv_pages', 'model')} > 0)", "{{model}}"),)),
        Panel(title="Pages by group", kind="areas", says="Used, cached and free pages of each "
              "KVP group.",
              queries=(Query(level("medha_kv_pages", "group", "state"),
                             "group {{group}} {{state}}"),)),
        Panel(title="Prefix cache", unit="percentunit", says="Share of prompt tokens that were "
              "found in the cache and not computed.",
              queries=(Query(f"{rate(HITS, 'model')} / ({rate(ASKED, 'model')} > 0)",
                             "{{model}}"),)),
        Panel(title="Prompt tokens, and those found", says="Tokens per second looked up in the "
              "prefix cache, and found there.",
              queries=(Query(rate(ASKED), "looked up"), Query(rate(HITS), "found"))),
    )),
    Row("KV on the move", (
        Panel(title="KV moved", width=8, unit="Bps",
              says="Bytes per second of KV pages that went from "
              "group to group.", queries=(Query(rate("medha_kv_transfer_bytes_total", "model"),
                                          "{{model}}"),)),
        Panel(title="Moves", width=8, unit="ops",
              says="Moves of KV pages that succeeded, and that failed, "
              "by reason.", queries=(
                  Query(count_rate("medha_kv_transfer_seconds"), "succeeded"),
                  Query(rate("medha_kv_transfer_failures_total", "reason"),
                        "failed: {{reason}}"))),
        Panel(title="Time of a move", width=8, unit="s",
              says="From the decision to move pages until their "
              "copy stands.", queries=quantiles("medha_kv_transfer_seconds", "model")),
    )),
    Row("GPUs", (
        _gpu("GPUs at work", "Share of time in which a kernel ran.", "DCGM_FI_DEV_GPU_UTIL",
             "percent"),
        _gpu("GPU memory", "Memory in use.", "DCGM_FI_DEV_FB_USED", "decmbytes"),
        _gpu("GPU power", "Power drawn.", "DCGM_FI_DEV_POWER_USAGE", "watt"),
    )),
))  # fmt: skip
