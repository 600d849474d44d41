"""What docs/operator.md grants the operator, given to an account, and what that used of it.

Every operator of these tests acts as an account with those rights and no others, so that whatever
it needs beyond them fails a test. What it did with them is told by the API server's audit log.
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
"""Group, resource (with its part), verb."""


class Row(msgspec.Struct, frozen=True):
    """A line of the table. `where`: all or own (both are the test's namespace), or cluster."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    where: str

    @property
    def rights(self) -> set[Right]:
        return {(self.group, self.resource, verb) for verb in self.verbs}


def documented() -> list[Row]:
    """The table, a line for each resource."""
    lines = re.findall(
        r"^\| (\S+) \| (`.*?`) \| ([a-z, ]+) \| (all|own|cluster) \|",
        (HOUSE / "docs/operator.md").read_text(),
        flags=re.M,
    )
    return [
        Row("" if group == "core" else group.strip("`"), each, tuple(verbs.split(", ")), where)
        for group, resources, verbs, where in lines
        for each in re.findall(r"`(.*?)`", resources)
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
    """The account may do in its namespace all but create these, by group and plural name."""
    api.patch(
        f"{ROOT}/namespaces/{namespace}/roles/{account}", json={"rules": _rules(False, kinds)},
        headers={"Content-Type": "application/merge-patch+json"},
    ).raise_for_status()  # fmt: skip


def may(api: httpx.Client, namespace: str, account: str, kind: tuple[str, str]) -> bool:
    """Whether the account may create these there."""
    asked = {"namespace": namespace, "verb": "create", "group": kind[0], "resource": kind[1]}
    answer = api.post(
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        json={"spec": {"user": account, "resourceAttributes": asked}},
    )
    return bool(answer.raise_for_status().json()["status"]["allowed"])


def _rules(cluster: bool, without: Set[tuple[str, str]]) -> list[dict[str, Any]]:
    rules = [
        {
            "apiGroups": [row.group],
            "resources": [row.resource],
            "verbs": [
                verb for verb in row.verbs
                if verb != "create" or (row.group, row.resource) not in without
            ],
        }
        for row in documented()
        if (row.where == "cluster") == cluster
    ]  # fmt: skip
    assert rules
    return rules


def take_back(api: httpx.Client, account: str) -> None:
    """What was granted in the cluster; the rest stays in its namespace."""
    for kind in ("clusterrolebindings", "clusterroles"):
        api.delete(f"{ROOT}/{kind}/{account}")


def refused(audit: Path, account: str) -> list[str]:
    """What the account asked for and may not do."""
    return [
        f"{each.verb} {each.request_uri}"
        for each in _events(audit, account)
        if each.response_status is not None and each.response_status.code == 403
    ]


def forbidden(audit: Path) -> set[Right]:
    """What any account of an operator asked for without the right to it."""
    return {
        (each.object_ref.api_group, each.object_ref.whole, each.verb)
        for each in _events(audit)
        if each.object_ref is not None
        and each.annotations.get("authorization.k8s.io/decision") == "forbid"
    }


def used(audit: Path, account: str) -> set[Right]:
    """Rights with which the account was let in."""
    return {
        (each.object_ref.api_group, each.object_ref.whole, each.verb)
        for each in _events(audit, account)
        if each.object_ref is not None
        and each.annotations.get("authorization.k8s.io/decision") == "allow"
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
    """Of this account, or of all that somebody acts as."""
    decoder = msgspec.json.Decoder(_Event)
    for line in _lines(audit):
        event = decoder.decode(line)
        name = event.impersonated_user.username
        if name and name == (account or name):
            yield event


def _lines(audit: Path) -> Iterable[str]:
    """Of the log, and of its earlier parts."""
    for path in sorted(audit.parent.glob(f"{audit.stem}*{audit.suffix}")):
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):  # the last one may still be being written
                    yield line
