"""nginx, HAProxy and Caddy, with common configurations, work as proxies of the service."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.clients.conftest import COUNT, COUNTED, MODEL, program, running, serving
from tests.ports import free_port

NGINX = """
daemon off; pid {folder}/pid; error_log stderr; worker_processes 1;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream dist_aclgraph {{ server 127.0.0.1:{service}; }}
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://dist_aclgraph; }} }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend api
  bind 127.0.0.1:{port}
  default_backend groups
backend groups
  option httpchk GET /ready
  server one 127.0.0.1:{service} check
"""
CADDY = """
{{
  admin off
  auto_https off
}}
http://:{port} {{
  bind 127.0.0.1
  reverse_proxy 127.0.0.1:{service}
}}
"""
KEY = "a-key-for-this-test"
PROXIES = {
    "nginx": (NGINX, ["-c"]),
    "haproxy": (HAPROXY, ["-f"]),
    "caddy": (CADDY, ["run", "--adapter", "caddyfile", "--config"]),
}
# Without this setting, nginx sends the name of the upstream server in the header Host.
PUBLIC_NGINX = NGINX.replace("location / {{", "location / {{ proxy_set_header Host $host;")
WITH_PUBLIC_NAME = PROXIES | {"nginx": (PUBLIC_NGINX, ["-c"])}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A service that requires an API key."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n")
    with serving(folder, f"serve.api_keys_file={keys}") as found:
        yield found


@pytest.mark.parametrize("name", WITH_PUBLIC_NAME)
def test_a_public_name_behind_a_proxy_needs_a_key(service, guarded, tmp_path, name):
    body = {"model": MODEL, "messages": [{"role": "user", "content": COUNT}], "temperature": 0}
    host, found = {"Host": "api.example.com"}, []
    for place, (each, key) in enumerate(((service, None), (guarded, None), (guarded, KEY))):
        text, options = WITH_PUBLIC_NAME[name]
        config, port = tmp_path / f"config{place}", free_port()
        config.write_text(text.format(folder=tmp_path, port=port, service=each.port))
        url = f"http://127.0.0.1:{port}"
        headers = host if key is None else host | {"Authorization": f"Bearer {key}"}
        with running([program(name), *options, str(config)], f"{url}/ready", tmp_path / "log"):
            reply = httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60.0
            )
            found.append(reply.status_code)

    assert found == [403, 401, 200]
    assert reply.json()["choices"][0]["message"]["content"] == COUNTED


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_passes_answers_and_streams(service, tmp_path, name):
    text, options = PROXIES[name]
    port = free_port()
    config = tmp_path / "config"
    config.write_text(text.format(folder=tmp_path, port=port, service=service.port))
    url = f"http://127.0.0.1:{port}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": COUNT}], "temperature": 0}

    with running([program(name), *options, str(config)], f"{url}/ready", tmp_path / "log"):
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0)
        head = httpx.head(f"{url}/health")
        long = {"model": MODEL, "prompt": "1", "max_tokens": 400, "ignore_eos": True}
        times, last = [], ""
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**long, "stream": True}, timeout=60.0
        ) as stream:
            for line in stream.iter_lines():
                times.append(time.monotonic())
                last = line or last
        refused = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": "other"})

    assert reply.json()["choices"][0]["message"]["content"] == COUNTED
    assert head.status_code == 200
    assert last == "data: [DONE]"
    assert times[-1] - times[0] > 0.1  # the proxy must not hold back the whole stream until its end
    assert refused.status_code == 404
