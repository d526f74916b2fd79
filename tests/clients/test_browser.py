"""In chromium, a page of another origin may use the API if ``serve.allowed_origins`` allows it."""

from __future__ import annotations

import http.server
import threading

import pytest

from tests.clients.conftest import COUNT, COUNTED, MODEL
from tests.serve.browser import CHROMIUM

ASK = """async ([api, model, content]) => {
  const body = {model, stream: true, temperature: 0, messages: [{role: "user", content}]};
  const headers = {"Content-Type": "application/json", "X-API-Key": "none"};
  const sent = JSON.stringify({...body, plugins: []});
  const reply = await fetch(api + "/chat/completions", {method: "POST", headers, body: sent});
  let text = "";
  for (const line of (await reply.text()).split("\\n\\n")) {
    if (!line.startsWith("data: {")) continue;
    text += JSON.parse(line.slice(6)).choices[0].delta.content ?? "";
  }
  return [text, reply.headers.get("x-ignored-parameters"), location.origin];
}"""


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>a page</title>")

    def log_message(self, *_: object) -> None: ...


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_of_another_origin_asks(service):
    sync_api = pytest.importorskip("playwright.sync_api")
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    try:
        with sync_api.sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{site.server_port}/")
            text, ignored, origin = page.evaluate(ASK, [service.api, MODEL, COUNT])
            browser.close()
    finally:
        site.shutdown()

    assert text == COUNTED
    assert ignored == "plugins"
    assert origin != service.url
