"""Dashboard of the operator: conditions of MedhaReplicas, work queue, reconciliations, writes."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import Query, count_rate, increase, level, quantiles, rate

CONDITION = "medha_replica_condition"
FAULTS = ("PlacementUnsatisfiable", "RestartBudgetExhausted", "Stalled")
"""Conditions that are good when false."""
WORK = ("Draining", "KvpGrowing", "Reconciling")
"""Conditions that are true while the operator works on the resource, and end by themselves."""

BOARD = Board(
    "operator",
    "Medha / Operator",
    "Does the operator do its work?",
    (
        Row(
            "MedhaReplicas",
            (
                Panel(
                    title="Not Ready",
                    kind="number",
                    width=4,
                    description="MedhaReplicas whose condition Ready is false.",
                    queries=(
                        Query(
                            f'sum(1 - {CONDITION}{{namespace=~"$namespace", condition="Ready"}})',
                            "not Ready",
                        ),
                    ),
                ),
                Panel(
                    title="Ready",
                    kind="states",
                    width=8,
                    description="The condition Ready of each MedhaReplica.",
                    queries=(
                        Query(
                            level(CONDITION, "namespace", "name", how="min", condition="Ready"),
                            "{{namespace}}/{{name}}",
                        ),
                    ),
                ),
                Panel(
                    title="Replicas wanted",
                    description="Desired replicas of each autoscaled MedhaReplica.",
                    queries=(
                        Query(
                            level("medha_desired_replicas", "namespace", "name", how="max"),
                            "{{namespace}}/{{name}}",
                        ),
                    ),
                ),
                Panel(
                    title="Autoscaling at its maximum",
                    kind="states",
                    faults=(".+",),
                    description="MedhaReplicas that would get more replicas if maxReplicas were "
                    "higher.",
                    queries=(
                        Query(
                            level("medha_autoscaling_at_maximum", "namespace", "name", how="max"),
                            "{{namespace}}/{{name}}",
                        ),
                    ),
                ),
                Panel(
                    title="Restarts of groups",
                    description="KVP groups that failed and were restarted, in the time shown.",
                    queries=(
                        Query(
                            increase("medha_group_restarts_total", "namespace", "name"),
                            "{{namespace}}/{{name}}",
                        ),
                    ),
                ),
                Panel(
                    title="Conditions",
                    kind="states",
                    width=24,
                    height=12,
                    faults=FAULTS,
                    work=WORK,
                    description="Every condition of every MedhaReplica: green is good, "
                    "yellow is work that ends by itself, red needs a person.",
                    queries=(
                        Query(
                            level(CONDITION, "namespace", "name", "condition", how="min"),
                            "{{namespace}}/{{name}} {{condition}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "The operator",
            (
                Panel(
                    title="Who leads",
                    kind="states",
                    description="The leader writes; the other operators stand by.",
                    queries=(
                        Query(
                            level("medha_operator_leading", "instance", how="max"), "{{instance}}"
                        ),
                    ),
                ),
                Panel(
                    title="MedhaReplicas that wait",
                    description="MedhaReplicas to reconcile. It should often fall to 0.",
                    queries=(
                        Query(level("medha_operator_queue_depth", "instance"), "{{instance}}"),
                    ),
                ),
                Panel(
                    title="Behind",
                    unit="s",
                    description="How long the oldest MedhaReplica in the queue has been "
                    "due. An operator that keeps up is rarely behind.",
                    queries=(
                        Query(
                            level("medha_operator_behind_seconds", "instance", how="max"),
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    title="Time of a reconciliation",
                    unit="s",
                    description="Duration of one reconciliation of a MedhaReplica.",
                    queries=quantiles("medha_operator_reconcile_seconds"),
                ),
                Panel(
                    title="Reconciliations",
                    width=8,
                    unit="ops",
                    description="Reconciliations per second, and failed ones by kind.",
                    queries=(
                        Query(count_rate("medha_operator_reconcile_seconds"), "all"),
                        Query(rate("medha_operator_errors_total", "kind"), "failed: {{kind}}"),
                    ),
                ),
                Panel(
                    title="Writes",
                    width=8,
                    unit="ops",
                    description="Writes to the API, by kind of object.",
                    queries=(
                        Query(
                            rate("medha_operator_writes_total", "kind", "verb"), "{{verb}} {{kind}}"
                        ),
                    ),
                ),
                Panel(
                    title="Answers to writes",
                    width=8,
                    unit="ops",
                    description="Status codes of the API server: 409 is a "
                    "conflict, other 4xx a refusal, 5xx a failure, 0 no answer.",
                    queries=(Query(rate("medha_operator_writes_total", "code"), "{{code}}"),),
                ),
            ),
        ),
    ),
)
