"""An HTTP server in front of a pipeline, with the standard library only. Ctrl-C answers pending requests, then exits.

python examples/06_http.py                 sends three requests to itself and exits
python examples/06_http.py --port 8080     serves until Ctrl-C; curl -d '{"text": "a good day"}' http://127.0.0.1:8080/
"""

import argparse
import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import dovetail as dt

MAX_BODY_BYTES = 1 << 20
READ_TIMEOUT_S = 5  # a client that sends no complete request in this time is disconnected


def words(request):
    return {"words": len(request["text"].split())}


class Handler(BaseHTTPRequestHandler):
    timeout = READ_TIMEOUT_S

    def do_POST(self):
        try:
            status, answer = 200, self.server.service.submit(self.item(), block=False).result()
        except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
            status, answer = 400, {"error": str(error)}
        except dt.RunError as error:
            problem = error.problems[
                0
            ]  # DT376: the service is closed, DT377: too many requests, DT378: the item failed
            status = 503 if problem.code in ("DT376", "DT377") else 422
            answer = {"error": problem.message, "code": problem.code}
        except TimeoutError as error:
            status, answer = 504, {"error": str(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def item(self):
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= MAX_BODY_BYTES:
            raise ValueError(f"the body must have 1 to {MAX_BODY_BYTES} bytes")
        return json.loads(self.rfile.read(length))

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close() waits for pending requests


def ask(url, body):
    try:
        with urllib.request.urlopen(url, body, timeout=60) as answer:  # noqa: S310 - the URL is our own
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    arguments.add_argument("--port", type=int, default=None)
    given = arguments.parse_args()
    pipe = dt.Pipeline([dt.Stage("words", dt.each(words))], name="http")
    with dt.serve(pipe, max_wait="10ms", max_pending=1000, deadline="10s") as service:
        server = Server((given.host, given.port or 0), Handler)
        server.service = service
        url = f"http://{given.host}:{server.server_address[1]}/"
        if given.port is None:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for body in (b'{"text": "a good day"}', b"not JSON", b'{"title": "no text"}'):
                print(*ask(url, body))
            server.shutdown()
        else:
            print(f"serving {url}, Ctrl-C stops it", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print("draining", flush=True)
        server.server_close()
    print("drained", flush=True)


if __name__ == "__main__":
    main()
