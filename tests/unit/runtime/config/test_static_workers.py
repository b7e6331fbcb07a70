"""What may be listed by hand, and what a wrong list says."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.runtime.config.settings import RoutingSettings, SettingsError
from kvrouter.runtime.config.sources import read_all
from kvrouter.runtime.config.static_workers import StaticEndpoints


class RouterSettings(RoutingSettings):
    """Options for these tests."""


FILE = """
[[components]]
model = "a"
workers = [{endpoint = "h:1"}, {endpoint = "h:2", worker_id = 7, ranks = 4, total_blocks = 100, labels = {zone = "x"}}]

[[components]]
name = "other"
model = "b"
block_size = 64
role = "decode"
workers = [{endpoint = "[::1]:3"}]
"""


def read(*argv: str, **environ: str) -> StaticEndpoints | None:
    settings = read_all([RouterSettings], argv, environ)[0]
    assert isinstance(settings, RouterSettings)
    return settings.static_endpoints()


def test_nothing_is_listed_by_default() -> None:
    assert read() is None


@pytest.mark.parametrize("how", ["flag", "environment", "file"])
def test_addresses_form_one_component(how: str, tmp_path: Path) -> None:
    config = tmp_path / "router.toml"
    config.write_text('static_workers = ["h:1", "h:2"]\nstatic_model = "m"\nstatic_block_size = 32\n')
    listed = {
        "flag": lambda: read("--static-workers", "h:1,h:2", "--static-model", "m", "--static-block-size", "32"),
        "environment": lambda: read(
            KVROUTER_STATIC_WORKERS="h:1,h:2", KVROUTER_STATIC_MODEL="m", KVROUTER_STATIC_BLOCK_SIZE="32"
        ),
        "file": lambda: read("--config", str(config)),
    }[how]()
    assert listed is not None
    component = listed.components[0]
    assert (component.name, component.model, component.block_size) == ("workers", "m", 32)
    assert [worker.endpoint for worker in component.workers] == ["h:1", "h:2"]


def test_a_file_lists_components(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    path.write_text(FILE)
    listed = read("--static-workers", str(path), "--static-probe-seconds", "0.5")
    assert listed is not None
    assert listed.probe_seconds == 0.5
    one, other = listed.components
    assert (one.name, one.block_size, one.role) == ("workers", 16, "both")
    assert (one.workers[1].worker_id, one.workers[1].ranks, one.workers[1].labels) == (7, 4, {"zone": "x"})
    assert (other.name, other.model, other.block_size, other.role) == ("other", "b", 64, "decode")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--static-workers", "h:1"), "--static-model"),
        (("--static-workers", "h", "--static-model", "m"), "workers.0.endpoint: expected host:port"),
        (("--static-workers", "h:1,h:1", "--static-model", "m"), "expected each endpoint once, received h:1 twice"),
        (("--static-workers", "/nowhere.toml"), "cannot read /nowhere.toml"),
        (("--static-workers", "h:1", "--static-model", "m", "--static-block-size", "0"), "--static-block-size"),
    ],
)
def test_a_wrong_option_is_one_line(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(*argv)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = ", "is not valid TOML"),
        ("", "components: field required"),
        ('[[components]]\nmodel = "m"\nworkers = []', "components.0.workers"),
        ('[[components]]\nworkers = [{endpoint = "h:1"}]', "components.0.model: field required"),
        ('[[components]]\nmodel = "m"\nworkers = [{endpoint = "h:1", rank = 2}]', "workers.0.rank: extra inputs"),
        (
            '[[components]]\nmodel = "m"\nworkers = [{endpoint="h:1", worker_id=1}, {endpoint="h:2", worker_id=1}]',
            "expected each worker_id once, received 1 twice",
        ),
        (
            '[[components]]\nmodel = "m"\nworkers = [{endpoint = "h:1"}, {endpoint = "http://h:2"}]',
            "expected addresses or URLs, received both",
        ),
        ('[[components]]\nmodel = "m"\nworkers = [{endpoint = "http://"}]', "expected http://host:port"),
        ('[[components]]\nmodel = "m"\nworkers = [{endpoint = "http://h:99999"}]', "workers.0.endpoint"),
        (
            '[[components]]\nmodel = "m"\nworkers = [{endpoint = "h:1"}]\n' * 2,
            "expected each component once, received workers twice",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read("--static-workers", str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_urls_of_openai_servers_are_read_without_their_version() -> None:
    listed = read("--static-workers", "http://h:1/v1,https://h/", "--static-model", "m")
    assert listed is not None
    (component,) = listed.components
    assert [worker.endpoint for worker in component.workers] == ["http://h:1", "https://h"]


def test_a_file_and_a_model_beside_it_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    path.write_text(FILE)
    with pytest.raises(SettingsError, match="remove --static-model"):
        read("--static-workers", str(path), "--static-model", "m")
