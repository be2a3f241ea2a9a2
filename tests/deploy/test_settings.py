"""Settings: which layer wins, what is refused and how, and that children get exactly what the launcher resolved."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.display import describe, mask
from deploy.settings import SECTIONS, Layer, Settings, SettingsError, environment_of, load_toml, resolve
from services.config import BusConfig, GatewayConfig, RouterConfig, WorkerConfig


def settings_of(*, toml: Layer = {}, environ: dict[str, str] = {}, flags: Layer = {}) -> Settings:  # noqa: B006
    return resolve(toml=toml, environ=environ, flags=flags).settings


def test_nothing_given_means_the_defaults() -> None:
    assert settings_of() == Settings()


def test_flags_win_over_environment_over_toml_over_defaults() -> None:
    toml = {"gateway": {"port": 1, "host": "toml", "drain_s": 1}}
    environ = {"BUSWAY_GATEWAY_PORT": "2", "BUSWAY_GATEWAY_HOST": "environment", "PATH": "/bin"}
    flags = {"gateway": {"port": 3, "host": None}}
    gateway = settings_of(toml=toml, environ=environ, flags=flags).gateway
    assert (gateway.port, gateway.host, gateway.drain_s) == (3, "environment", 1.0)
    assert gateway.max_choices == GatewayConfig().max_choices


def test_engine_args_of_all_layers_are_merged_key_by_key() -> None:
    toml = {"worker": {"engine_args": {"block_size": 16, "num_blocks": 100, "fast": True}}}
    environ = {"BUSWAY_WORKER_ENGINE_ARGS": "num_blocks=200,dtype=float32"}
    flags = {"worker": {"engine_args": ["dtype=bfloat16", "path=a=b"]}}
    merged = settings_of(toml=toml, environ=environ, flags=flags).worker.engine_args
    expected = {"block_size": "16", "fast": "true", "num_blocks": "200", "dtype": "bfloat16", "path": "a=b"}
    assert merged == expected


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ({"gatewy": {}}, ["[gatewy]", "'gateway'"]),
        ({"gateway": {"prt": 1}}, ["'prt'", "[gateway]", "'port'"]),
        ({"gateway": {"port": "many"}}, ["gateway.port", "'many'", "busway.toml"]),
        ({"worker": {"role": "chef"}}, ["worker.role", "'chef'", "prefill, decode, both"]),
        ({"worker": {"engine_args": "block_size"}}, ["worker.engine_args", "key=value"]),
        ({"worker": {"engine_args": "{"}}, ["worker.engine_args"]),
        ({"serve": {"prefill": -1}}, ["serve.prefill", ">= 0"]),
        ({"router": {"max_priority": -1}}, ["router.max_priority", ">= 0"]),
        ({"router": {"kv_max_ttft_s": -0.5}}, ["router.kv_max_ttft_s", ">= 0"]),
        ({"gateway": 7}, ["[gateway]", "section"]),
    ],
)
def test_what_is_not_known_is_refused_naming_the_key_and_the_nearest_one(toml: Layer, words: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        settings_of(toml=toml)
    assert [word for word in words if word not in str(refused.value)] == []


def test_an_unknown_variable_is_refused_and_one_of_ours_that_is_no_setting_is_not() -> None:
    settings_of(environ={"BUSWAY_CACHE": "/x", "BUSWAY_CONFIG": "y.toml"})
    with pytest.raises(SettingsError, match=r"BUSWAY_GATEWAY_PROT.*BUSWAY_GATEWAY_PORT"):
        settings_of(environ={"BUSWAY_GATEWAY_PROT": "1"})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("gateway", "port", 99999),  # 34463 by the time the kernel hears it
        ("gateway", "port", -1),
        ("gateway", "request_timeout_s", 0),
        ("gateway", "request_timeout_s", "nan"),
        ("gateway", "max_choices", 0),
        ("gateway", "drain_s", -1),
        ("router", "ack_timeout_s", 0),
        ("router", "max_dispatch_tries", 0),
        ("worker", "lease_s", 0),
        ("worker", "max_waiting", -1),
    ],
)
def test_a_number_with_which_nothing_would_work_is_refused_by_name(section: str, key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"{section}\.{key}"):
        settings_of(flags={section: {key: value}})


TEXT = st.text(alphabet=st.characters(blacklist_categories=["Cs", "Cc"]), max_size=20)
PAIRS = st.dictionaries(TEXT.filter(lambda key: key.strip() == key != "" and "=" not in key), TEXT, max_size=3)
SETTINGS = st.builds(
    Settings,
    nats=st.builds(BusConfig, url=TEXT, namespace=TEXT),
    gateway=st.builds(GatewayConfig, host=TEXT, port=st.integers(0, 65535), drain_s=st.floats(0, 1e6)),
    router=st.builds(RouterConfig, id=TEXT, policy=st.sampled_from(["queue", "round_robin"]), is_strict=st.booleans()),
    worker=st.builds(WorkerConfig, model=TEXT, model_path=TEXT, labels=PAIRS, engine_args=PAIRS),
)


@given(SETTINGS)
def test_children_resolve_from_their_environment_what_the_launcher_had(settings: Settings) -> None:
    assert settings_of(environ=environment_of(settings)) == settings


def test_the_environment_of_a_launcher_overrides_the_toml_file_its_children_read_too() -> None:
    toml = {"gateway": {"port": 1}, "worker": {"model": "other"}}
    assert settings_of(toml=toml, environ=environment_of(Settings())) == Settings()


def test_a_toml_file_is_read_where_it_is_named_and_from_the_folder_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_toml(None, {}) == ({}, "busway.toml")
    Path("busway.toml").write_text("[gateway]\nport = 1\n")
    Path("other.toml").write_text("[gateway]\nport = 2\n")
    assert load_toml(None, {})[0] == {"gateway": {"port": 1}}
    assert load_toml(None, {"BUSWAY_CONFIG": "other.toml"})[0] == {"gateway": {"port": 2}}
    assert load_toml(Path("other.toml"), {"BUSWAY_CONFIG": "busway.toml"})[0] == {"gateway": {"port": 2}}


def test_a_file_that_is_named_but_missing_or_broken_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't read"):
        load_toml(tmp_path / "none.toml", {})
    broken = tmp_path / "broken.toml"
    broken.write_text("[gateway\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_toml(broken, {})


def test_the_shown_config_names_origins_and_hides_credentials() -> None:
    environ = {"BUSWAY_NATS_URL": "nats://me:secret@one:4222,nats://me:secret@two:4222"}
    resolved = resolve(toml={}, environ=environ, flags={"gateway": {"port": 9}})
    shown = "\n".join(describe(resolved, tuple(SECTIONS)))
    assert "secret" not in shown
    assert "url=nats://***@one:4222,nats://***@two:4222 (environment)" in shown
    assert "port=9 (flag)" in shown
    assert mask("no url here") == "no url here"


def test_the_sim_engine_moves_kv_by_shared_memory_unless_told_otherwise() -> None:
    sim = {"worker": {"engine": "sim"}}
    assert settings_of(flags=sim).worker.transfer == "shm"
    assert settings_of(toml={"worker": {"transfer": "nixl"}}, flags=sim).worker.transfer == "nixl"
    assert settings_of().worker.transfer == "nixl"
