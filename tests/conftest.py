"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

IN_CI = bool(os.environ.get("CI"))
settings.register_profile(  # a busy machine is no failure; hangs end at the timeout of pytest
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=IN_CI, print_blob=True, **({"database": None} if IN_CI else {})
)  # fmt: skip
settings.load_profile("untimed")
if IN_CI:  # else examples hold constants of whatever module a worker has imported by then, and two runs try different ones
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = providers.Constants


@pytest.fixture(scope="session")
def project_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def cdm():
    from healthrag.omop import open_omop

    with open_omop("gibleed") as opened:
        yield opened
