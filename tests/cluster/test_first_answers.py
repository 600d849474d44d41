"""The charts install, a resource is served, and it scales: the precondition of everything else.

This is the short pass of continuous integration; the other files here test faults.
"""

from __future__ import annotations

import openai
import pytest
from demos.release import NAMESPACE, Installed
from demos.testbed import until

pytestmark = pytest.mark.timeout(1500)  # the images may have to be built

LIMIT_S = 300.0


def test_a_request_is_answered_through_the_router(medha: Installed) -> None:
    with (
        medha.bed.forwarded(NAMESPACE, "service/medha-router", 8000) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Who is first in the queue?"}],
            max_tokens=8,
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        stream = client.completions.create(
            model="tiny", prompt="one two three", max_tokens=8, stream=True, temperature=0
        )
        assert "".join(part.choices[0].text for part in stream if part.choices)


def test_replicas_run_on_different_nodes(medha: Installed) -> None:
    nodes: dict[str, set[str]] = {}
    for pod in medha.pods():
        replica = pod["metadata"]["labels"]["medha.dev/ordinal"]
        nodes.setdefault(replica, set()).add(pod["spec"]["nodeName"])
    assert len(nodes) == 2
    assert set.intersection(*nodes.values()) == set()


def test_replicas_follow_the_resource_down_and_up(medha: Installed) -> None:
    for count in (1, 2):
        medha.bed.kubectl("scale", "mr/tiny", f"--replicas={count}")
        until(
            lambda count=count: (  # type: ignore[misc]
                medha.ready_replicas() == count and len(medha.pods()) == 2 * count
            ),
            f"{count} replicas",
            LIMIT_S,
        )
