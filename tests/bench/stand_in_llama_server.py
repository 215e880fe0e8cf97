#!/usr/bin/env python3
"""What a runner sees of a llama-server: it notes its arguments, repeats a prompt's first id."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    health = iter([503])  # it loads its model, then is well

    def do_GET(self):
        self.send_response(next(self.health, 200))
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = [{"tokens": body["prompt"][:1] * body["n_predict"]}] * body["n_cmpl"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


def main(arguments):
    if "--version" in arguments:
        sys.stderr.write("version: 1 (stand-in)\n")
        return
    if "STAND_IN_STATUS" in os.environ:
        sys.exit(int(os.environ["STAND_IN_STATUS"]))
    notes = {"arguments": arguments, "process": os.getpid()}
    Path(os.environ["STAND_IN_NOTES"]).write_text(json.dumps(notes))
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
