"""The policy server: openpi's protocol, checked input, batches, memory by connection."""

import asyncio
import contextlib
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from case_tables import cases, refused
from small_flow import HORIZON, Flow, Wander, learned
from tiny import tiny
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from ejax.config import parse_config
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.play.acting import Actor
from ejax.policies.chunks import Execution
from interop.serving import __main__ as command
from interop.serving.policies import Leaves, Served, load_served
from interop.serving.server import Batches, serving, unpack

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from serve_client import Client, _from_array

TOKEN = "a token of sixteen or more"
OBS = {"q": np.array([1.0, 2.0], np.float32)}


def policy(sizes: list[int] | None = None, gate: threading.Event | None = None) -> Served:
    """Count an episode's steps: the action is q, and the number of this step. ``sizes``: of the batches computed."""

    def act(leaves: Leaves, memory: Leaves) -> tuple[Any, Leaves]:
        if sizes is not None:
            sizes.append(len(leaves[0]))
        if gate is not None:
            gate.wait()
        after = memory[0] + 1
        return np.concatenate([leaves[0], after], axis=1), [after]

    return Served(
        runtime="numpy",
        contract={"observation": [{"name": "q", "shape": ["batch", 2]}], "action": {}},
        shapes={"q": [(2,)]},
        required=["q"],
        texts={},
        leaves_of=lambda parts: [np.asarray(parts["q"], np.float32)[None]],
        example=[np.zeros((1, 2), np.float32)],
        first_memory=[np.zeros((1, 1), np.float32)],
        act=act,
    )


@contextlib.contextmanager
def server(**options: Any) -> Iterator[str]:
    """Serve in a thread; yields HOST:PORT."""
    address: list[str] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with serving(policy(), {"policy": "counting"}, port=0, **options) as started:
            address.append("{}:{}".format(*next(iter(started.sockets)).getsockname()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(20)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server(max_clients=8) as found:
        yield found


def openpis_client(url: str) -> Any:
    return pytest.importorskip("openpi_client.websocket_client_policy").WebsocketClientPolicy(url)


@pytest.mark.filterwarnings("ignore:.*context manager:DeprecationWarning")  # openpi's client opens it without one
@pytest.mark.parametrize("make", [Client, openpis_client])
def test_a_client_is_sent_the_contract_and_then_an_array_of_actions_for_each_observation(
    make: Callable[[str], Any], address: str
) -> None:
    client = make(f"ws://{address}")
    metadata = client.metadata if isinstance(client, Client) else client.get_server_metadata()
    assert metadata["contract"]["observation"][0]["name"] == "q" and metadata["action_horizon"] == 1
    np.testing.assert_array_equal(client.infer(OBS)["actions"], np.array([[1.0, 2.0, 1.0]], np.float32))


def test_memory_is_the_connections_until_a_reset(address: str) -> None:
    first, second = Client(f"ws://{address}"), Client(f"ws://{address}")
    asked = (first, {}), (first, {}), (second, {}), (first, {"reset": True}), (first, {"reset": np.False_})
    assert [client.infer({**OBS, **more})["actions"][0, 2] for client, more in asked] == [1, 2, 1, 1, 2]
    first.close(), second.close()


@cases(
    "obs text",
    ({"q": np.zeros(3)}, r"'q' is float64\[3\]; must be \[2\], without a batch axis"),
    ({"q": np.array([0.0, np.nan])}, "'q' has numbers that are not finite"),
    ({"q": "text"}, r"'q' is a text of 4 bytes; must be numbers \[2\]"),
    ({}, "the observation lacks 'q'"),
    ({**OBS, "v": 1.0}, "the observation has 'v'; the policy knows q"),
    ({**OBS, "reset": 1}, "'reset' must be true or false"),
)
def test_an_observation_that_does_not_fit_is_refused_by_a_text_that_names_its_part(
    obs: dict[str, Any], text: str, address: str
) -> None:
    client, other = Client(f"ws://{address}"), Client(f"ws://{address}")
    refused(client.infer, obs, match=text, error=RuntimeError)
    refused(client.infer, OBS, match="1011", error=ConnectionClosedError)
    assert other.infer(OBS)["actions"].shape == (1, 3)
    other.close()


ARRAY = {b"__ndarray__": True, b"data": b"12345678", b"dtype": "<f4", b"shape": [2]}


@cases(
    "message",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    "text",
    b"\x81" * 2000,
    b"\x91" * 2000,
    msgpack.packb([1]),
    msgpack.packb({"a.b": 1, "a": {"b": 2}}),
    msgpack.packb({"q": [[1], [1, 2]]}),
    msgpack.packb({"q": msgpack.ExtType(5, b"code")}),
    *(
        msgpack.packb({"q": {**ARRAY, **wrong}})
        for wrong in (
            {b"dtype": "|O"},
            {b"dtype": "f4,f4"},
            {b"dtype": "<M8[s]"},
            {b"dtype": "<f8"},
            {b"shape": [-2]},
            {b"shape": [2, 1 << 62]},
            {b"shape": [1 << 32, 1 << 32, 2]},
            {b"shape": 2},
            {b"data": "12345678"},
        )
    ),
    ids=lambda message: repr(message)[:20],
)
def test_a_message_that_is_no_observation_is_a_value_error(message: Any) -> None:
    assert unpack(msgpack.packb({"q": ARRAY}))["q"].shape == (2,)
    refused(unpack, message, match=r"the message (cannot be read: .|is list)|given twice")


def test_who_sends_too_much_or_never_reads_harms_no_other(address: str) -> None:
    with connect(f"ws://{address}") as large, connect(f"ws://{address}") as stalled:
        stalled.send(msgpack.packb(OBS, default=_from_array))  # and its answer is never read
        with pytest.raises(ConnectionClosedError, match="1009"):
            large.send(b"0" * (1 << 20))
            while True:
                large.recv()
        client = Client(f"ws://{address}")
        assert client.infer(OBS)["actions"].shape == (1, 3)
        client.close()


def test_only_whoever_has_the_token_is_served_and_no_more_than_allowed() -> None:
    def status(**headers: str) -> int:
        with pytest.raises(InvalidStatus) as error, connect(f"ws://{address}", additional_headers=headers):
            pass
        return error.value.response.status_code

    with server(token=TOKEN, max_clients=1) as address:
        assert status() == status(Authorization="Bearer another one") == 401
        assert urllib.request.urlopen(f"http://{address}/healthz").read() == b"OK\n"
        refused(urllib.request.urlopen, f"http://{address}/metadata", match="401", error=urllib.error.HTTPError)
        request = urllib.request.Request(f"http://{address}/metadata", headers={"Authorization": f"Api-Key {TOKEN}"})
        client = Client(f"ws://{address}", TOKEN)
        client.infer(OBS)
        assert status(Authorization=f"Bearer {TOKEN}") == 503
        facts = json.load(urllib.request.urlopen(request))
        assert (facts["requests"], facts["clients"], facts["refused"]) == (1, 1, 4) and facts["latency_ms"]["p99"] > 0
        client.close()


def test_a_page_of_a_browser_cannot_connect(address: str) -> None:
    with pytest.raises(InvalidStatus, match="403"), connect(f"ws://{address}", origin="http://example.org"):
        pass


@pytest.mark.parametrize("path", ["metadata", "healthz"])
@cases(
    "headers status",
    ({}, 200),
    ({"Host": "localhost"}, 200),
    ({"Host": "LOCALHOST:9000"}, 200),
    ({"Host": "[::1]:8000"}, 200),
    ({"Host": "127.0.0.2"}, 200),
    ({"Host": "example.org"}, 403),
    ({"Host": "example.org:8000"}, 403),
    ({"Host": "127.0.0.1.example.org"}, 403),
    ({"Host": "localhost.example.org"}, 403),
    ({"Host": "127.0.0.1@example.org"}, 403),
    ({"Host": "192.168.1.2"}, 403),
    ({"Host": "0.0.0.0"}, 403),
    ({"Host": "[::1"}, 403),
    ({"Host": ""}, 403),
    ({"Origin": "http://example.org"}, 403),
    ({"Origin": "null"}, 403),
)
def test_without_a_token_a_name_that_leads_here_is_not_served(
    path: str, headers: dict[str, str], status: int, address: str
) -> None:
    """As where a page's owner has let the name of their server lead to this machine."""
    request = urllib.request.Request(f"http://{address}/{path}", headers=headers)
    try:
        found = urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        found = error.code
    assert found == status
    if "Host" in headers and status == 403 and path == "metadata":
        with pytest.raises(InvalidStatus, match="403"), connect(f"ws://{address}", additional_headers=headers):
            pass


def test_a_flow_of_a_run_goes_on_as_the_plan_that_a_client_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ActionChunk(Wander(), HORIZON)
    config = parse_config(tiny(env_cfg={"action_chunk": HORIZON}))
    actor = Actor(config, env, Flow(), learned(), checkpoint=Path("nowhere"))
    monkeypatch.setattr("ejax.play.acting.load", lambda *_, **__: actor)
    monkeypatch.setattr("interop.artefacts.contract.run_contract", lambda *_: {"action": {"shape": [HORIZON]}})
    served, obs = load_served(Path("run")), {"": np.array([0.02], np.float32)}
    obs = dict(zip(served.required, obs.values(), strict=True))
    plain = served.act(served.leaves(obs), [])[0]
    plan = {"continue.actions": -plain.reshape(HORIZON, 1), "continue.weights": Execution("rtc", HORIZON, 2, 4).weights}
    np.testing.assert_allclose(plain[0], actor.act(np.array([0.02])), atol=1e-6)
    # in one batch, the one without a plan is as before
    rows = [served.leaves(each) for each in (obs, {**obs, **plan})]
    alone, guided = served.act([np.concatenate(x) for x in zip(*rows, strict=True)], [])[0]
    np.testing.assert_allclose(alone, plain[0], atol=1e-6)
    assert np.abs(guided + plain[0])[:2].max() < 0.6 * np.abs(2.0 * plain[0])[:2].max()
    for wrong, text in (
        ({"continue.actions": plan["continue.actions"]}, "pass both 'continue.actions' and 'continue.weights'"),
        (plan | {"continue.weights": np.ones(3)}, r"'continue.weights' is float64\[3\]; must be \[8\]"),
    ):
        refused(served.leaves, {**obs, **wrong}, match=text)


def test_requests_that_wait_are_one_batch_padded_and_answered_as_alone() -> None:
    async def ask(sizes: list[int], gate: threading.Event) -> Any:
        served, rows = policy(sizes, gate), [[np.full((1, 2), i, np.float32)] for i in range(4)]
        batches = Batches(served, 8)
        async with batches.running():
            gate.clear()
            asked = [asyncio.create_task(batches.ask(row, served.first_memory)) for row in rows[:1]]
            while len(sizes) < 5:  # the first is under way
                await asyncio.sleep(0.001)
            asked += [asyncio.create_task(batches.ask(row, served.first_memory)) for row in rows[1:]]
            await asyncio.sleep(0.01)
            gate.set()
            together = [action for action, _, _ in await asyncio.gather(*asked)]
            alone = [(await batches.ask(row, served.first_memory))[0] for row in rows]
        return together, alone

    gate, sizes = threading.Event(), list[int]()
    gate.set()
    together, alone = asyncio.run(ask(sizes, gate))
    np.testing.assert_array_equal(together, alone)
    assert sizes[:6] == [1, 2, 4, 8, 1, 4]


@cases(
    "options text",
    (["--host", "0.0.0.0"], "got --host 0.0.0.0, which other machines may reach: it needs --token"),
    (["--host", "0.0.0.0", "--token", "short"], "the token must have 16 ASCII characters or more"),
    (["--port", "0"], "nowhere"),
)
def test_the_command_refuses_what_is_unsafe_or_missing(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EJAX_SERVE_TOKEN", raising=False)
    assert command.main([str(tmp_path / "nowhere"), *options]) == 2
    assert text in capsys.readouterr().err
