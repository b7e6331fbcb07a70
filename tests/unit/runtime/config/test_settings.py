"""Where options come from, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.runtime.config.settings import ServiceSettings, SettingsError, load, load_all
from kvrouter.runtime.config.sources import read_all
from pydantic import AliasChoices, Field, ValidationError


class GatewaySettings(ServiceSettings):
    """Options for these tests."""

    weight: float = Field(default=1.0, ge=0, validation_alias=AliasChoices("weight", "kv-overlap-score-weight"))
    """Weight of prefill, 100%."""
    track_blocks: bool = True
    """Whether blocks are tracked."""
    threshold: float | None = None
    """Share, or none."""
    models: tuple[str, ...] = ()
    """Names."""
    labels: dict[str, str] = Field(default={})
    """Labels."""


class OtherSettings(ServiceSettings):
    """Options of another service in the same process."""

    section = "scheduler"
    depth: int = 3
    """Depth."""


def read(*argv: str, **environ: str) -> GatewaySettings:
    settings = read_all([GatewaySettings], argv, environ)[0]
    assert isinstance(settings, GatewaySettings)
    return settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "router.toml"
    path.write_text('weight = 2.0\nnamespace = "from-file"\n[gateway]\ntrack-blocks = false\n[scheduler]\ndepth = 9\n')
    return path


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(config: Path) -> None:
    assert read().weight == 1.0
    assert read("--config", str(config)).weight == 2.0
    assert read(KVROUTER_CONFIG=str(config)).weight == 2.0
    assert read("--config", str(config), KVROUTER_WEIGHT="3").weight == 3.0
    assert read("--weight", "4", "--config", str(config), KVROUTER_WEIGHT="3").weight == 4.0
    assert read(KVROUTER_WEIGHT="").weight == 1.0


def test_a_file_serves_several_services_by_their_tables(config: Path) -> None:
    assert read("--config", str(config)).track_blocks is False
    assert read("--config", str(config)).namespace == "from-file"
    gateway, other = read_all([GatewaySettings, OtherSettings], ["--depth", "4"], {})
    assert (gateway.weight, other.depth) == (1.0, 4)
    assert read_all([OtherSettings], [], {})[0].depth == 3


def test_a_flag_of_all_services_counts_for_each() -> None:
    gateway, other = read_all([GatewaySettings, OtherSettings], ["--namespace", "both"], {})
    assert (gateway.namespace, other.namespace) == ("both", "both")


@pytest.mark.parametrize("name", ["weight", "kv-overlap-score-weight"])
def test_each_name_of_an_option_is_a_flag_a_variable_and_a_key(name: str, tmp_path: Path) -> None:
    assert read(f"--{name}", "5").weight == 5.0
    assert read(f"--{name}=5").weight == 5.0
    variable = f"KVROUTER_{name.upper().replace('-', '_')}"
    assert read(**{variable: "5"}).weight == 5.0
    for key in (name, name.replace("-", "_")):
        (tmp_path / "c.toml").write_text(f"{key} = 5\n")
        assert read("--config", str(tmp_path / "c.toml")).weight == 5.0


def test_the_documents_variables_are_read_after_our_own() -> None:
    assert read(NATS_SERVER="nats://n:1", ETCD_ENDPOINTS="e:1").nats == "nats://n:1"
    assert read(ETCD_ENDPOINTS="e:1,e:2").etcd == "e:1,e:2"
    assert read(NATS_SERVER="nats://n:1", KVROUTER_NATS="nats://n:2").nats == "nats://n:2"


def test_kinds_of_values() -> None:
    assert read("--no-track-blocks").track_blocks is False
    assert read("--track-blocks", KVROUTER_TRACK_BLOCKS="false").track_blocks is True
    assert read(KVROUTER_TRACK_BLOCKS="no").track_blocks is False
    assert read("--threshold", "0.5").threshold == 0.5
    assert read("--threshold", "none", KVROUTER_THRESHOLD="0.5").threshold is None
    assert read("--models", "a, b,").models == ("a", "b")
    assert read("--labels", "zone=a,rack=7").labels == {"zone": "a", "rack": "7"}


def test_a_list_may_be_given_in_several_flags() -> None:
    assert read("--models", "a", "--models", "b,c").models == ("a", "b", "c")
    assert read("--models", "a", KVROUTER_MODELS="b").models == ("a",)


def test_settings_are_frozen_and_their_ids_differ() -> None:
    settings = read()
    with pytest.raises(ValidationError):
        settings.weight = 2.0
    assert settings.instance_id != read().instance_id


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--weight", "heavy"], {}, "--weight: "),
        (["--kv-overlap-score-weight", "-1"], {}, "--kv-overlap-score-weight: "),
        ([], {"KVROUTER_KV_OVERLAP_SCORE_WEIGHT": "-1"}, "KVROUTER_KV_OVERLAP_SCORE_WEIGHT: "),
        (["--namespace", "a.b"], {}, "--namespace: expected a name of 1 to 64"),
        (["--bind", "nowhere"], {}, "--bind: expected host:port"),
        (["--bind", "::1:80"], {}, "--bind: expected host:port"),
        (["--bind", "h:99999"], {}, "--bind: expected host:port"),
        (["--log-level", "loud"], {}, "--log-level: "),
        (["--config", "/nonexistent.toml"], {}, "cannot read /nonexistent.toml"),
    ],
)
def test_a_wrong_value_names_its_source(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(*argv, **environ)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wieght = 2", "wieght in {}: unknown option; did you mean weight?"),
        ("zzz = 2", "zzz in {}: unknown option; --help lists all"),
        ('release = "0.0.1"\nwieght = 2', "wieght in {}: unknown option"),
        ('release = "new"', "release in {}: expected a release such as"),
        ("release = 0.2", "release in {}: expected a release such as"),
        ("[gateway]\nwieght = 2", "wieght in [gateway] of {}: unknown option"),
        ("[gatevay]\nweight = 2", "gatevay in {}: unknown option"),
        ("weight = 'x'", "weight in {}: "),
        ("gateway = 1", "{}: expected gateway to be a table"),
        ("weight =", "{} is not valid TOML"),
    ],
)
def test_a_wrong_file_names_the_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read("--config", str(path))
    assert str(caught.value).startswith(message.format(path))


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (
            'release = "999.1"\nweight = 2\nwieght = 3\n[gateway]\nbrand_new = 1\n[brand-new]\na = 1',
            ["wieght in {}: ignored", "brand-new in {}: ignored", "brand_new in [gateway] of {}: ignored"],
        ),
        (
            "weight = 2\n[gateway]\nmax_held = 1",
            ["max_held in [gateway] of {}: ignored, an option of an earlier release"],
        ),
    ],
)
def test_keys_of_another_release_are_warnings_once_each(
    text: str, warnings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    gateway, _ = read_all([GatewaySettings, GatewaySettings], ["--config", str(path)], {})
    assert gateway.weight == 2.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(warnings)
    assert all(warning.format(path) in line for warning, line in zip(warnings, lines, strict=True))


@pytest.mark.parametrize("argv", [["--weight", "heavy"], ["--nonsense", "1"], ["--wei", "1"], ["stray"], ["--weight"]])
def test_a_wrong_command_line_is_one_line_and_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(GatewaySettings, argv, prog="gateway")
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("gateway: ")
    assert output.err.count("\n") == 1


def test_help_lists_every_option_with_its_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_all([GatewaySettings, OtherSettings], ["--help"], prog="gateway")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for kind in (GatewaySettings, OtherSettings):
        for name in kind.model_fields:
            assert f"--{name.replace('_', '-')}" in text
            assert f"KVROUTER_{name.upper()}" in text
    assert "Weight of prefill, 100%. Default: 1.0." in text
    assert "generated" not in text
    assert "--kv-overlap-score-weight" in text
    assert "NATS_SERVER" in text
    assert "--no-track-blocks" in text


@pytest.mark.parametrize(
    ("argument", "successor"),
    [
        ("--no-request-stream-usage", "use the engine's --enable-force-include-usage"),
        ("--max-held", "use --max-queued-requests"),
    ],
)
def test_an_option_of_an_earlier_release_names_its_successor(
    argument: str, successor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(GatewaySettings, [argument])
    assert caught.value.code == 2
    assert successor in capsys.readouterr().err
