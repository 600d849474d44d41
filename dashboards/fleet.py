"""Dashboard of the fleet: replicas and KVP groups, KV memory, KV moves, GPUs."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import Query, count_rate, level, quantiles, rate

TOKENS = " + ".join(rate(f"medha_{kind}_tokens_total", "model") for kind in ("prompt", "output"))
HITS, ASKED = "medha_prefix_cache_hits_total", "medha_prefix_cache_queries_total"
KEPT = "exported_namespace"
USED = level("medha_kv_pages", "model", state="used")


def _gpu(title: str, description: str, metric: str, unit: str) -> Panel:
    # Its `namespace` is that of the pod that has the GPU, unless Prometheus puts its own over it.
    own, kept = (f'{metric}{{{label}=~"$namespace"}}' for label in ("namespace", KEPT))
    expr = f"avg by (Hostname, gpu) ({own} or {kept})"
    return Panel(
        title=title,
        description=f"{description} From NVIDIA's DCGM exporter, where it runs.",
        unit=unit,
        width=8,
        queries=(Query(expr, "{{Hostname}} GPU {{gpu}}"),),
    )


BOARD = Board(
    "fleet",
    "Medha / Fleet",
    "What runs, is there room, does KV move?",
    (
        Row(
            "Replicas and groups",
            (
                Panel(
                    title="Replicas",
                    description="As routers count them: serving, draining, joining. The lowest "
                    "count of any router.",
                    queries=(
                        Query(
                            level("medha_replicas", "model", "state", how="min"),
                            "{{model}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    title="KVP groups",
                    description="Groups by state, and how many should run.",
                    queries=(
                        Query(level("medha_kvp_groups", "state"), "{{state}}"),
                        Query(level("medha_kvp_wanted_groups"), "wanted"),
                    ),
                ),
                Panel(
                    title="Generations",
                    description="Each change of a replica's running groups increments "
                    "it: steps are growth, shrinking or a loss.",
                    queries=(
                        Query(
                            level("medha_kvp_generation", "model", "instance", how="max"),
                            "{{model}} {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    title="Restarts of ranks and processes",
                    unit="ops",
                    description="Ranks that controllers lost, and processes that pods restarted.",
                    queries=(
                        Query(rate("medha_rank_restarts_total", "model"), "{{model}} ranks"),
                        Query(rate("medha_pod_restarts_total", "program"), "pods' {{program}}"),
                    ),
                ),
                Panel(
                    title="Requests moved",
                    unit="reqps",
                    description="Requests that restarted on another replica after theirs was lost.",
                    queries=(Query(rate("medha_requests_moved_total", "model"), "{{model}}"),),
                ),
                Panel(
                    title="Messages not understood",
                    unit="ops",
                    description="Messages from peers that did not "
                    "decode: another version, or an unknown peer.",
                    queries=(
                        Query(rate("medha_messages_rejected_total", "peer"), "from a {{peer}}"),
                    ),
                ),
            ),
        ),
        Row(
            "Devices",
            (
                Panel(
                    title="Devices in use",
                    kind="areas",
                    description="Devices that replicas hold, one per rank, busy or not.",
                    queries=(Query(level("medha_ranks", "model"), "{{model}}"),),
                ),
                Panel(
                    title="Device-seconds per token",
                    unit="s",
                    description="GPU-seconds that a prompt or output token costs, idle ones "
                    "included: what a token is charged with.",
                    queries=(
                        Query(f"{level('medha_ranks', 'model')} / ({TOKENS} > 0)", "{{model}}"),
                    ),
                ),
            ),
        ),
        Row(
            "KV pages",
            (
                Panel(
                    title="Pages in use",
                    unit="percentunit",
                    description="Share of pages that sequences hold.",
                    queries=(
                        Query(f"{USED} / ({level('medha_kv_pages', 'model')} > 0)", "{{model}}"),
                    ),
                ),
                Panel(
                    title="Pages by group",
                    kind="areas",
                    description="Used, cached and free pages of each KVP group.",
                    queries=(
                        Query(
                            level("medha_kv_pages", "group", "state"), "group {{group}} {{state}}"
                        ),
                    ),
                ),
                Panel(
                    title="Prefix cache",
                    unit="percentunit",
                    description="Share of prompt tokens that the prefix cache held.",
                    queries=(
                        Query(f"{rate(HITS, 'model')} / ({rate(ASKED, 'model')} > 0)", "{{model}}"),
                    ),
                ),
                Panel(
                    title="Prompt tokens, and those found",
                    description="Tokens per second looked up in the prefix cache, and found there.",
                    queries=(Query(rate(ASKED), "looked up"), Query(rate(HITS), "found")),
                ),
            ),
        ),
        Row(
            "KV on the move",
            (
                Panel(
                    title="KV moved",
                    width=8,
                    unit="Bps",
                    description="Bytes per second of KV pages moved between groups.",
                    queries=(Query(rate("medha_kv_transfer_bytes_total", "model"), "{{model}}"),),
                ),
                Panel(
                    title="Moves",
                    width=8,
                    unit="ops",
                    description="Moves of KV pages that succeeded, and that failed, by reason.",
                    queries=(
                        Query(count_rate("medha_kv_transfer_seconds"), "succeeded"),
                        Query(
                            rate("medha_kv_transfer_failures_total", "reason"), "failed: {{reason}}"
                        ),
                    ),
                ),
                Panel(
                    title="Time of a move",
                    width=8,
                    unit="s",
                    description="Time from the decision to move pages to the end of their copy.",
                    queries=quantiles("medha_kv_transfer_seconds", "model"),
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                _gpu(
                    "GPUs at work",
                    "Share of time in which a kernel ran.",
                    "DCGM_FI_DEV_GPU_UTIL",
                    "percent",
                ),
                _gpu("GPU memory", "Memory in use.", "DCGM_FI_DEV_FB_USED", "decmbytes"),
                _gpu("GPU power", "Power drawn.", "DCGM_FI_DEV_POWER_USAGE", "watt"),
            ),
        ),
    ),
)
