"""The rights that charts/medha/README.md grants the operator, given to an account, and their use.

Every operator of these tests acts as an account with those rights and no others, so that a call
beyond them fails a test. The API server's audit log shows which rights were used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import httpx
import msgspec

HOUSE = Path(__file__).resolve().parents[2]
RBAC = "rbac.authorization.k8s.io"
ROOT = f"/apis/{RBAC}/v1"

Right = tuple[str, str, str]
"""Group, resource (with its subresource), verb."""


class Row(msgspec.Struct, frozen=True):
    """A row of the table. `where`: all or own (both mean the test's namespace), or cluster."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    where: str

    @property
    def rights(self) -> set[Right]:
        return {(self.group, self.resource, verb) for verb in self.verbs}


def documented() -> list[Row]:
    """Read the table, with one row per resource."""
    lines = re.findall(
        r"^\| (\S+) \| (`.*?`) \| ([a-z, ]+) \| (all|own|cluster) \|",
        (HOUSE / "charts/medha/README.md").read_text(),
        flags=re.M,
    )
    return [
        Row("" if group == "core" else group.strip("`"), resource, tuple(verbs.split(", ")), where)
        for group, resources, verbs, where in lines
        for resource in re.findall(r"`(.*?)`", resources)
    ]


def grant(api: httpx.Client, namespace: str, account: str) -> None:
    """Bind the account to one role per place: its namespace, and the cluster."""
    for cluster in (False, True):
        kind = "ClusterRole" if cluster else "Role"
        place = ROOT if cluster else f"{ROOT}/namespaces/{namespace}"
        metadata = {"metadata": {"name": account}}
        role = metadata | {"rules": _rules(cluster, frozenset())}
        api.post(f"{place}/{kind.lower()}s", json=role).raise_for_status()
        to = {"apiGroup": RBAC, "kind": kind, "name": account}
        who = {"apiGroup": RBAC, "kind": "User", "name": account}
        binding = metadata | {"roleRef": to, "subjects": [who]}
        api.post(f"{place}/{kind.lower()}bindings", json=binding).raise_for_status()


def refuse_creation(
    api: httpx.Client, namespace: str, account: str, kinds: Set[tuple[str, str]]
) -> None:
    """Take from the account, in its namespace, the right to create these, by group and plural
    name."""
    api.patch(
        f"{ROOT}/namespaces/{namespace}/roles/{account}",
        json={"rules": _rules(False, kinds)},
        headers={"Content-Type": "application/merge-patch+json"},
    ).raise_for_status()


def may_create(api: httpx.Client, namespace: str, account: str, kind: tuple[str, str]) -> bool:
    """Return true if the account may create these there."""
    right = {"namespace": namespace, "verb": "create", "group": kind[0], "resource": kind[1]}
    answer = api.post(
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        json={"spec": {"user": account, "resourceAttributes": right}},
    )
    return bool(answer.raise_for_status().json()["status"]["allowed"])


def _rules(cluster: bool, without: Set[tuple[str, str]]) -> list[dict[str, Any]]:
    rules = [
        {
            "apiGroups": [row.group],
            "resources": [row.resource],
            "verbs": [
                verb
                for verb in row.verbs
                if verb != "create" or (row.group, row.resource) not in without
            ],
        }
        for row in documented()
        if (row.where == "cluster") == cluster
    ]
    assert rules
    return rules


def revoke(api: httpx.Client, account: str) -> None:
    """Take back the rights in the cluster; those in the namespace go with it."""
    for kind in ("clusterrolebindings", "clusterroles"):
        api.delete(f"{ROOT}/{kind}/{account}")


def forbidden_requests(audit: Path, account: str) -> list[str]:
    """Requests of the account that were refused as forbidden."""
    return [
        f"{event.verb} {event.request_uri}"
        for event in _events(audit, account)
        if event.response_status is not None and event.response_status.code == 403
    ]


def missing_rights(audit: Path) -> set[Right]:
    """Rights that any operator's account lacked for a request."""
    return {
        (event.object_ref.api_group, event.object_ref.whole, event.verb)
        for event in _events(audit)
        if event.object_ref is not None
        and event.annotations.get("authorization.k8s.io/decision") == "forbid"
    }


def used_rights(audit: Path, account: str) -> set[Right]:
    """Rights that allowed a request of the account."""
    return {
        (event.object_ref.api_group, event.object_ref.whole, event.verb)
        for event in _events(audit, account)
        if event.object_ref is not None
        and event.annotations.get("authorization.k8s.io/decision") == "allow"
    }


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    resource: str = ""
    subresource: str = ""
    api_group: str = ""

    @property
    def whole(self) -> str:
        return f"{self.resource}/{self.subresource}".rstrip("/")


class _User(msgspec.Struct, frozen=True):
    username: str = ""


class _Status(msgspec.Struct, frozen=True):
    code: int = 0


class _Event(msgspec.Struct, frozen=True, rename="camel"):
    verb: str
    request_uri: str = msgspec.field(default="", name="requestURI")
    impersonated_user: _User = _User()
    object_ref: _Object | None = None
    response_status: _Status | None = None
    annotations: dict[str, str] = {}


def _events(audit: Path, account: str = "") -> Iterator[_Event]:
    """Events of this account, or of every impersonated one."""
    decoder = msgspec.json.Decoder(_Event)
    for line in _lines(audit):
        event = decoder.decode(line)
        name = event.impersonated_user.username
        if name and name == (account or name):
            yield event


def _lines(audit: Path) -> Iterable[str]:
    """Lines of the log and of its rotated parts."""
    for path in sorted(audit.parent.glob(f"{audit.stem}*{audit.suffix}")):
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):  # the last line may be incomplete
                    yield line
