"""Plays a client of an endpoint and says which error of the client's side is in the way.

Seven are told apart: key refused, wrong path, model not served, an answer without `choices`, a proxy from the environment in between, a
pool of connections that does not suffice, TLS. Standard library only. Nothing is changed on the server; a few one-token requests are made.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 1 << 20
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ENDINGS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/chat/completions", "/completions", "/models")


@dataclass
class Answer:
    """What came back: status, body, headers; or what went wrong, and where (dns, connect, tls, read, files)."""

    status: int = 0
    body: str = ""
    server: str = ""
    failed: str = ""
    why: str = ""
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def __str__(self) -> str:
        if self.failed:
            return f"{self.failed}: {self.why}"
        said = " ".join(self.body.split())
        return f"status {self.status}: {said[:300]}"


@dataclass
class Client:
    """One endpoint, asked directly or as the environment's proxies want it.

    base      scheme, host, port and the path in front of /models
    key       for the Authorization header, '' for none
    timeout   seconds for connecting and for each read
    authority file of a certificate authority, besides the system's
    """

    base: str
    key: str = ""
    timeout: float = 30.0
    authority: str | None = None
    tried: list[str] = field(default_factory=list)

    def ask(
        self, path: str, payload: dict[str, Any] | None = None, *, proxy: str | None = None, base: str = ""
    ) -> Answer:
        """One request; path is appended to the base."""
        url = urllib.parse.urlsplit((base or self.base) + path)
        self.tried.append(
            f"{'POST' if payload else 'GET'} {url.geturl()}{f' through {_shown(proxy)}' if proxy else ''}"
        )
        began = time.monotonic()
        answer = self._ask(url, payload, proxy)
        answer.seconds = time.monotonic() - began
        if self.key:
            answer.body, answer.why = answer.body.replace(self.key, "***"), answer.why.replace(self.key, "***")
        return answer

    def _ask(self, url: urllib.parse.SplitResult, payload: dict[str, Any] | None, proxy: str | None) -> Answer:
        connection = None
        try:
            connection, target, headers = self._connection(url, proxy)
            stage = self._connect(connection)
            if stage:
                return stage
            headers |= {"Content-Type": "application/json", "User-Agent": "fleet-doctor"}
            if self.key:
                headers["Authorization"] = f"Bearer {self.key}"
            body = json.dumps(payload).encode() if payload is not None else None
            connection.request("POST" if body else "GET", target, body=body, headers=headers)
            reply = connection.getresponse()
            text = reply.read(MOST_BYTES).decode("utf-8", "replace")
            return Answer(reply.status, text, reply.getheader("Server") or reply.getheader("Via") or "")
        except ssl.SSLError as error:
            return Answer(failed="tls", why=_words(error))
        except TimeoutError:
            return Answer(failed="read", why=f"no answer within {self.timeout:g} s")
        except (OSError, http.client.HTTPException) as error:
            return Answer(failed="files" if getattr(error, "errno", 0) == 24 else "read", why=_words(error))
        finally:
            if connection is not None:
                connection.close()

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self.authority:
            context.load_verify_locations(self.authority)
        return context

    def _connection(
        self, url: urllib.parse.SplitResult, proxy: str | None
    ) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
        host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        headers: dict[str, str] = {}
        to, to_port = host, port
        if proxy:
            via = urllib.parse.urlsplit(proxy if "//" in proxy else f"http://{proxy}")
            to, to_port = via.hostname or "", via.port or 80
        if url.scheme == "https":
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                to, to_port, timeout=self.timeout, context=self._context()
            )
            if proxy:
                made.set_tunnel(host, port)
        else:
            made = http.client.HTTPConnection(to, to_port, timeout=self.timeout)
            if proxy:
                target = url.geturl()
        return made, target, headers

    def _connect(self, connection: http.client.HTTPConnection) -> Answer | None:
        """Connect; an answer when that fails, with the stage in which it did."""
        try:
            connection.connect()
        except socket.gaierror as error:
            return Answer(failed="dns", why=f"{connection.host}: {error.strerror}")
        except ssl.SSLError as error:
            return Answer(failed="tls", why=_words(error))
        except TimeoutError:
            return Answer(
                failed="connect", why=f"no connection to {connection.host}:{connection.port} within {self.timeout:g} s"
            )
        except OSError as error:
            failed = "files" if error.errno == 24 else "connect"
            return Answer(failed=failed, why=f"{connection.host}:{connection.port}: {_words(error)}")
        return None


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _shown(proxy: str | None) -> str:
    """A proxy without the user and password in it."""
    via = urllib.parse.urlsplit(proxy if proxy and "//" in proxy else f"http://{proxy}")
    return f"{via.scheme}://{via.hostname}:{via.port or 80}"


def base_of(url: str) -> str:
    """What stands before /models: the path of an endpoint is cut off, nothing is added. Raises ValueError."""
    text = url.rstrip("/")
    told = urllib.parse.urlsplit(text)
    if told.scheme not in ("http", "https") or not told.hostname:
        raise ValueError(f"{url} is no URL of an endpoint, such as https://models.example:8443/v1")
    _ = told.port  # raises ValueError for one that is no number
    for ending in ENDINGS:
        if text.endswith(ending):
            return text[: -len(ending)] + ("/v1" if ending.startswith("/v1") else "")
    return text


def proxy_for(url: str) -> str | None:
    """The proxy that the usual clients take for this URL from the environment; None when they go straight."""
    told = urllib.parse.urlsplit(url)
    host = told.hostname or ""
    proxies = urllib.request.getproxies_environment()
    proxy = proxies.get(told.scheme) or proxies.get("all")
    bypassed = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined]  # its typing leaves it out
    if not proxy or bypassed(f"{host}:{told.port}" if told.port else host, proxies):
        return None
    return proxy


def finding(cause_id: str, where: str, evidence: str, cause: str, fix: str, *, sure: str = "high") -> dict[str, Any]:
    return {
        "cause_id": cause_id,
        "severity": "error",
        "host": where,
        "evidence": evidence,
        "cause": cause,
        "fix": fix,
        "confidence": sure,
    }


def play(
    url: str,
    key: str,
    model: str | None = None,
    *,
    timeout: float = 30.0,
    parallel: int = 16,
    authority: str | None = None,
) -> dict[str, Any]:
    """Ask an endpoint as a client would, step by step, until something is wrong.

    Returns findings (none, or one that is in the way), notes, tried (the requests), model, seconds of the completion. Raises ValueError
    for a URL that is none.
    """
    client = Client(base_of(url), key, timeout, authority)
    where = urllib.parse.urlsplit(client.base).netloc.rpartition("@")[2]
    notes: list[str] = []
    told: dict[str, Any] = {"findings": [], "notes": notes, "tried": client.tried, "model": model, "seconds": None}
    found = _reach(client, where, notes) or _path_and_key(client, where, notes)
    if not found:
        found = _model(client, where, told) or _complete(client, where, told) or _pool(client, where, parallel)
    if found:
        told["findings"].append(found)
    return told


def _reach(client: Client, where: str, notes: list[str]) -> dict[str, Any] | None:
    """Name, port, TLS, and whether a proxy of the environment stands in between."""
    direct = client.ask("/models")
    proxy = proxy_for(client.base)
    if direct.failed == "tls":
        return _tls(client, where, direct)
    if proxy:
        through = client.ask("/models", proxy=proxy)
        same = through.status == direct.status and not through.failed
        if not same and not direct.failed:
            return finding(
                "client_proxy_in_the_way",
                where,
                f"through {_shown(proxy)}: {through}\ndirectly: {direct}",
                f"Proxy variables of the environment send requests for {where} to {_shown(proxy)}, which does not bring them there.",
                f"Put the host into NO_PROXY and no_proxy (export NO_PROXY=$NO_PROXY,{where.rpartition(':')[0] or where}), or start the client without proxy variables.",
            )
        if direct.failed and not through.failed:
            notes.append(f"only the proxy {_shown(proxy)} reaches {where}")
            return None
    return _unanswered(client, where, direct) if direct.failed else None


def _unanswered(client: Client, where: str, direct: Answer) -> dict[str, Any]:
    """Why nothing came back at all."""
    if direct.failed in ("dns", "connect"):
        return finding(
            "client_cannot_connect",
            where,
            str(direct),
            "The name does not resolve." if direct.failed == "dns" else "Nothing answers on this address and port.",
            "Check host and port, whether the server (or gateway) runs and has finished loading, and whether a firewall lets this client in.",
        )
    if client.base.startswith("http://"):
        other = client.ask("/models", base=client.base.replace("http://", "https://", 1))
        if other.status or (other.failed == "tls" and "WRONG_VERSION" not in other.why):
            return _tls(client, where, direct)
    return finding(
        "client_server_error",
        where,
        str(direct),
        "The server took the connection and did not answer.",
        "Look at the server's own log (scripts/fleet doctor --from) and at whether it is still loading.",
        sure="medium",
    )


def _tls(client: Client, where: str, answer: Answer) -> dict[str, Any]:
    why = answer.why
    if client.base.startswith("http://"):
        cause, fix = "The server speaks TLS on this port, the client plain HTTP.", f"Use https://{where}."
    elif "WRONG_VERSION" in why or "RECORD_LAYER" in why or "HTTP_REQUEST" in why:
        cause, fix = (
            "The server speaks plain HTTP on this port, the client TLS.",
            f"Use http://{where}, or the port of the gateway that has TLS.",
        )
    elif "expired" in why or "not yet valid" in why:
        cause, fix = (
            "The server's certificate is out of date (or the clock of this machine is wrong).",
            "Renew the certificate; compare `date` on both machines.",
        )
    elif "ostname" in why or "IP address mismatch" in why or "not valid for" in why:
        cause, fix = (
            "The server's certificate is for another name.",
            "Use the name that the certificate has, or make one with this name (subjectAltName).",
        )
    elif ("self" in why and "signed" in why) or "issuer" in why or "unable to get" in why:
        cause, fix = (
            "The client does not know the authority that signed the server's certificate.",
            "Give the client the authority's certificate (SSL_CERT_FILE, REQUESTS_CA_BUNDLE; here --ca FILE). Leave verification on.",
        )
    else:
        cause, fix = (
            "Client and server do not agree on TLS.",
            "Look with `openssl s_client -connect HOST:PORT`; the server may ask for a certificate of the client or refuse the version.",
        )
    return finding("client_tls", where, str(answer), cause, fix)


def _is_api(answer: Answer) -> bool:
    """Whether this is the list of models, or the refusal of the key that guards it."""
    if answer.status in (401, 403):
        return True
    told = answer.json
    return answer.status == 200 and isinstance(told, dict) and isinstance(told.get("data"), list)


def _path_and_key(client: Client, where: str, notes: list[str]) -> dict[str, Any] | None:
    proxy = proxy_for(client.base) if any(note.startswith("only the proxy") for note in notes) else None
    answer = client.ask("/models", proxy=proxy)
    if answer.status in (401, 403):
        return finding(
            "client_unauthorized",
            where,
            str(answer),
            "The server is healthy; it refuses the key."
            if client.key
            else "The server is healthy; it wants a key and got none.",
            "Give the client the key of this service as `Authorization` with Bearer and one blank; look for a line break, quotes or another service's key in the file.",
        )
    if _is_api(answer):
        return None
    root = urllib.parse.urlsplit(client.base)
    bases = [f"{root.scheme}://{root.netloc}{path}" for path in ("/v1", "", "/api/v1", "/openai/v1", "/api")]
    for base in [base for base in bases if base != client.base]:
        other = client.ask("/models", base=base, proxy=proxy)
        if _is_api(other):
            return finding(
                "client_wrong_path",
                where,
                f"GET {client.base}/models: {answer}\nGET {base}/models: status {other.status}",
                "The base URL has another path than the server.",
                f"Use {base} as the base URL (an OpenAI client appends /chat/completions itself).",
            )
    if answer.status in (404, 405):
        return finding(
            "client_wrong_path",
            where,
            str(answer),
            "The server has no /models under this base URL, nor under the usual ones.",
            "Ask who runs it for the base URL; is this port the API, or something else's?",
            sure="medium",
        )
    if answer.status >= 500:
        return finding(
            "client_server_error",
            where,
            str(answer),
            "The gateway or the server fails.",
            "Look at the server's own log; 502 and 503 of a gateway mean that no replica serves.",
            sure="medium",
        )
    return finding(
        "client_wrong_path",
        where,
        str(answer),
        "What answers here is no OpenAI-compatible server.",
        "Check host, port and path.",
        sure="medium",
    )


def _model(client: Client, where: str, told: dict[str, Any]) -> dict[str, Any] | None:
    from gpu_fleet.domain import module_util

    answer = client.ask("/models")
    listed = answer.json if isinstance(answer.json, dict) else {}
    names = [
        entry["id"]
        for entry in listed.get("data") or []
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]
    wanted = told["model"]
    if wanted is None and names:
        told["model"] = names[0]
        return None
    if wanted in names:
        return None
    meant = module_util("findings").did_you_mean(wanted or "", names)
    return finding(
        "client_model_not_found",
        where,
        f"GET {client.base}/models lists: {', '.join(names) or 'nothing'}",
        f"The server does not serve {wanted}." if wanted else "The server lists no model.",
        f"{meant}Use a name that it lists, or add this one to served_model_names of the service.",
    )


def _complete(client: Client, where: str, told: dict[str, Any]) -> dict[str, Any] | None:
    asked = {"model": told["model"], "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    answer = client.ask("/chat/completions", asked)
    if answer.status in (400, 404, 405, 501) and answer.status != 401:
        chat = answer
        answer = client.ask("/completions", {"model": told["model"], "max_tokens": 1, "prompt": "Hello"})
        if answer.status == 200:
            told["notes"].append(f"chat does not work, completions do (no chat template, or no chat model): {chat}")
    told["seconds"] = round(answer.seconds, 3)
    body = answer.json
    if answer.failed:
        return finding(
            "client_server_error",
            where,
            str(answer),
            "The list of models comes, a completion does not.",
            "The engine may hang, or the queue is long: look at the server's log and at vllm:num_requests_waiting.",
            sure="medium",
        )
    if answer.status in (401, 403):
        return finding(
            "client_unauthorized",
            where,
            str(answer),
            "The key may list models, not use this one.",
            "Use a key that is allowed for this model.",
        )
    if answer.status == 404:
        told_model = isinstance(body, dict) and "model" in json.dumps(body)
        return finding(
            "client_model_not_found" if told_model else "client_wrong_path",
            where,
            str(answer),
            "The server lists the model and does not answer for it."
            if told_model
            else "There is no completion under this base URL.",
            "Use the base URL of the server itself (…/v1), and a name that it lists.",
            sure="medium",
        )
    if answer.status != 200:
        return finding(
            "client_server_error",
            where,
            str(answer),
            "The server refuses or fails a request of one token.",
            "The body says why; look at the server's own log.",
            sure="medium",
        )
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices:
        kind = "JSON without `choices`" if isinstance(body, dict) else "no JSON"
        return finding(
            "client_no_choices",
            where,
            str(answer),
            f"The answer has status 200 and is {kind}: an error that is passed on as a success, or another kind of server.",
            "Let the client look for `error` before `choices`; ask the server itself, past gateway and proxy, to see who answers so.",
        )
    return None


def _pool(client: Client, where: str, parallel: int) -> dict[str, Any] | None:
    """As many requests at once as a client's pool has connections: all have to come through."""
    if parallel < 2:
        return None
    with ThreadPoolExecutor(parallel) as pool:
        answers = list(pool.map(lambda _: client.ask("/models"), range(parallel)))
    bad = [answer for answer in answers if answer.failed or answer.status in (429, 503)]
    if not bad:
        return None
    files = any(answer.failed == "files" for answer in bad)
    return finding(
        "client_connection_pool_exhausted",
        where,
        f"{len(answers) - len(bad)} of {parallel} requests at once were answered; the others: {bad[0]}",
        "One request is answered, many at once are not: connections run out, "
        + (
            "on this machine (open files)."
            if files
            else "at the gateway or the server (or they wait behind answers that nobody reads)."
        ),
        "Use one client object, read or close every stream, cap what runs at once below the pool's size (httpx.Limits), and raise the gateway's or unit's limits (maxconn, LimitNOFILE) to match.",
    )
