"""Does the operator do its work, and are the MedhaReplicas as they should be?"""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import Query, count_rate, level, quantiles, rate

CONDITION = "medha_replica_condition"

BOARD = Board("operator", "Medha / Operator", "Does the operator do its work?", (
    Row("MedhaReplicas", (
        Panel(title="Not Ready", kind="number", width=4, says="MedhaReplicas whose condition Ready "
              "is false.", queries=(Query(f"sum(1 - {CONDITION}{{namespace=~\"$namespace\", "
                                          'condition="Ready"})', "not Ready"),)),
        Panel(title="Ready", kind="states", width=8, says="The condition Ready of each "
              "MedhaReplica.",
              queries=(Query(level(CONDITION, "namespace", "name", how="min", condition="Ready"),
                             "{{namespace}}/{{name}}"),)),
        Panel(title="Replicas wanted", says="Replicas that autoscaling wants, of each MedhaReplica "
              "that it scales.",
              queries=(Query(level("medha_desired_replicas", "namespace", "name", how="max"),
                             "{{namespace}}/{{name}}"),)),
        Panel(title="Conditions", kind="states", width=24, height=12,
              says="Every condition of every MedhaReplica. Some "
              "are good when true (Ready), some when false.",
              queries=(Query(level(CONDITION, "namespace", "name", "condition", how="min"),
                             "{{namespace}}/{{name}} {{condition}}"),)),
    )),
    Row("The operator", (
        Panel(title="Who leads", kind="states", says="One operator writes; the others stand by.",
              queries=(Query(level("medha_operator_leading", "instance", how="max"),
                             "{{instance}}"),)),
        Panel(title="MedhaReplicas that wait", says="To be looked at. It should fall to 0 again "
              "and again.", queries=(Query(level("medha_operator_queue_depth", "instance"),
                                       "{{instance}}"),)),
        Panel(title="Behind", unit="s", says="For how long the first MedhaReplica has been due to "
              "be looked at. An operator that keeps up is hardly ever behind.",
              queries=(Query(level("medha_operator_behind_seconds", "instance", how="max"),
                             "{{instance}}"),)),
        Panel(title="Time of a reconciliation", unit="s", says="One look at one MedhaReplica, and "
              "what it did.", queries=quantiles("medha_operator_reconcile_seconds")),
        Panel(title="Reconciliations", width=8, unit="ops",
              says="Looks per second, and those that failed, "
              "by kind.", queries=(
                  Query(count_rate("medha_operator_reconcile_seconds"), "all"),
                  Query(rate("medha_operator_errors_total", "kind"), "failed: {{kind}}"))),
        Panel(title="Writes", width=8, unit="ops", says="Writes to the API, by kind of object.",
              queries=(Query(rate("medha_operator_writes_total", "kind", "verb"),
                             "{{verb}} {{kind}}"),)),
        Panel(title="Answers to writes", width=8, unit="ops",
              says="What the API answered: 409 is somebody "
              "who was faster, 4xx otherwise a refusal, 5xx a failure, 0 no answer.",
              queries=(Query(rate("medha_operator_writes_total", "code"), "{{code}}"),)),
    )),
))  # fmt: skip
