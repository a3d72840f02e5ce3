"""A small OpenID Connect provider over real HTTP: the third parties' own cannot be reached from a test."""

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet

CLIENT, SECRET = "pipeline", "client-secret"


class OidcProvider:
    """What the provider knows, and what a test changes about the next ID token."""

    def __init__(self) -> None:
        self.issuer = ""
        self.key = ECKey.generate_key("P-256", {"kid": "1"})
        self.codes: dict[str, dict[str, str]] = {}
        self.claims: dict[str, Any] = {"email": "ada@example.test", "email_verified": True, "groups": ["oncall"]}
        self.overrides: dict[str, Any] = {}  #: claims of the ID token that replace the right ones
        self.signing_key: ECKey | None = None  #: instead of the published one
        self.now = 0

    def authorize(self, asked: dict[str, str]) -> str:
        """Log the person in at once; return where the browser goes back to."""
        code = secrets.token_urlsafe(16)
        self.codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def token(self, form: dict[str, str], authorization: str) -> dict[str, str] | None:
        """Exchange a code once, for the client and the verifier that it was given to."""
        asked = self.codes.pop(form.get("code", ""), None)
        expected = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if asked is None or authorization != f"Basic {expected}" or asked["code_challenge"] != challenge:
            return None
        if asked["redirect_uri"] != form.get("redirect_uri"):
            return None
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "sub": "4711",
            "iat": self.now,
            "exp": self.now + 300,
            "nonce": asked["nonce"],
            **self.claims,
            **self.overrides,
        }
        key = self.signing_key or self.key
        return {"id_token": jwt.encode({"alg": "ES256", "kid": "1"}, claims, key), "token_type": "Bearer"}

    def document(self, path: str) -> dict[str, Any] | None:
        """Return what the provider publishes."""
        if path == "/.well-known/openid-configuration":
            return {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
            }
        return dict(KeySet([self.key]).as_dict(private=False)) if path == "/keys" else None


@contextmanager
def running_provider() -> Iterator[OidcProvider]:
    """Serve a provider on a port of this machine."""
    provider = OidcProvider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if parts.path == "/authorize":
                asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self.send_response(303)
                self.send_header("Location", provider.authorize(asked))
                self.end_headers()
                return
            self._answer(provider.document(parts.path), 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._answer(provider.token(form, self.headers.get("Authorization", "")), 400)

        def _answer(self, found: dict[str, Any] | None, otherwise: int) -> None:
            content = json.dumps(found or {"error": "invalid_grant"}).encode()
            self.send_response(200 if found else otherwise)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider.issuer = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield provider
        server.shutdown()
        thread.join()
