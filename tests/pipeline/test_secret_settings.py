"""Which settings are shown without their value, or not at all."""

from __future__ import annotations

import pytest

from dovetail.errors import ConfigError
from dovetail.pipeline.overrides import parse_overrides
from dovetail.pipeline.secret_settings import is_secret_storage_option, mask_override


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("stages.caption.env.HF_TOKEN=abc", "stages.caption.env.HF_TOKEN=***"),
        ("stages.caption.env.ANYTHING=abc=d", "stages.caption.env.ANYTHING=***"),
        ("stages.caption.env={HF_TOKEN: abc}", "stages.caption.env=***"),
        ("defaults.env.X=abc", "defaults.env.X=***"),
        ("stages.0.runtime_env.env_vars.X=abc", "stages.0.runtime_env.env_vars.X=***"),
        ("source.storage_options.aws_secret_access_key=abc", "source.storage_options.aws_secret_access_key=***"),
        ("sink.storage_options.key=abc", "sink.storage_options.key=***"),
        ("stages.ask.kwargs.api_key=abc", "stages.ask.kwargs.api_key=***"),
        ("stages.ask.kwargs.Password=abc", "stages.ask.kwargs.Password=***"),
        ("stages.caption.workers=4", "stages.caption.workers=4"),
        ("stages.clean.kwargs.tokenizer=gpt2", "stages.clean.kwargs.tokenizer=gpt2"),
        ("process.clean.text_key=text", "process.clean.text_key=text"),
        ("env", "env"),
    ],
)
def test_values_that_may_be_secrets_are_masked(text: str, shown: str) -> None:
    assert mask_override(text) == shown


@pytest.mark.parametrize("text", ["stages.captoin.env.TOKEN=s3cret", "stages.5.env.TOKEN=s3cret"])
def test_errors_about_an_override_do_not_show_its_secret(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(text, {"stages": [{"name": "caption"}]})
    assert "s3cret" not in str(caught.value)
    assert "env.TOKEN=***" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("aws_secret_access_key", True),
        ("aws_session_token", True),
        ("azure_storage_sas_token", True),
        ("google_application_credentials", True),
        ("sse_customer_key", True),
        ("aws_region", False),
        ("endpoint", False),
    ],
)
def test_storage_options_that_may_be_secrets_are_recognised(name: str, is_secret: bool) -> None:
    assert is_secret_storage_option(name) is is_secret
