"""Act as an `ssh` to a hostile board. It speaks edgeq's protocols, and at one point it does what scenario.json demands.

It runs as a program, without site-packages. Next to it is scenario.json:

    at      the point: a request's "do", or "hello", "send", or a word of a command
    act     a function below, with `given` as its data
    canned  the honest answer to each request
"""

import json
import os
import struct
import sys
import time
from pathlib import Path


def write(data, descriptor=1):
    while data:
        data = data[os.write(descriptor, data) :]


def forever(data, descriptor=1):
    while True:
        write(data, descriptor)


def packed(value, arrays=()):
    text = json.dumps({**value, "arrays": [list(spec) for spec in arrays]}).encode()
    return struct.pack("<I", len(text)) + text


def exactly(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


def changed(value, given):
    """Return `value` with the values that `given` lists by path."""
    for path, new in given:
        place = value
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = new
    return value


class Board:
    def __init__(self, scenario):
        self.at, self.act, self.given = scenario["at"], scenario["act"], scenario["given"]
        self.canned = scenario["canned"]
        self.sent = not scenario["absent"]

    def hostile(self, point, form):
        """Act if this is the point. Return whether the honest answer is still needed."""
        if point != self.at:
            return True
        if self.act == "change":
            write(form(changed(self.canned[point], self.given)))
        elif self.act == "text":
            write(self.given.encode("latin-1"))
        elif self.act == "end":
            write(self.given[1].encode("latin-1"), 2)
            os._exit(self.given[0])
        elif self.act == "silence":
            time.sleep(600)
        elif self.act == "drip":
            write(self.given.encode("latin-1"))
            while True:
                write(b"1")
                time.sleep(0.02)
        elif self.act == "flood":
            forever(self.given.encode("latin-1") * 1000)
        elif self.act == "errors":
            forever(b"e" * 65536, 2)
        elif self.act == "many errors":
            write(self.given.encode("latin-1") * 1024, 2)
            return True
        elif self.act == "close":
            os.close(1)
            time.sleep(600)
        elif self.act == "twice":
            answer = form(self.canned[point])
            write(answer * 5000)
        elif self.act == "bytes":
            data = self.given.encode("latin-1")
            write(packed({}, [["content", "|u1", [len(data)]]]) + data)
        elif self.act == "arrays":
            specs, size = self.given
            write(packed({}, specs))
            while size > 0:
                write(bytes(min(size, 1 << 20)))
                size -= 1 << 20
        return False

    def channel(self):
        def line(value):
            return json.dumps(value).encode() + b"\n"

        if self.hostile("hello", line):
            write(line(self.canned["hello"]))
        requests = os.fdopen(0, "rb", buffering=0)
        while True:
            text = requests.readline()
            if not text:
                return
            request = json.loads(text)
            do = request["do"]
            if do == "alive":
                continue
            answer = self.canned.get(do, {})
            if do == "tree" and not self.sent:
                answer = {"path": ""}
            if do == "listing":
                self.sent = True
                answer = {"missing": [sha for sha, _ in json.loads(request["listing"]).values()], "free": 1 << 40}
            if self.hostile(do, line):
                if do == "put":
                    exactly(request["size"])
                write(line(answer))

    def guest(self):
        while True:
            (size,) = struct.unpack("<I", exactly(4))
            request = json.loads(exactly(size))
            rows = 1
            for _, dtype, shape in request["arrays"]:
                count = int(dtype[2:])
                rows = shape[0] if shape else 1
                for length in shape:
                    count *= length
                exactly(count)
            do = request["do"]
            if not self.hostile(do, packed):
                continue
            if do == "run":
                name, classes = self.canned["run"]
                write(packed({}, [[name, "<f4", [rows, classes]]]) + bytes(4 * rows * classes))
            else:
                write(packed(self.canned.get(do, {})))


def main():
    here = Path(sys.argv[0]).parent
    board = Board(json.loads((here / "scenario.json").read_text()))
    with (here / "links").open("a") as links:
        links.write(f"{os.getpid()}\n")
    command = sys.argv[sys.argv.index("--") + 2]
    if board.at == "send" and " serve " in command:
        sys.exit(94)  # edgeq's program has not been sent yet
    if "edgeq_guest.py" in command:
        board.guest()
    elif " attach " not in command.replace("'", " "):
        board.channel() if " serve " in command else board.hostile("send", None)
    else:
        point = next(point for point in ("edgeq_run.py", "pip", "uname", "rm", "venv") if point in command)
        if board.hostile(point, lambda value: json.dumps(value).encode()):
            write(json.dumps(board.canned.get(point, {})).encode())


if __name__ == "__main__":
    main()
