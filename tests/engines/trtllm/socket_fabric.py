"""The stand-in's transceivers between processes: opaque_state says where on this machine the context's KV waits.

One connection a fetch: the asker sends what it wants, the owner answers with the rows and frees them, or with nothing.
"""

import json
import os
import socket
import threading

from tests.engines.trtllm.stand_in_executor import Fabric, WaitingKv

ANSWER_S = 5.0


class SocketFabric(Fabric):
    """Of one process; listens from the first offer on."""

    def __init__(self) -> None:
        super().__init__()
        self._port = 0

    def offer(self, waiting: WaitingKv) -> bytes:
        with self.lock:
            if not self._port:
                self._port = self._listen()
            key = super().offer(waiting)
        return json.dumps({"port": self._port, "pid": os.getpid(), "key": key.hex()}).encode()

    def fetch(self, opaque_state: bytes | None, transfer_id: int) -> WaitingKv | None:
        where = json.loads(opaque_state or b"{}")
        try:
            with socket.create_connection(("127.0.0.1", where["port"]), timeout=ANSWER_S) as line:
                line.sendall(json.dumps({**where, "transfer_id": transfer_id}).encode() + b"\n")
                rows = json.loads(line.makefile("rb").read() or b"null")
        except (KeyError, OSError):
            return None
        if rows is None:
            return None
        return WaitingKv(None, transfer_id, [(state, token_id) for state, token_id in rows], 0, 0.0)  # type: ignore[arg-type]

    def _listen(self) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(server,), name="stand-in-transceiver", daemon=True).start()
        return int(server.getsockname()[1])

    def _serve(self, server: socket.socket) -> None:
        while True:
            line, _ = server.accept()
            with line:
                asked = json.loads(line.makefile("rb").readline())
                is_ours = asked["pid"] == os.getpid()
                found = super().fetch(bytes.fromhex(asked["key"]), asked["transfer_id"]) if is_ours else None
                line.sendall(json.dumps(None if found is None else found.rows).encode())
