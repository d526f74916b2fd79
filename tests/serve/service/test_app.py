from __future__ import annotations

import inspect
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
from ray.serve.exceptions import RayServeException

from dist_aclgraph.config import load_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.app import AppArgs, GroupsReplica, RefusedError, app
from tests.serve.conftest import CONFIG


def test_serve_can_see_the_class_of_the_builders_argument():
    assert inspect.signature(app).parameters["args"].annotation is AppArgs


def test_arguments_of_serve_run_override_the_file():
    given = {"parallel.tp": "1", "dtype": "float32", "model_overrides": '{"rope_theta": 1e6}'}
    args = AppArgs.model_validate({"config": str(CONFIG), **given})

    config = args.load()

    assert (config.parallel.tp, config.dtype) == (1, "float32")
    assert config.model_overrides == {"rope_theta": 1e6}


def test_the_default_configuration_is_the_demo(monkeypatch):
    monkeypatch.chdir(CONFIG.parents[1])

    assert AppArgs().load().name == "tiny-qwen3"


@pytest.mark.parametrize(("key", "value"), [("nonsense", "1"), ("dtype", "[")])
def test_a_wrong_argument_is_the_error_that_serve_shows(key, value):
    args = AppArgs.model_validate({"config": str(CONFIG), key: value})

    with pytest.raises(ConfigError, match=key):
        args.load()
    with pytest.raises(RefusedError, match=key):
        app(args)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["/nowhere/at/all", str(CONFIG.parent)])
def test_serve_run_ends_with_one_sentence_about_a_wrong_model(model):
    """The model must be checked before the connection to Ray, which would fail here."""
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "dist_aclgraph:app"]

    found = subprocess.run(
        [*command, f"config={CONFIG}", f"model={model}"],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
    )  # fmt: skip

    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ") and model in last


def test_serve_status_has_the_sentence_alone():
    """If an error belongs to Ray Serve's own classes, Ray Serve shows only the error's text. For
    all other errors, Ray Serve shows a traceback.
    """
    with pytest.raises(RayServeException) as raised:
        app(AppArgs.model_validate({"config": str(CONFIG), "model": "/nowhere"}))

    assert str(raised.value).startswith("model is '/nowhere': no such directory")
    assert "\n" not in str(raised.value)


def test_the_application_is_named_after_its_ingress():
    application = app(AppArgs(config=str(CONFIG)))

    assert application._bound_deployment.name == "ingress"


def test_groups_of_another_version_wait_for_the_npus_of_those_that_drain():
    """Ray Serve first waits for the streams of the previous version, and then ends the groups of
    that version.
    """
    config = load_config(CONFIG, {"serve.drain_s": 500.0})
    started = []
    GroupsReplica.func_or_class.__init__(Mock(), config, started.append)

    [found] = started
    # An ingress ends within these seconds, and the groups end after the ingress.
    ends_s = config.serve.drain_s + config.timeouts.stop_s
    assert found.timeouts.place_s >= config.timeouts.place_s + 2 * ends_s
    assert found.timeouts.join_s == config.timeouts.join_s
