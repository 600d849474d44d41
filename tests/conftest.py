"""Settings every suite shares: hypothesis tries the same examples on every machine."""

from __future__ import annotations

from hypothesis import settings

# Same examples everywhere, and no deadline: a busy machine is slow, not wrong.
settings.register_profile("medha", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("medha")
