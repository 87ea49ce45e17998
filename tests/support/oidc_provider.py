"""A provider of OpenID Connect in a process of its own: `oidc-provider-mock`, which is Authlib's provider, with registered clients and nonces.

It does not look at PKCE (RFC 7636), so that is done in front of it: no authorization without a challenge, and no token without its verifier.
"""

import base64
import hashlib
import io
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

AUTHORIZE: Final = "/oauth2/authorize"
TOKEN: Final = "/oauth2/token"
Answer = Iterable[bytes]


class Pkce:
    """What stands in front of the provider."""

    def __init__(self, app: Callable[..., Answer]) -> None:
        self._app = app
        self._challenges: dict[str, str] = {}

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Answer:
        """Answer a request, or pass it on."""
        query = parse_qs(environ["QUERY_STRING"])
        match environ["PATH_INFO"]:
            case "/oauth2/authorize":
                challenge = query.get("code_challenge", [""])[0]
                if not challenge or query.get("code_challenge_method") != ["S256"]:
                    return self._refuse(start)

                def note(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                    location = dict(headers).get("Location", "")
                    for code in parse_qs(urlsplit(location).query).get("code", []):
                        self._challenges[code] = challenge
                    return start(status, headers, *more)

                return self._app(environ, note)
            case "/oauth2/token":
                body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                form = parse_qs(body.decode())
                verifier = form.get("code_verifier", [""])[0]
                digest = hashlib.sha256(verifier.encode()).digest()
                challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                if self._challenges.get(form.get("code", [""])[0]) != challenge:
                    return self._refuse(start)
                environ["wsgi.input"] = io.BytesIO(body)
        return self._app(environ, start)

    def _refuse(self, start: Callable[..., Any]) -> Answer:
        start("400 Bad Request", [("Content-Type", "application/json")])
        return [b'{"error": "invalid_grant"}']


class OidcProvider:
    """One that runs.

    Parameters
    ----------
    issuer
        Its address.
    """

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer

    def register(self, return_to: str) -> tuple[str, str]:
        """Register a client; return its id and secret."""
        client = self._send(
            "POST", "/oauth2/clients", {"redirect_uris": [return_to], "scope": "openid email"}
        )
        return client["client_id"], client["client_secret"]

    def add_person(self, name: str, **claims: object) -> None:
        """Add somebody whose ID tokens have these claims."""
        self._send("PUT", f"/users/{name}", claims)

    def _send(self, method: str, path: str, body: object) -> Any:
        request = urllib.request.Request(
            f"{self.issuer}{path}",
            method=method,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")


@contextmanager
def oidc_provider() -> Iterator[OidcProvider]:
    """Run a provider inside the block."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.oidc_provider"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            assert port, process.wait()
            yield OidcProvider(f"http://localhost:{port}")
        finally:
            process.kill()


def _serve() -> None:
    import oidc_provider_mock
    import werkzeug.serving

    app = oidc_provider_mock.app(require_client_registration=True, require_nonce=True)
    server = werkzeug.serving.make_server("localhost", 0, Pkce(app), threaded=True)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    _serve()
