"""MedhaReplica as typed values: parse, default, check; each broken rule in one clear sentence.

`parse` takes the mapping that a YAML or JSON document holds. It touches no file and no network:
whether the model exists, or `tp` divides its heads, is for who can see the model.
"""

from medha.spec.quantities import seconds, to_bytes, to_number
from medha.spec.reading import parse, parse_all
from medha.spec.values import (
    API_VERSION,
    KIND,
    Autoscaling,
    BatchBudget,
    Device,
    Engine,
    Kvp,
    MedhaReplica,
    Model,
    Parallelism,
    Placement,
    Scheduling,
    SloTargets,
    Source,
    Spec,
    Template,
)

__all__ = [
    "API_VERSION",
    "KIND",
    "Autoscaling",
    "BatchBudget",
    "Device",
    "Engine",
    "Kvp",
    "MedhaReplica",
    "Model",
    "Parallelism",
    "Placement",
    "Scheduling",
    "SloTargets",
    "Source",
    "Spec",
    "Template",
    "parse",
    "parse_all",
    "seconds",
    "to_bytes",
    "to_number",
]
