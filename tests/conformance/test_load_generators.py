"""Load generators, unchanged, against the fleet: each request ends, with its tokens counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

REQUESTS = 12
OUTPUT_TOKENS = 16


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_finds_no_error(fleet: Any, path: str) -> None:
    report = fleet.folder / f"guidellm{path.replace('/', '-')}.json"
    fleet.run(
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={fleet.url},model=tiny,request_format={path}",
        "--profile=kind=concurrent,streams=2",
        f"--constraint=kind=max_requests,count={REQUESTS}",
        f"--tokenizer=kind=huggingface_auto,model={fleet.model}",
        f"--data=kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
        "--disable-progress",
        f"--output=kind=json,path={report}",
        timeout_s=500.0,
        HF_HUB_OFFLINE="1",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert requests["errored"] == [] and len(requests["successful"]) == REQUESTS
    outputs = [request["output_metrics"]["text_tokens"] for request in requests["successful"]]
    assert outputs == [OUTPUT_TOKENS] * REQUESTS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_finds_no_error(fleet: Any, kind: str) -> None:
    folder = fleet.folder / f"aiperf-{kind}"
    fleet.run(
        "aiperf",
        "profile",
        "--model=tiny",
        f"--url={fleet.url}",
        f"--endpoint-type={kind}",
        "--streaming",
        f"--tokenizer={fleet.model}",
        "--concurrency=2",
        f"--request-count={REQUESTS}",
        "--isl=64",
        f"--osl={OUTPUT_TOKENS}",
        "--extra-inputs=ignore_eos:true",
        "--use-server-token-count",
        "--ui=none",
        f"--artifact-dir={folder}",
        timeout_s=500.0,
    )
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS and not report.get("error_summary")
    assert report["output_sequence_length"]["avg"] == OUTPUT_TOKENS
