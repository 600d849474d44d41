"""`medha`: parse the command line, run the command, turn an error into one line and a status.

Exit status 0: done; 1: a failure that the user cannot fix; 2: errors that the user can fix, one
line each. Each command is in the module of its name.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

from medha.config import MAX_PROCESSES
from medha.errors import MedhaError, SpecError, UserError
from medha.rendering import POLICIES

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

File = Annotated[pathlib.Path, typer.Option("-f", "--file", help="YAML with MedhaReplicas")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="port of the OpenAI-compatible API")]
OpsPort = Annotated[int, typer.Option(min=0, max=65535, help="port of the router's probes")]
Policy = Annotated[str | None, typer.Option(help=f"override: {', '.join(POLICIES)}")]
Seconds = Annotated[float | None, typer.Option(min=0.001)]
Factor = Annotated[float, typer.Option(min=1e-6)]
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # of every wrong command line


def _show_version(shown: bool) -> None:
    if shown:
        sys.stdout.write(f"medha {importlib.metadata.version('medha')}\n")
        raise typer.Exit


@app.callback()
def medha(
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="print the version"),
    ] = False,
) -> None:
    """Serve large language models within promised latencies."""


@app.command("up")
def run_up(
    file: File,
    host: Annotated[str, typer.Option(help="IP address of the API; :: for all")] = "127.0.0.1",
    port: Port = 8000,
    ops_port: OpsPort = 8001,
    router_processes: Annotated[
        int, typer.Option(min=1, max=MAX_PROCESSES, help="router processes behind the one port")
    ] = 1,
    run_dir: Annotated[
        pathlib.Path | None, typer.Option(help="folder for configs, keys, sockets and logs")
    ] = None,
    policy: Policy = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="least level shown")
    ] = "info",
    profile: Annotated[
        pathlib.Path | None, typer.Option(help="what `medha calibrate` wrote; else measured")
    ] = None,
    router_config: Annotated[
        pathlib.Path | None,
        typer.Option(help="YAML of settings of the router, such as api_keys: FILE"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print warnings and errors only")] = False,
    decision_log: Annotated[
        bool, typer.Option("--decision-log", help="write every scheduling decision to the run dir")
    ] = False,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="use random weights, to measure speed")
    ] = False,
) -> None:
    """Start a fleet on this machine and keep it running until Ctrl-C."""
    from medha.cli.up import UpOptions, up

    options = UpOptions(
        file=file,
        host=host,
        port=port,
        ops_port=ops_port,
        router_processes=router_processes,
        run_dir=run_dir,
        policy=_policy(policy),
        log_level=log_level,
        quiet=quiet,
        decision_log=decision_log,
        dummy_weights=dummy_weights,
        profile=profile,
        router_config=router_config,
    )
    up(options, Console(stderr=True))


@app.command("pod")
def run_pod(
    config: Annotated[
        pathlib.Path, typer.Option(help="the replica's WorkerConfig, JSON")
    ] = pathlib.Path("/etc/medha/worker.json"),
    last_words: Annotated[
        pathlib.Path, typer.Option(help="file for the reason of an exit, if it exists")
    ] = pathlib.Path("/dev/termination-log"),
) -> None:
    """Run one pod of a replica; the environment identifies it (MEDHA_KVP_GROUP and so on)."""
    from medha.cli.pod import PodOptions, pod

    pod(PodOptions(config=config, environ=os.environ, last_words=last_words))


@app.command("fetch")
def run_fetch(
    uri: Annotated[str, typer.Argument(help="http or https address of a checkpoint's folder")],
    folder: Annotated[pathlib.Path, typer.Argument(help="target folder")],
    adapter: Annotated[bool, typer.Option("--adapter", help="a LoRA adapter, no model")] = False,
) -> None:
    """Download a checkpoint into a folder."""
    from medha.cli.fetch import fetch

    fetch(uri, folder, Console(stderr=True).print, adapter=adapter)


@app.command("replay")
def run_replay(
    workload: Annotated[
        pathlib.Path,
        typer.Option(
            help="Azure CSV, Mooncake .jsonl, or CSV of num_prefill_tokens, num_decode_tokens"
        ),
    ],
    model: Annotated[str, typer.Option(help="the model's name in requests")],
    url: Annotated[str, typer.Option(help="the router's address")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key")] = "",
    rate: Annotated[float | None, typer.Option(min=1e-6, help="requests per second")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="maximum number of requests")] = None,
    speed: Factor = 1.0,
    scale_lengths: Factor = 1.0,
    longest_tokens: Annotated[int | None, typer.Option(min=1, help="cut prompts here")] = None,
    ttft: Seconds = None,
    tpot: Annotated[float, typer.Option(min=0.0001, help="target, seconds")] = 0.03,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: Annotated[pathlib.Path | None, typer.Option(help="write report and records")] = None,
) -> None:
    """Play a workload against a live router, open loop, and report SLO attainment."""
    from medha.cli.open_loop import Target
    from medha.cli.replay import ReplayOptions, replay

    target = Target(url=url, model=model, key=key, ttft_s=ttft, tpot_s=tpot)
    options = ReplayOptions(
        target=target,
        workload=workload,
        rate=rate,
        count=count,
        speed=speed,
        scale_lengths=scale_lengths,
        longest_tokens=longest_tokens,
        seed=seed,
        json=json,
    )
    replay(options, Console())


@app.command("simulate")
def simulate(
    scenario: Annotated[pathlib.Path, typer.Argument(help="TOML of a scenario")],
    policy: Annotated[list[str] | None, typer.Option(help="run it under each of these")] = None,
    load: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="offered load; stretches traces")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    out: Annotated[pathlib.Path | None, typer.Option(help="folder for reports")] = None,
) -> None:
    """Run a scenario in virtual time: the same scheduler, a pipeline clock, no GPU."""
    from medha.cli.simulate import SimulateOptions, run_simulate

    options = SimulateOptions(
        scenario=scenario, policies=tuple(policy or ()), load=load, seed=seed, out=out
    )
    run_simulate(options, Console())


@app.command("decisions")
def run_decisions(
    log: Annotated[pathlib.Path, typer.Argument(help="a decision log, JSON lines")],
) -> None:
    """Replay a controller's decision log and check that the batches come out the same."""
    from medha.scheduling.decision_log import replay

    try:
        with log.open("rb") as lines:
            count = replay(lines)
    except OSError as error:
        raise SpecError(
            "LOG", str(log), f"must be readable ({error.strerror})", "name the file that was logged"
        ) from None
    Console().print(f"{count} decisions come out the same")


@app.command("calibrate")
def run_calibrate(
    checkpoint: Annotated[
        pathlib.Path, typer.Argument(help="folder of the model; its config.json is enough")
    ],
    out: Annotated[pathlib.Path, typer.Option(help="where to write the profile, JSON")],
    name: Annotated[str | None, typer.Option(help="of the profile; default: the device's")] = (
        None
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="torch type of weights and KV cache")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="of the measuring process")] = 1,
    rows: Annotated[int, typer.Option(min=64, help="tokens of the largest batch")] = 512,
    keys: Annotated[int, typer.Option(min=1024, help="tokens of the longest context")] = 4096,
    page_tokens: Annotated[int, typer.Option(min=1, help="tokens of a KV page")] = 64,
    seconds: Annotated[float, typer.Option(min=1.0, help="approximate duration")] = 60.0,
    tolerance: Annotated[
        float, typer.Option(min=0.001, help="maximum error of 95 % of unseen batches")
    ] = 0.08,
    ranks: Annotated[
        int, typer.Option(min=0, help="that exchange tensors; 0: all GPUs, or two cores")
    ] = 0,
) -> None:
    """Measure this machine, fit a profile, and report its prediction error."""
    from medha.cli.calibrate import CalibrateOptions, calibrate

    options = CalibrateOptions(
        checkpoint=checkpoint,
        out=out,
        name=name,
        device=device,
        dtype=dtype,
        threads=threads,
        rows=rows,
        keys=keys,
        page_tokens=page_tokens,
        seconds=seconds,
        tolerance=tolerance,
        ranks=ranks,
    )
    if not calibrate(options, Console(stderr=True), Console()):
        raise typer.Exit(1)


checkpoint = typer.Typer(no_args_is_help=True, help="Checkpoints for tests and demonstrations.")
app.add_typer(checkpoint, name="checkpoint")


@checkpoint.command(
    "new",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run_checkpoint_new(context: typer.Context) -> None:
    """Write a small checkpoint into a folder; `medha checkpoint new --help` lists the options."""
    from medha.cli.checkpoint import new_checkpoint

    raise typer.Exit(new_checkpoint(context.args))


@app.command("scaling")
def run_scaling(
    file: Annotated[pathlib.Path, typer.Argument(help="the JSON of an operator's GET /scaling")],
) -> None:
    """Replay recorded scaling decisions and check that they come out the same."""
    from medha.cli import scaling

    scaling.run_scaling(file, Console())


@app.command("doctor")
def run_doctor(
    file: Annotated[
        pathlib.Path | None, typer.Option("-f", "--file", help="also check this resource")
    ] = None,
    port: Port = 8000,
    ops_port: OpsPort = 8001,
    run_dir: Annotated[
        pathlib.Path | None, typer.Option(help="also check that no `medha up` uses this folder")
    ] = None,
) -> None:
    """Check whether this machine can run a fleet, and report what to fix."""
    from medha.cli.doctor import diagnose

    if not diagnose(file, port, ops_port, Console(), run_dir):
        raise typer.Exit(2)


def _policy(name: str | None) -> str | None:
    """Convert a policy name, in either spelling, to the resource's spelling."""
    if name is None:
        return None
    spellings = {
        spelt.lower(): known for known, plain in POLICIES.items() for spelt in (known, plain)
    }
    if name.lower() not in spellings:
        raise SpecError("--policy", name, f"must be one of {', '.join(POLICIES)}", "use LARS")
    return spellings[name.lower()]


def _usage(error: Exception) -> str:
    """Error line for a wrong command line; the help if no command was given."""
    message = str(getattr(error, "message", error)).strip()
    context = getattr(error, "ctx", None)
    if "\n" in message or context is None:
        return f"{message}\n"
    text = getattr(error, "format_message", error.__str__)().rstrip(".")
    # Without a command the help is shown already.
    return f"medha: {text}; see {context.command_path} --help\n" if text else ""


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints a line instead of a traceback for each error that a user can fix."""
    try:
        sys.exit(app(args=arguments, standalone_mode=False))
    except USAGE_ERROR as error:
        sys.stderr.write(_usage(error))
        sys.exit(2)
    except UserError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"medha: {line}\n")
        sys.exit(2)
    except MedhaError as error:
        sys.stderr.write(f"medha: {error}\n")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
