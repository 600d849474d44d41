"""Configs of the processes: one frozen type per program, decoded once at its start.

The operator (or `medha up`) renders them from a MedhaReplica; the processes decode the same types
from a JSON file. Secrets are given as paths of files, never as values.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from medha.errors import SpecError
from medha.request import SloClass
from medha.topology import Topology

POLICIES = ("lars", "lars-paper", "lars-paper-no-sharing", "lrs", "edf", "srpf", "fcfs")
NORMALISERS = ("work", "deadline")

STALL_S = 1.0
"""A process that did not run for longer than this extends its peers' timeouts by the pause."""

PROGRESS_TOKENS = 16
"""A request that emits this number of tokens between two losses of its replica, or of its group, is
not what kills them."""

CHUNK_STEP_TOKENS = 16
"""A chunk is a multiple of this, except a prompt's last: of schedulers, and of the predictors that
fill tables for them."""

AHEAD_S = 0.01
"""Time for a decision, a message, the inputs of a batch, and two ticks of a controller."""

RANK_PORT, STORE_PORT = 7900, 7901
"""Ports of a leader pod: the controller's for ranks, and the rendezvous store's."""
POD_OPS_PORT, CONTROLLER_OPS_PORT = 8090, 8091
"""Ports for probes and metrics: every pod's, and the controller's in the leader pod."""

Origin = Annotated[str, msgspec.Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
Port = Annotated[int, msgspec.Meta(ge=0, lt=65536)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]

MAX_PROCESSES = 64
"""Processes of a router at most; the network policies allow as many ports."""


class QueueOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order of waiting requests: of a router's queue, and of what a controller grants.

    `guard_s`: a promised request with less slack goes first (one or two batches). `short_s`: a
    promised request with at most this work is short. `work_floor_s`: least normaliser of slack.
    """

    policy: str = "lars"
    normaliser: str = "work"
    guard_s: float = 0.2
    short_s: float = 0.8
    work_floor_s: float = 0.001

    @property
    def keeps_promises(self) -> bool:
        """False for policies that promise nothing and relegate nothing."""
        return self.policy == "lars"

    def checked(self) -> QueueOrder:
        """Return the order itself; raises SpecError if a name in it is unknown."""
        _check_name("scheduling.policy", self.policy, POLICIES)
        _check_name("scheduling.normaliser", self.normaliser, NORMALISERS)
        return self


REFERENCE_PART = 0.9
"""Part of the TPOT that the batches take by which default deadlines are measured."""


class Scheduling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one replica's scheduler; every policy uses the same mechanisms around it.

    `budget` is `slack` (from the decodes' credit), `fixed` (`fixed_s`) or `tokens` (a static
    number of tokens per batch, `batch_tokens`, as in Sarathi and vLLM, with no time limit).
    `long_prefill_threshold_tokens`: limit of the tokens of one prompt per batch (as in vLLM).
    `long_tokens` None: a prompt is long when its remaining work exceeds 8 budgets.
    `max_bucket_loss`: largest part of a length bucket that may be dropped from the promise set.
    `chunk_step_tokens`: a chunk is a multiple of this, except a prompt's last.
    `tbt_guard`, `plan_guard`, `margin_guard`: parts of a budget kept back from credit, from the
    batches that promises count on, and from margins. Promises count on less than batches may take,
    so that their margins grow, and newcomers find room.
    `finish_fill`: part of its budget that a batch takes in which a short prompt ends, as long as
    everybody is expected to be in time.
    `ahead_s`: a replica of one stage decides the next batch when the running one has at most this
    time left; 0: when it is done.
    `prefill_share`: part of their rate that decodes leave to prefills at least. `decode_room`: part
    of the time for decodes that promises leave to those to come.
    """

    policy: str = "lars"
    normaliser: str = "work"
    budget: str = "slack"
    fixed_s: float = 0.05
    min_batch_s: float = 0.01
    max_batch_s: float = 0.1
    batch_tokens: int = 2048
    long_prefill_threshold_tokens: int | None = None
    long_tokens: int | None = None
    max_yield: float = 0.4
    relegated_share: float = 0.1
    max_bucket_loss: float = 1.0
    commit: bool = True
    max_starved_rounds: int = 16
    dispatch_budgets: float = 2.0
    finish_fill: float = 0.5
    chunk_step_tokens: int = CHUNK_STEP_TOKENS
    work_floor_s: float = 0.001
    output_reserve: float = 0.25
    growth_timeout_s: float = 120.0
    max_running: int = 256
    prefix_cache: bool = True
    rebalance: bool = True
    release_cooldown_s: float = 30.0
    tbt_guard: float = 0.05
    plan_guard: float = 0.05
    margin_guard: float = 1.0
    ahead_s: float = 0.0
    prefill_share: float = 0.1
    decode_room: float = 0.05

    def for_pipeline(self, spp: int, classes: Sequence[SloClass]) -> Scheduling:
        """Return settings with batches so short that a pipeline can promise each class's floor.

        Behind stage 0 a prompt waits for a batch in each stage. What routers leave for that
        (`PromiseSet.least_drain_s`) is at most half of the least TTFT floor that the shortest
        batches can meet.
        """
        floors_s = [slo_class.slo.ttft_floor_s for slo_class in classes]
        least_s = min([s for s in floors_s if s > spp * self.min_batch_s], default=math.inf)
        if spp == 1 or self.budget != "slack" or least_s == math.inf:
            return self
        longest_s = max(self.min_batch_s, 0.5 * least_s / (spp - 1.5))
        return msgspec.structs.replace(self, max_batch_s=min(self.max_batch_s, longest_s))

    def planned_budget_s(self, tpot_s: float, spp: int) -> float:
        """Seconds per stage that promises count on for a batch while decodes of that TPOT run."""
        return self._budget_s((1.0 - self.plan_guard) * tpot_s, spp)

    def reference_budget_s(self, tpot_s: float, spp: int) -> float:
        """Budget of the batches by which W, the work of a default deadline, is measured.

        What the class's TPOT allows alongside decodes; in the papers that of an idle replica.
        """
        if self.policy.startswith("lars-paper"):
            return self.max_batch_s
        return self._budget_s(REFERENCE_PART * tpot_s, spp)

    def _budget_s(self, tpot_s: float, spp: int) -> float:
        if self.budget == "fixed":
            return self.fixed_s
        if self.budget == "tokens":
            return self.max_batch_s
        return min(max(tpot_s / spp, self.min_batch_s), self.max_batch_s)

    def __post_init__(self) -> None:
        self.queue_order.checked()

    @property
    def queue_order(self) -> QueueOrder:
        """The order of requests that wait for a replica with these settings."""
        return QueueOrder(
            policy=self.policy,
            normaliser=self.normaliser,
            guard_s=self.dispatch_budgets * self.max_batch_s,
            short_s=8.0 * self.max_batch_s,
            work_floor_s=self.work_floor_s,
        )

    def lead_s(self, spp: int) -> float:
        """`ahead_s` for one stage; 0 for a pipeline, which has several batches in flight anyway."""
        return self.ahead_s if spp == 1 else 0.0


def _check_name(field: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise SpecError(field, name, f"must be one of {', '.join(names)}", f"use {names[0]}")


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CURVE key files of a process: its own secret key, and the public keys that it accepts.

    `server_public`: of the peer to dial; `allowed`: of peers that may connect. A controller
    dials routers (`WorkerConfig.curve`), its ranks dial it (`rank_curve`). Files hold one Z85 key
    per line.
    """

    secret: str
    server_public: str = ""
    allowed: str = ""


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Network between ranks. `transport`: auto (RDMA where a port is usable), rdma or tcp.

    `devices`: RDMA devices or ports; none: all. `shared_memory`: whether ranks that exchange pages
    share a machine and its /dev/shm.
    """

    transport: str = "auto"
    devices: tuple[str, ...] = ()
    gpu_direct: bool = True
    shared_memory: bool = True


class AdapterFolder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter of the model: its name, which follows the model's in requests, and folder."""

    name: str
    folder: str


class RouterModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model that a router serves before any replica has sent Hello.

    `adapters`: their names. `hold_s`: requests wait at least this long for the first replica, which
    is being started.
    """

    name: str
    max_context_tokens: int
    classes: tuple[SloClass, ...] = (SloClass(),)
    default_class: str = "default"
    adapters: tuple[str, ...] = ()
    hold_s: float = 0.0


class RouterProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place of a process among the processes of a router; set by their parent.

    `fleet_ports`: the controllers' ports of all processes. `ops_socket`: Unix socket in the place
    of the ops port. `salt_secret`: file of the secret behind the names of cached pages.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PROCESSES)]
    fleet_ports: tuple[Port, ...]
    ops_socket: str
    salt_secret: str


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Config of a router. `fleet_bind`: address for controllers, e.g. `tcp://127.0.0.1:7800`.

    With several `processes` each is a router of its own behind the one `port`; controllers dial the
    port of `fleet_bind` and the next ones. Other settings hold for each process. `ops_host`: of the
    ops port; empty: `host`.

    With `learn` the router also serves models that replicas introduce, and removes a model
    `forget_model_s` after its last replica left. In its first `learn_s` it holds requests for
    unknown models. `models_file` holds more models in the form of `models`; it may change, and may
    be missing. Requests wait `no_replica_timeout_s` for a replica; accepted ones, while no replica
    of their model is left, `recovery_timeout_s`. A client that takes nothing for `stall_timeout_s`
    is given up; requests that run `drain_timeout_s` after a drain began are ended. `api_keys`: file
    of API keys, one per line (see `medha_router.auth`); without it the public port is open, and
    only requests from the same address share cached pages, unless `share_cache`. `class_headers`:
    by header, the class of each value, for requests without `x-medha-class`. `allowed_origins`: of
    web pages whose scripts may send requests, `*` for all. `ops_token`: file of
    the token that `POST /drain` needs; without it that route is absent.
    `memory_limit_bytes`: of the router's processes together; near it new requests are refused. 0:
    the container's limit, if any. `generation_defaults`: sample by the checkpoint where a request
    is silent. `split_thinking`: from the content of answers.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    ops_host: str = ""
    ops_port: Port = 8001
    fleet_bind: str
    processes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROCESSES)] = 1
    process: RouterProcess | None = None
    models: tuple[RouterModel, ...] = ()
    models_file: str = ""
    learn: bool = False
    learn_s: float = 10.0
    forget_model_s: float = 600.0
    curve: Curve | None = None
    api_keys: str = ""
    class_headers: dict[str, dict[str, str]] = {}
    share_cache: bool = False
    allowed_origins: tuple[Origin, ...] = ()
    ops_token: str = ""
    max_body_bytes: Positive = 64 << 20
    memory_limit_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_queue: Positive = 10_000
    queue_timeout_s: PositiveSeconds = 120.0
    no_replica_timeout_s: PositiveSeconds = 30.0
    recovery_timeout_s: PositiveSeconds = 600.0
    keepalive_s: PositiveSeconds = 15.0
    stall_timeout_s: PositiveSeconds = 30.0
    drain_timeout_s: float = 600.0
    replica_timeout_s: float = 3.0
    grant_lease_s: float = 0.2
    tokenizer_workers: Positive = 1
    default_output_tokens: Positive = 4096
    generation_defaults: bool = True
    split_thinking: bool = True
    run_dir: str = ""
    log_level: str = "info"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Config of a replica's controller and ranks, which all decode the same file.

    `rank_bind`: address for ranks (an `ipc://` path, or `tcp://` between pods); `store_bind` is
    `host:port` of the rendezvous store of a group's first rank (port 0: any); sockets between ranks
    go through `interface` alone, and `network` adds RDMA. `rank_curve` guards a TCP `rank_bind`:
    its `secret` is a rank's, `server_public` the controller's, `allowed` those of the ranks; the
    controller listens with `curve.secret`. `kv_pages` is the number of pages per group,
    0 derives it from `kv_bytes` per rank. `ops_token`: file of the token that `POST /drain` needs;
    without it, none is needed. `adapters`: of the model; requests may name them. `device` is `cpu`
    or `cuda`. `dtype` and `kv_dtype` are torch names (`kv_dtype` auto: as dtype; or `fp8_e4m3`).
    `dummy_weights`: random weights, to measure speed.
    """

    replica: str
    model: str
    checkpoint: str
    adapters: tuple[AdapterFolder, ...] = ()
    served_names: tuple[str, ...] = ()
    max_context_tokens: Positive
    topology: Topology
    device: str = "cpu"
    dtype: str = "float32"
    kv_dtype: str = "auto"
    page_tokens: Positive = 64
    kv_pages: int = 0
    kv_bytes: int = 1 << 30
    scheduling: Scheduling = Scheduling()
    classes: tuple[SloClass, ...] = (SloClass(),)
    default_class: str = "default"
    routers: tuple[str, ...] = ()
    curve: Curve | None = None
    rank_bind: str
    rank_curve: Curve | None = None
    store_bind: str = "127.0.0.1:0"
    interface: str = "lo"
    network: Network = Network()
    ops_host: str = "127.0.0.1"
    ops_port: Port = 0
    ops_token: str = ""
    threads_per_rank: Positive = 1
    packed_weights: bool = False
    checked_transfers: bool = True
    standby_ranks: bool = False
    profile: str = ""
    decision_log: str = ""
    run_dir: str = ""
    rank_timeout_s: float = 5.0
    router_timeout_s: float = 5.0
    collective_timeout_s: float = 30.0
    deterministic: bool = False
    dummy_weights: bool = False
    log_level: str = "info"

    def listening_curve(self) -> Curve | None:
        """Keys of the controller's socket for ranks; None inside one machine.

        Raises SpecError for TCP without keys: any peer could then control the replica.
        """
        ranks = self.rank_curve
        if ranks is None:
            _check_private(self.rank_bind)
            return None
        if self.curve is None:
            raise SpecError(
                "curve",
                "absent",
                "must be given with rank_curve: the controller listens with its secret key",
                "name the controller's key files",
            )
        return Curve(secret=self.curve.secret, allowed=ranks.allowed)


def _check_private(rank_bind: str) -> None:
    """Raises SpecError if other machines could reach the ranks' link without keys."""
    if rank_bind.startswith("tcp://") and not rank_bind.startswith("tcp://127."):
        raise SpecError(
            "rank_bind",
            rank_bind,
            "must be ipc:// or loopback where rank_curve is absent",
            "name the ranks' key files in rank_curve",
        )


C = TypeVar("C", RouterConfig, WorkerConfig)


def render(config: RouterConfig | WorkerConfig) -> bytes:
    """The JSON that `read` decodes."""
    return msgspec.json.format(msgspec.json.encode(config), indent=1)


def read(kind: type[C], path: pathlib.Path) -> C:
    """Decode a process's config file; raises SpecError naming the file and the broken field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise SpecError(
            "--config",
            str(path),
            f"must be readable ({error.strerror})",
            "name the file that `medha up` or the operator rendered",
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SpecError(
            "--config",
            str(path),
            f"must hold a {kind.__name__} ({error})",
            "render it again with this version",
        ) from None
