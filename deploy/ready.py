"""Health check of a service in a container: exit status 0 when `/readyz` on the given port says 200.

Standard library only, and as little of it as possible: it runs every few seconds in every container.
"""

import http.client
import sys

TIMEOUT_S = 2.0


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if ready(int(sys.argv[1])) else 1)
