"""Options that the routing guide names are taken under those names."""

from __future__ import annotations

import pytest
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.mocker.app import worker_config
from kvrouter.mocker.settings import MockerSettings
from kvrouter.runtime.config.settings import SettingsError
from kvrouter.runtime.config.sources import read_all
from kvrouter.v1.common_pb2 import Transport


def test_the_indexer_takes_the_guides_names() -> None:
    (settings,) = read_all([IndexerSettings], ["--router-reset-states", "--router-snapshot-threshold", "7"], {})
    assert settings.reset_states
    assert settings.snapshot_threshold == 7


def test_a_local_indexer_is_the_core_nats_transport() -> None:
    (settings,) = read_all([MockerSettings], ["--enable-local-indexer"], {})
    assert worker_config(settings, 1).transport == Transport.TRANSPORT_CORE_NATS
    with pytest.raises(SettingsError, match="leave --transport durable out"):
        read_all([MockerSettings], ["--enable-local-indexer", "--transport", "durable"], {})
