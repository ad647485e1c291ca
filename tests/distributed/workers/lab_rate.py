"""Time a plain transfer from rank 1 to rank 0, each on a host of its own."""

from __future__ import annotations

import os
import socket
import sys
import time

NBYTES = 2_000_000
PORT = 29600


def main():
    name = socket.gethostbyname(socket.gethostname())
    sys.stdout.write(f"address {name} local_rank {os.environ['HOROVOD_LOCAL_RANK']}\n")
    if os.environ["HOROVOD_RANK"] == "1":
        deadline = time.monotonic() + 20
        while True:
            try:
                with socket.create_connection((os.environ["MASTER_ADDR"], PORT), 5) as link:
                    link.sendall(bytes(NBYTES))
                return
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    with socket.create_server(("", PORT)) as server:
        link, _ = server.accept()
        with link:
            start, got = time.perf_counter(), 0
            while got < NBYTES:
                got += len(link.recv(1 << 16))
            sys.stdout.write(f"seconds {time.perf_counter() - start}\n")


if __name__ == "__main__":
    main()
