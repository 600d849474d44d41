"""One resource after another, none of which keeps the others from their turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from medha.adapters.prometheus import Metrics
from medha.errors import MedhaError
from medha_operator.lease import NotLeading
from medha_operator.projections import Key
from medha_operator.reconcile import UNEXPECTED

log = logging.getLogger("medha.operator.autoscale")


async def each_in_turn(
    keys: Iterable[Key], look: Callable[[Key], Awaitable[None]], limit_s: float, metrics: Metrics
) -> None:
    """Look at each for so long at most. What fails is told, and the others go on; but who does not
    lead any more stops (NotLeading)."""
    for key in keys:
        try:
            async with asyncio.timeout(limit_s):
                await look(key)
        except NotLeading:
            raise
        except (MedhaError, TimeoutError) as error:
            log.warning("%s/%s: not scaled: %s", *key, str(error) or repr(error))
        except Exception:
            metrics.add("medha_operator_errors_total", 1, UNEXPECTED)
            log.exception("%s/%s: not scaled: unexpected", *key)
