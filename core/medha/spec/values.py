"""The fields of a MedhaReplica with their bounds and defaults, in the order that people write them.

Field names are the resource's, in snake case here and camel case in YAML. Durations and numbers
stay text, as the API holds them; properties with a unit in their name give the values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from medha.request import Slo, SloClass
from medha.spec.quantities import Duration, Number, Size, seconds, to_bytes, to_number
from medha.topology import Topology

API_VERSION = "medha.dev/v1alpha1"
KIND = "MedhaReplica"

NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
MODEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$"

Name = Annotated[
    str,
    msgspec.Meta(
        pattern=NAME, max_length=40,
        description="lower-case letters, digits and dashes, at most 40", examples=["llama-70b"],
    ),
]  # fmt: skip
ModelName = Annotated[
    str,
    msgspec.Meta(
        pattern=MODEL_NAME, max_length=200,
        description="letters, digits and . _ : / -, at most 200", examples=["llama-3-70b"],
    ),
]  # fmt: skip
Path = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=1024, description="a path of 1 to 1024 characters",
        examples=["models/llama-3-70b"],
    ),
]  # fmt: skip
Text = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=512, description="text of 1 to 512 characters", examples=["a name"]
    ),
]
SubPath = Annotated[
    str,
    msgspec.Meta(max_length=1024, description="a path of at most 1024 characters", examples=["v1"]),
]
LabelValue = Annotated[
    str,
    msgspec.Meta(max_length=63, description="text of at most 63 characters", examples=["gpu"]),
]
Note = Annotated[
    str,
    msgspec.Meta(max_length=4096, description="text of at most 4096 characters", examples=["yes"]),
]
Labels = Annotated[dict[str, LabelValue], msgspec.Meta(max_length=32)]
Piece = dict[str, Any]  # of a pod, as Kubernetes defines it
Pieces = Annotated[tuple[Piece, ...], msgspec.Meta(max_length=32)]
Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=12_000_000)]
Switch = Literal["Enabled", "Disabled"]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What all parts of the resource share: frozen, camel case outside, unknown fields refused."""


class HostPath(Part, frozen=True):
    """A directory of the machine; `medha up` takes a relative one from beside the file."""

    path: Path


class Claim(Part, frozen=True):
    """A directory on a persistent volume."""

    claim_name: Text
    path: SubPath = ""


class Image(Part, frozen=True):
    """A model inside a container image, mounted as an image volume."""

    reference: Text
    path: SubPath = ""


class Source(Part, frozen=True):
    """Where the checkpoint is: exactly one of these."""

    host_path: HostPath | None = None
    pvc: Claim | None = None
    image: Image | None = None
    uri: Text | None = None


class Model(Part, frozen=True):
    """`dtype` Auto: bfloat16 on Cuda, float32 on Cpu. `kvCacheDtype` auto: as `dtype`."""

    name: ModelName
    source: Source
    max_context_tokens: Tokens
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"


class Device(Part, frozen=True):
    """`resource` is what a pod asks of Kubernetes per rank; a Cpu rank asks for none."""

    kind: Literal["Cuda", "Cpu"] = "Cuda"
    resource: Text | None = None

    @property
    def resource_name(self) -> str:
        return self.resource or ("nvidia.com/gpu" if self.kind == "Cuda" else "")


class Kvp(Part, frozen=True):
    """KVP groups: at least `min` run; more come, up to `max`, as contexts outgrow them.

    `tokensPerGroup` of one sequence go into a group before the next joins; absent: predicted.
    """

    min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    tokens_per_group: Tokens | None = None


class Parallelism(Part, frozen=True):
    """Devices per replica = tp × spp × KVP groups."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    spp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    kvp: Kvp = Kvp()


class Ttft(Part, frozen=True):
    """TTFT deadline: max(floor, multiplier × predicted prefill time on an idle replica)."""

    floor: Duration = "500ms"
    multiplier: Number = "1.5"


class SloTargets(Part, frozen=True):
    """What requests without a class get."""

    ttft: Ttft = Ttft()
    tpot: Duration = "30ms"
    when_infeasible: Literal["Refuse", "Relegate"] = "Refuse"


class ClassTargets(Part, frozen=True):
    """A QoS class; what it leaves out it takes from `slo.default`."""

    name: Name
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    reserved_percent: Percent = 0
    ttft: Ttft | None = None
    tpot: Duration | None = None
    when_infeasible: Literal["Refuse", "Relegate"] | None = None


class SloSpec(Part, frozen=True):
    default: SloTargets = SloTargets()
    classes: Annotated[tuple[ClassTargets, ...], msgspec.Meta(max_length=16)] = ()


class BatchBudget(Part, frozen=True):
    """How long a batch may take: Slack of the decodes within [min, max], Fixed, or by Tokens."""

    mode: Literal["Slack", "Fixed", "Tokens"] = "Slack"
    min: Duration = "10ms"
    max: Duration = "100ms"
    fixed: Duration = "50ms"
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2048


class Scheduling(Part, frozen=True):
    """`promises` Commit: one once given is kept; Revise: later requests may displace it.

    `decideAhead`: in replicas of one stage, whether the next batch is decided while one runs; Auto:
    where a GPU computes.
    `relegatedPercent`: up to half of the time is kept free for short ones to come; promises need
    something beside both. `maxBucketLossPercent` 100: whoever is largest gives way.
    """

    policy: Literal["LARS", "LARSPaper", "LARSPaperNoSharing", "LRS", "EDF", "SRPF", "FCFS"] = (
        "LARS"
    )
    normaliser: Literal["Work", "Deadline"] = "Work"
    batch_budget: BatchBudget = BatchBudget()
    max_yield_percent: Percent = 40
    relegated_percent: Annotated[int, msgspec.Meta(ge=0, le=40)] = 10
    max_bucket_loss_percent: Percent = 100
    promises: Literal["Commit", "Revise"] = "Commit"
    long_prefill_threshold_tokens: Tokens | None = None
    long_tokens: Tokens | None = None
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    prefix_cache: Switch = "Enabled"
    rebalance: Switch = "Enabled"
    decide_ahead: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    growth_timeout: Duration = "2m"
    release_cooldown: Duration = "30s"


class Engine(Part, frozen=True):
    """A rank's means. `kvPages` per group wins over `kvMemory` per rank."""

    page_tokens: Literal[16, 32, 64, 128, 256] = 64
    kv_memory: Size = "1Gi"
    kv_pages: Annotated[int, msgspec.Meta(ge=2, le=1 << 24)] | None = None
    threads_per_rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    arithmetic: Literal["Fast", "Deterministic"] = "Fast"
    checked_transfers: Switch = "Enabled"

    @property
    def kv_bytes(self) -> int:
        return to_bytes(self.kv_memory)


class Placement(Part, frozen=True):
    """Node labels from the widest domain to the narrowest; a replica stays inside one packLevel."""

    topology_levels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)] = (
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/rack",
        "nvidia.com/gpu.clique",
        "kubernetes.io/hostname",
    )
    pack_level: Text | None = None
    node_selector: Labels = {}
    tolerations: Pieces = ()


class Autoscaling(Part, frozen=True):
    """Builtin writes /scale itself; External exports what it would want."""

    mode: Literal["Builtin", "External"] = "Builtin"
    min_replicas: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    target_slack_p10: Number = msgspec.field(default="0.2", name="targetSlackP10")
    scale_down_stabilization: Duration = "10m"


class Template(Part, frozen=True):
    """Overrides of the pods; `medha up` starts processes and has no use for them."""

    image: Text | None = None
    resources: Piece = {}
    env: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=64)] = ()
    volumes: Pieces = ()
    volume_mounts: Pieces = ()
    scheduler_name: Text | None = None
    priority_class_name: Text | None = None
    labels: Labels = {}
    annotations: Annotated[dict[str, Note], msgspec.Meta(max_length=32)] = {}


class Spec(Part, frozen=True, kw_only=True):
    replicas: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    role: Literal["Unified"] = "Unified"
    model: Model
    device: Device = Device()
    parallelism: Parallelism = Parallelism()
    slo: SloSpec = SloSpec()
    scheduling: Scheduling = Scheduling()
    engine: Engine = Engine()
    placement: Placement = Placement()
    autoscaling: Autoscaling | None = None
    template: Template = Template()
    drain_timeout: Duration = "1h"

    @property
    def topology(self) -> Topology:
        kvp = self.parallelism.kvp
        return Topology(
            tp=self.parallelism.tp, spp=self.parallelism.spp,
            kvp_min=kvp.min, kvp_max=kvp.max, tokens_per_group=kvp.tokens_per_group,
        )  # fmt: skip

    @property
    def classes(self) -> tuple[SloClass, ...]:
        """Every class, `default` first."""
        default = self.slo.default
        plain = ClassTargets(name="default")
        return tuple(_slo_class(each, default) for each in (plain, *self.slo.classes))


class MedhaReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One resource: `spec.replicas` identical 3D-parallel copies of a model.

    `uid` and `generation` are what a cluster's API gave it; a file's resource has none.
    """

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    spec: Spec


def _slo_class(of: ClassTargets, default: SloTargets) -> SloClass:
    ttft = of.ttft or default.ttft
    slo = Slo(
        ttft_floor_s=seconds(ttft.floor),
        ttft_multiplier=to_number(ttft.multiplier),
        tpot_s=seconds(of.tpot or default.tpot),
    )
    when = (of.when_infeasible or default.when_infeasible).lower()
    return SloClass(
        name=of.name, slo=slo, weight=float(of.weight), reserved=of.reserved_percent / 100,
        when_infeasible=when,
    )  # fmt: skip
