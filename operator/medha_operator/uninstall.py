"""`python -m medha_operator.uninstall`: deletes the budgets of a release that is uninstalled.

Replicas run on without an operator, and so would the budgets that forbid their eviction, so that
no node could be emptied. The chart runs this after it has deleted the operator. An operator
that is installed later makes the budgets again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import msgspec

from medha.adapters.logs import start_logs
from medha.errors import MedhaError
from medha_operator.kube.client import BUDGETS, ClusterError, KubeClient
from medha_operator.kube.login import login
from medha_operator.resources.labels import OWNED_BY
from medha_operator.resources.objects import Meta

log = logging.getLogger("medha.operator.uninstall")

LABELS = ",".join(f"{name}={value}" for name, value in OWNED_BY.items())


class _Budget(msgspec.Struct):
    metadata: Meta


_BUDGET = msgspec.json.Decoder(_Budget)


async def delete_budgets(client: KubeClient, namespaces: tuple[str, ...]) -> int:
    """Delete the budgets of MedhaReplicas in these namespaces (empty: all); returns how many."""
    count = 0
    for namespace in namespaces or ("",):
        async for page in client.pages(BUDGETS, namespace, labels=LABELS, partial=True):
            for raw in page.items or ():
                meta = _BUDGET.decode(raw).metadata
                if not meta.resource:
                    continue
                try:
                    await client.delete(BUDGETS, meta.namespace, meta.name, uid=meta.uid)
                    count += 1
                except ClusterError as error:
                    if error.status not in (404, 409):  # gone, or another one by now
                        raise
    return count


async def _run(namespaces: tuple[str, ...]) -> int:
    client = KubeClient(login)
    try:
        return await delete_budgets(client, namespaces)
    finally:
        await client.close()


def main() -> int:
    start_logs("operator", "info")
    namespaces = tuple(filter(None, os.environ.get("MEDHA_NAMESPACES", "").split(",")))
    try:
        count = asyncio.run(_run(namespaces))
    except MedhaError as error:
        sys.stderr.write(f"medha_operator.uninstall: {error}\n")
        return 1
    log.info("budgets deleted", extra={"fields": {"count": count}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
