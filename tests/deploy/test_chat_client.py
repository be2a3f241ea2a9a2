"""The command line's HTTP client against a server that answers as gateways do, also when they fail."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy.chat_client import ChatError, ChatRequest, ask_chat, first_model, stream_chat
from deploy.demo import answer_with_phases

CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n'
PHASES = (
    '"busway":{"gateway_s":0.001,"retry_s":0.0,"queue_s":0.001,"route_s":0.001,"prefill_queue_s":0.01,"prefill_s":0.02,'
    '"decode_queue_s":0.001,"transfer_s":0.003,"first_token_s":0.003,"unreported_s":0.0,"decode_s":0.1,"ttft_s":0.04,'
    '"total_s":0.14,"kv_bytes":123456,'
    '"prefill_worker":"prefill-0","decode_worker":"decode-0","router":"router-0"}'
)
ANSWER = (
    '{"choices":[{"message":{"content":" Paris. "},"finish_reason":"stop"}],'
    '"usage":{"prompt_tokens":12,"completion_tokens":3},%s}'
)
ANSWERS = {
    "whole": (200, "".join((CHUNK % "Pa", ": keep-alive\n\n", CHUNK % "ris", "data: [DONE]\n\n"))),
    "cut": (200, CHUNK % "Pa"),
    "failing": (200, CHUNK % "Pa" + 'data: {"error":{"message":"decode died","code":"worker_lost"}}\n\n'),
    "busy": (503, '{"error":{"message":"no decode worker","code":"unavailable"}}'),
    "proxy": (502, "<html>bad gateway</html>"),
    "timed": (200, ANSWER % PHASES),
}


class Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200, '{"object":"list","data":[{"id":"sim"}]}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        name = next(name for name in ANSWERS if f'"model":"{name}"' in body)
        self.answer(*ANSWERS[name])

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def question(url: str, model: str) -> ChatRequest:
    return ChatRequest(url=url, model=model, question="Where?", max_tokens=3)


def test_the_text_streams_and_comments_are_passed_over(url: str) -> None:
    assert list(stream_chat(question(url, "whole"))) == ["Pa", "ris"]


@pytest.mark.parametrize(("model", "message"), [("cut", "broke off"), ("failing", "decode died")])
def test_a_stream_that_fails_in_the_middle_is_an_error_after_its_text(url: str, model: str, message: str) -> None:
    stream = stream_chat(question(url, model))
    assert next(stream) == "Pa"
    with pytest.raises(ChatError, match=message):
        next(stream)


@pytest.mark.parametrize(("model", "message"), [("busy", "503: no decode worker"), ("proxy", "502: <html>bad")])
def test_a_refusal_carries_the_gateways_own_words(url: str, model: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        list(stream_chat(question(url, model)))
    with pytest.raises(ChatError, match=message):
        ask_chat(question(url, model))


def test_the_first_model_is_asked_where_none_is_named(url: str) -> None:
    assert first_model(url) == "sim"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "nonsense"])
def test_no_gateway_is_an_error_with_its_address(url: str) -> None:
    with pytest.raises(ChatError, match=url):
        first_model(url)


def test_the_demo_prints_answer_and_phases_in_milliseconds(url: str) -> None:
    shown = answer_with_phases(question(url, "timed"))
    assert "> Where?\nParis.\n" in shown
    timed = [line.split(" ms")[0].rsplit(maxsplit=1) for line in shown.splitlines() if " ms" in line]
    milliseconds = {name.strip(): number for name, number in timed}
    assert milliseconds == {
        "gateway": "1.0",
        "route": "2.0",
        "prefill": "30.0",
        "transfer": "3.0",
        "waiting": "4.0",
        "first token": "40.0",
        "decode": "100.0",
        "total": "140.0",
    }
    assert "12 tokens by prefill-0" in shown
    assert "123,456 bytes" in shown
