"""MedhaReplica as typed values: parse, default, check; one clear sentence per broken rule.

`parse` takes the mapping that a YAML or JSON document holds. It opens no file and no
connection; checks that need the model, such as that `tp` divides its heads, happen elsewhere.
"""

from medha.spec.quantities import seconds, to_bytes, to_number
from medha.spec.reading import parse, parse_all
from medha.spec.values import (
    API_VERSION,
    API_VERSIONS,
    KIND,
    AdapterSpec,
    AutoscalingSpec,
    BatchBudgetSpec,
    CheckpointSource,
    DeviceSpec,
    EngineSpec,
    KvpSpec,
    MedhaReplica,
    MedhaReplicaSpec,
    ModelSpec,
    NetworkSpec,
    ParallelismSpec,
    PlacementSpec,
    SchedulingSpec,
    SloTargets,
    TemplateSpec,
)

__all__ = [
    "API_VERSION",
    "API_VERSIONS",
    "KIND",
    "AdapterSpec",
    "AutoscalingSpec",
    "BatchBudgetSpec",
    "CheckpointSource",
    "DeviceSpec",
    "EngineSpec",
    "KvpSpec",
    "MedhaReplica",
    "MedhaReplicaSpec",
    "ModelSpec",
    "NetworkSpec",
    "ParallelismSpec",
    "PlacementSpec",
    "SchedulingSpec",
    "SloTargets",
    "TemplateSpec",
    "parse",
    "parse_all",
    "seconds",
    "to_bytes",
    "to_number",
]
