"""Environment variables sent to workers on other nodes, and hints about missing ones."""

from __future__ import annotations

import os

import pytest

from dovetail.engines.exception_summary import summarize_exception
from dovetail.engines.ray.environment import NEVER_SENT, missing_variable_hint, select_variables
from dovetail.errors import ConfigError

SAYS = 'MY_TOKEN is set for the driver, but not sent to workers: env_from=["MY_TOKEN"] or --env-from MY_TOKEN'


def test_only_listed_variables_are_sent() -> None:
    sent = {
        "LOG_LEVEL": "debug",
        "EXPERIMENT_PATH": "/x",
        "WANDB_API_KEY": "k",
        "HF_TOKEN": "t",
        "AWS_PROFILE": "p",
        "HTTPS_PROXY": "h",
        "https_proxy": "h",
        "no_proxy": "localhost",
        "PYTHONPATH": "/lib",
        "LD_LIBRARY_PATH": "/cuda",
        "DOVETAIL_HOME": "/home",
    }
    kept = {"HOME": "/root", "PATH": "/bin", "MY_TOKEN": "secret", "XHF_TOKEN": "no", "RAY_ADDRESS": "auto"}
    assert select_variables(sent | kept | dict.fromkeys(NEVER_SENT, "1")) == sent


def test_variables_named_by_the_user_are_sent() -> None:
    assert select_variables({"MY_TOKEN": "x", "OTHER": "y"}, ["MY_TOKEN", "MY_TOKEN"]) == {"MY_TOKEN": "x"}


def test_all_names_that_cannot_be_sent_are_reported_with_a_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        select_variables({"MY_TOKEN": "x", "RANK": "3"}, ["MY_TOKEM", "RANK", "CUDA_VISIBLE_DEVICES"])
    assert caught.value.exit_code == 2
    assert caught.value.codes == ("DT398", "DT399", "DT399")
    text = str(caught.value)
    assert "'MY_TOKEM' of env_from is not set (did you mean 'MY_TOKEN'?)" in text
    assert "export MY_TOKEM=..." in text


def test_a_key_error_of_the_environment_becomes_a_hint() -> None:
    os.environ.pop("MY_TOKEN", None)
    with pytest.raises(KeyError) as caught:
        _ = os.environ["MY_TOKEN"]
    summary = summarize_exception(caught.value)
    assert missing_variable_hint(summary.line, summary.detail, {"MY_TOKEN": "x"}, {}) == SAYS
    assert missing_variable_hint(summary.line, "", {"MY_TOKEN": "x"}, {}) == SAYS


def test_a_setup_whose_error_was_raised_from_a_key_error_gets_the_hint() -> None:
    def log_in() -> None:
        try:
            os.environ["MY_TOKEN"]
        except KeyError as error:
            raise RuntimeError("no access") from error

    with pytest.raises(RuntimeError) as caught:
        log_in()
    summary = summarize_exception(caught.value)
    assert missing_variable_hint(summary.line, summary.detail, {"MY_TOKEN": "x"}, {"OTHER": "1"}) == SAYS


def test_an_error_that_mentions_a_variable_gets_the_hint() -> None:
    message = "OpenAIError: pass api_key or set the MY_TOKEN environment variable"
    assert missing_variable_hint(message, "Traceback ...", {"MY_TOKEN": "x"}, {}) == SAYS


@pytest.mark.parametrize(
    ("environ", "sent"),
    [({}, {}), ({"MY_TOKEN": "x"}, {"MY_TOKEN": "x"}), ({"OTHER": "x"}, {})],
    ids=["not set anywhere", "it was sent", "the driver has another"],
)
def test_no_hint_is_given_where_sending_would_not_help(environ: dict[str, str], sent: dict[str, str]) -> None:
    assert missing_variable_hint("KeyError: 'MY_TOKEN'", "", environ, sent) is None


def test_a_key_error_of_another_mapping_gets_no_hint() -> None:
    with pytest.raises(KeyError) as caught:
        {"other": 1}["HOME"]
    summary = summarize_exception(caught.value)
    assert missing_variable_hint(summary.line, summary.detail, {"HOME": "/root"}, {}) is None


def test_variables_that_workers_set_themselves_are_never_recommended() -> None:
    assert missing_variable_hint("KeyError: 'RANK'", "", {"RANK": "0"}, {}) is None
