"""``dist-aclgraph run`` starts a deployment, answers some prompts, and stops the deployment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from signal import SIGTERM

from rich.console import Console

from dist_aclgraph.actors.controller.controller import Progress
from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.actors.deployment.deployment_protocol import Deployment
from dist_aclgraph.actors.deployment.llm import LLM
from dist_aclgraph.actors.deployment.outputs import RequestOutput
from dist_aclgraph.cli.checks import check_deployment
from dist_aclgraph.cli.last_start import keep_report
from dist_aclgraph.cli.progress import StartProgress
from dist_aclgraph.cli.signals import Signals
from dist_aclgraph.config import Config
from dist_aclgraph.sampling import SamplingParams


def run(
    config: Config, prompts: Sequence[str], params: SamplingParams, *, raw: bool, as_json: bool
) -> None:
    """Print the answers to prompts.

    Args:
        raw: whether the prompts are used without the chat template.

    Raises:
        DistAclGraphError: the deployment did not start, or a request failed.
        SystemExit: a signal arrived, and the deployment was stopped. The code is 128 plus the
            signal's number.
    """
    config = check_deployment(config)
    with Signals() as signals:
        try:
            with _started(config, signals) as llm:
                keep_report(config.name, llm.report())
                for prompt, request in zip(prompts, _ask(llm, prompts, params, raw), strict=True):
                    _show(prompt, request, as_json)
        except (KeyboardInterrupt, SystemExit):  # Ray's handler of SIGTERM raises SystemExit
            raise SystemExit(128 + (signals.received or SIGTERM)) from None


def _started(config: Config, signals: Signals) -> LLM:
    """Start a deployment. A signal interrupts the start, and the caller's code in this context."""
    with StartProgress(Console(stderr=True)) as show:

        def stop() -> None:
            show.stop_at_once()
            raise KeyboardInterrupt

        def report(progress: Progress) -> None:
            signals.take_over()  # needed again, because Ray has replaced the handlers
            show(progress)

        def start(config: Config) -> Deployment:
            return deployment.start(config, on_progress=report)

        signals.on_first = stop
        return LLM(config, start=start)


def _ask(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, raw: bool
) -> list[RequestOutput]:
    if raw:
        return llm.generate(prompts, params, use_tqdm=False)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return llm.chat(conversations, params, use_tqdm=False)


def _show(prompt: str, request: RequestOutput, as_json: bool) -> None:
    (output,) = request.outputs
    if not as_json:
        print(f"> {prompt}\n{output.text}", flush=True)
        return
    answer = {
        "prompt": prompt,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "token_ids": output.token_ids,
    }
    print(json.dumps(answer), flush=True)
