"""Mark of tests that need IPv6, which containers may lack."""

from __future__ import annotations

import pytest

from medha.adapters.addresses import listening


def _is_there() -> bool:
    try:
        listening("::1", 0, backlog=1).close()
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not _is_there(), reason="::1 cannot be bound on this machine")
