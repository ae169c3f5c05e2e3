"""A real S3 server for the quickstart: moto, one request at a time, which makes its create-if-absent atomic.

Prints the port that it listens on (loopback), and serves until its standard input ends.
"""

import os
import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def main():
    # It checks no credentials, so nobody else's may be asked for either.
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=False)
    threading.Thread(target=serve_while_asked, args=(server,), daemon=True).start()
    print(server.server_port, flush=True)
    server.serve_forever()


def serve_while_asked(server):
    sys.stdin.read()
    server.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
