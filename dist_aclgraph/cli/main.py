"""``dist-aclgraph run | serve | scale | roll | explain | plan | simulate | doctor | probe``.

Slow imports are inside the functions of the commands.

A user's mistake ends a command with one sentence on stderr and exit code 2. Any other failure ends
a command with one sentence on stderr and exit code 1.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dist_aclgraph.cli.exit_codes import tell
from dist_aclgraph.cli.model_options import (
    ModelCommand,
    load_local_model,
    load_model,
    show_and_save,
    with_model_options,
)
from dist_aclgraph.errors import ConfigError, DistAclGraphError
from dist_aclgraph.extras import require
from dist_aclgraph.simulate.copy_rates import DISK_GB_S, HOST_GB_S, NETWORK_GB_S, copy_rates
from dist_aclgraph.version import VERSION

cli = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would cut off the names of long options
)
ConfigPath = Annotated[
    str, typer.Argument(metavar="CONFIG|MODEL", help="YAML file, or a model's directory or name")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value over the file, e.g. parallel.tp=2")
]
NumGroups = Annotated[int, typer.Argument(help="lockstep groups that take requests, 1 or more")]
DeploymentName = Annotated[
    str | None, typer.Option(help="name of its controller, where several deployments run")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="HOST:PORT",
        help="where a service said that its own Ray runs; goes before RAY_ADDRESS",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dist-aclgraph {VERSION}")
        raise typer.Exit


@cli.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="show it and exit"),
    ] = False,
) -> None:
    """Serve large language models on many Ascend NPUs."""


@cli.command(cls=ModelCommand)
@with_model_options(serves=False)
def run(
    config: ConfigPath,
    prompt: Annotated[list[str], typer.Option(help="may be given several times")],
    options: dict[str, Any],
    overrides: Overrides = None,
    max_tokens: Annotated[int, typer.Option(help="most tokens per answer")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token")] = 0.0,
    raw: Annotated[bool, typer.Option(help="leave out the chat template")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer prompts and stop."""
    with _user_errors():
        from dist_aclgraph.cli.run import run as run_deployment
        from dist_aclgraph.sampling import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        loaded = load_local_model(config, overrides, options)
        run_deployment(loaded, prompt, params, raw=raw, as_json=as_json)


@cli.command(cls=ModelCommand)
@with_model_options(serves=True)
def serve(
    config: ConfigPath,
    options: dict[str, Any],
    overrides: Overrides = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the configuration as YAML")
    ] = None,
) -> None:
    """Serve the OpenAI API until Ctrl-C or SIGTERM; by default on 127.0.0.1:8000."""
    with _user_errors():
        from dist_aclgraph.cli.serve import serve as serve_deployment
        from dist_aclgraph.files.hub import with_local_model

        loaded = load_model(config, overrides, options)
        changes = {name for name, value in options.items() if value is not None}
        show_and_save(loaded, config, bool(changes - {"host", "port", "uds"}), save)
        serve_deployment(with_local_model(loaded))


@cli.command(cls=ModelCommand)
@with_model_options(serves=False)
def plan(
    config: ConfigPath,
    options: dict[str, Any],
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="draw padding over batch size: a .png")] = None,
) -> None:
    """Show which graphs would be captured and what they cost; needs no device."""
    with _user_errors():
        from rich.console import Console

        from dist_aclgraph.cli.plan_report import plan_report, render_plan
        from dist_aclgraph.device.decision import decide_device

        if plot is not None:
            require("matplotlib", "plots", "--plot")
        loaded = load_local_model(config, overrides, options, weights=False)
        report = plan_report(decide_device(loaded, "plan"))
        if plot is not None:
            from dist_aclgraph.cli.plan_plot import plot_padding

            plot_padding(report, plot)
        if as_json:
            print(json.dumps(report, indent=2))
        else:
            render_plan(report, Console())


@cli.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines or CSV: batches, or requests by arrival")
    ] = None,
    poisson: Annotated[
        float | None, typer.Option(metavar="RATE", help="requests a second, at random")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="end after so many requests")] = None,
    seconds: Annotated[float | None, typer.Option(help="end after so many seconds")] = None,
    seed: Annotated[int, typer.Option(help="of random requests")] = 0,
    prompt_tokens: Annotated[float, typer.Option(help="mean of random prompts")] = 512.0,
    output_tokens: Annotated[float, typer.Option(help="mean of random answers")] = 128.0,
    beginnings: Annotated[
        int, typer.Option(help="prefixes that random prompts share; groups share them, too")
    ] = 0,
    beginning_tokens: Annotated[int, typer.Option(help="tokens of each of these prefixes")] = 1024,
    accepted: Annotated[
        float | None,
        typer.Option(help="share of drafts that are accepted, if all drafts before them are"),
    ] = None,
    times: Annotated[
        Path | None, typer.Option(help="step times: the report of a deployment, as JSON")
    ] = None,
    step_ms: Annotated[float, typer.Option(help="assumed time of any step")] = 10.0,
    token_ms: Annotated[float, typer.Option(help="and of each of its padded tokens")] = 0.05,
    eager_step_ms: Annotated[
        float | None, typer.Option(help="of a step without a graph, if different")
    ] = None,
    eager_token_ms: Annotated[
        float | None, typer.Option(help="and of each of its tokens, if different")
    ] = None,
    capture_ms: Annotated[float, typer.Option(help="assumed time of a capture")] = 50.0,
    host_gbs: Annotated[
        float, typer.Option(help="assumed GB/s between an NPU and copies of KV in memory")
    ] = HOST_GB_S,
    disk_gbs: Annotated[
        float, typer.Option(help="and from the disk, for a data parallel rank")
    ] = DISK_GB_S,
    network_gbs: Annotated[
        float, typer.Option(help="and between nodes, for each node of a group")
    ] = NETWORK_GB_S,
    compare: Annotated[bool, typer.Option("--compare", help="try other sets of graphs")] = False,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="draw padding and eager steps: a .png")] = None,
) -> None:
    """Replay a load without a device, and report padding, eager steps and plan changes.

    The times of steps are assumptions.
    """
    with _user_errors():
        from rich.console import Console

        from dist_aclgraph.cli.simulate import render_simulation, simulate_with_progress
        from dist_aclgraph.device.decision import decide_device
        from dist_aclgraph.simulate.load_options import LoadOptions
        from dist_aclgraph.simulate.times import line_times, read_times

        if plot is not None:
            require("matplotlib", "plots", "--plot")
        assumed = line_times(step_ms, token_ms, capture_ms, eager_step_ms, eager_token_ms)
        options = LoadOptions(
            trace=trace,
            poisson=poisson,
            requests=requests,
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            beginnings=beginnings,
            beginning_tokens=beginning_tokens,
            accepted=accepted,
            seed=seed,
        )
        report = simulate_with_progress(
            decide_device(load_local_model(config, overrides, weights=False), "plan"),
            options,
            assumed if times is None else read_times(times, capture_ms),
            copy_rates(host_gbs, disk_gbs, network_gbs),
            compare,
        )
        if plot is not None:
            from dist_aclgraph.cli.simulate_plot import plot_simulation

            plot_simulation(report, plot)
        if as_json:
            print(json.dumps(report, indent=2))
        else:
            render_simulation(report, Console())


@cli.command()
def scale(groups: NumGroups, deployment: DeploymentName = None, ray: RayAddress = None) -> None:
    """Change the number of groups of a running deployment; return when the change is complete.

    New groups start while the existing groups serve. Surplus groups, the newest first, finish their
    requests and stop.
    """
    with _user_errors():
        from rich.console import Console

        from dist_aclgraph.actors.controller.serving_groups import check_count
        from dist_aclgraph.actors.deployment.running import running_deployment
        from dist_aclgraph.cli.progress import StartProgress

        check_count(groups)
        with running_deployment(deployment, ray) as running:
            with StartProgress(Console(stderr=True)) as show:
                running.scale(groups, show)
            print(f"{running.name} serves with {groups} groups")


@cli.command()
def roll(
    config: ConfigPath,
    overrides: Overrides = None,
    deployment: DeploymentName = None,
    ray: RayAddress = None,
) -> None:
    """Replace the groups of a running deployment, one after another, with groups of another
    configuration.

    No request fails, because old groups finish their requests. Ingresses have already read some
    values, which must not change: the seed; the model; and the model's overrides, names, task and
    sampling defaults. Changes of the keys of serve have no effect.
    """
    with _user_errors():
        from rich.console import Console

        from dist_aclgraph.actors.deployment.deployment import check_startable
        from dist_aclgraph.actors.deployment.running import running_deployment
        from dist_aclgraph.cli.progress import StartProgress
        from dist_aclgraph.device.decision import decide_device

        loaded = decide_device(load_local_model(config, overrides), "cluster")
        check_startable(loaded)
        with running_deployment(deployment, ray) as running:
            with StartProgress(Console(stderr=True)) as show:
                running.roll(loaded, show)
            print(f"{running.name} serves {loaded.name} by {config}")


@cli.command()
def explain(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder of the logs, as the service printed it")
    ],
) -> None:
    """Show which rank of each group stopped, in which step, and which ranks waited for it.

    If the ranks of a group were on several nodes, copy the files of all nodes into one folder.
    """
    with _user_errors():
        from rich.console import Console

        from dist_aclgraph.cli.explain import read_groups, show_groups

        show_groups(read_groups(folder), Console())


@cli.command()
def keys() -> None:
    """Print what every key of a configuration means, in Markdown."""
    from dist_aclgraph.cli.keys import render_keys

    print(render_keys(), end="")


@cli.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file: its kv folders, and with --cluster its ports, are checked"),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="check all nodes of a Ray cluster (RAY_ADDRESS)")
    ] = False,
    ray: RayAddress = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, NPU or emulator, compiler, memory, ports.

    With --cluster, also check all nodes of a Ray cluster: their versions, the addresses of their
    NPUs, and the connections between the nodes.
    """
    with _user_errors():
        from dist_aclgraph.cli.doctor.finding import show_findings

        if cluster:
            from dist_aclgraph.cli.doctor.cluster import examine_cluster

            loaded = None if config is None else load_model(config, overrides)
            findings = examine_cluster(loaded, ray)
        elif ray is not None:
            raise ConfigError("--ray needs --cluster")
        else:
            from dist_aclgraph.cli.doctor.examine import examine

            findings = examine(None if config is None else load_model(config, overrides))
        show_findings(findings, as_json=as_json)
    raise typer.Exit(0 if all(finding.is_ok for finding in findings) else 1)


@cli.command()
def probe(
    level: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: under a minute; full: minutes")
    ] = "quick",
    out: Annotated[
        Path, typer.Option(help="the report; answers that it has are not asked again")
    ] = Path("probe.json"),
    kind: Annotated[
        Literal["auto", "npu", "emulated"], typer.Option(help="as device.kind")
    ] = "auto",
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="REPORT",
            help="ask nothing: show a report's differences, write its rules and page",
        ),
    ] = None,
) -> None:
    """Test how this machine's device behaves; write a report as JSON and as a page of HTML.

    Each test runs in a separate process with a time limit; harmless tests run first. No test needs
    root.
    """
    with _user_errors():
        from dist_aclgraph.cli.probe import compare as compare_report
        from dist_aclgraph.cli.probe import page_of, run_probe
        from dist_aclgraph.config import DeviceConfig

        if compare is not None:
            print(compare_report(compare))
            return
        report = run_probe(level, out, DeviceConfig(kind=kind))
        print(f"{report.summary()}: {out}, {page_of(out)}", flush=True)
        if multiprocessing.active_children():
            os._exit(0)  # a normal exit would wait for a killed process that hangs in the driver


@contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except DistAclGraphError as e:
        raise typer.Exit(tell(e)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    cli()


if __name__ == "__main__":
    main()
