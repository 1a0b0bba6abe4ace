"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure; hangs end at the timeout of pytest
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def project_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def cdm():
    from healthrag.omop import open_omop

    with open_omop("gibleed") as opened:
        yield opened
