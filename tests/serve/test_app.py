from __future__ import annotations

import inspect

import pytest

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.app import AppArgs, app
from tests.serve.conftest import CONFIG


def test_serve_can_see_the_class_of_the_builders_argument():
    assert inspect.signature(app).parameters["args"].annotation is AppArgs


def test_arguments_of_serve_run_override_the_file():
    args = AppArgs.model_validate({"config": str(CONFIG), "parallel.tp": "1", "dtype": "float32"})

    config = args.load()

    assert (config.parallel.tp, config.dtype) == (1, "float32")


def test_the_default_configuration_is_the_demo(monkeypatch):
    monkeypatch.chdir(CONFIG.parents[1])

    assert AppArgs().load().name == "tiny-qwen3"


def test_a_wrong_argument_is_the_error_that_serve_shows():
    args = AppArgs.model_validate({"config": str(CONFIG), "nonsense": "1"})

    with pytest.raises(ConfigError, match="nonsense"):
        args.load()
    with pytest.raises(ConfigError, match="nonsense"):
        app(args)


def test_the_application_is_named_after_its_ingress():
    application = app(AppArgs(config=str(CONFIG)))

    assert application._bound_deployment.name == "ingress"
