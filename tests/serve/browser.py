"""Shows the status page in a chromium browser, which playwright controls."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.scrape import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOWN_MS = 60_000
NOTHING = "\u2013"  # the page shows this text in place of a missing sample

# Computes, for every visible text, the contrast to its background by the definition of WCAG 2.
FAINT_TEXTS = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const faint = [];
  let seen = 0;
  for (const element of document.body.querySelectorAll("*")) {
    const hasText = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!hasText || !element.checkVisibility()) continue;
    if (element.closest("script, noscript, svg")) continue;
    seen += 1;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${element.textContent}: ${contrast.toFixed(2)}`);
  }
  return { seen, faint };
}"""
SAMPLES = """() => [...document.querySelectorAll("[data-sample]")].map(
  (e) => [e.dataset.sample.split("/"), e.dataset.unit, e.textContent])"""


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a headless browser; skip the test if no browser is installed."""
    if CHROMIUM is None:
        pytest.skip("no browser is here; on Debian: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield browser
        browser.close()


class StatusPage:
    """Opens the status page in a new tab, and records the tab's requests, errors and warnings."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self._context = browser.new_context(**context)
        self.tab = self._context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("console", self._note)
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.goto(url, timeout=SHOWN_MS)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def wait_for_numbers(self, polls: int = 1) -> None:
        """Wait until the page has polled ``polls`` more times, and shows the new numbers."""
        shown = int(self.tab.evaluate("document.body.dataset.shown || 0"))
        self.wait_for(f"Number(document.body.dataset.shown || 0) >= {shown + polls}")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. The page's CSP forbids playwright's own
        function for such a wait.
        """
        deadline_s = time.monotonic() + SHOWN_MS / 1000
        while not self.tab.evaluate(expression):
            assert time.monotonic() < deadline_s, expression
            self.tab.wait_for_timeout(50)

    def samples(self) -> dict[Path, tuple[str, str]]:
        """Return, for each number on the page, its unit and its text. The key is the number's
        sample in /metrics.
        """
        return {tuple(path): (unit, text) for path, unit, text in self.tab.evaluate(SAMPLES)}

    def faint_texts(self) -> dict[str, Any]:
        """Return the number of all visible texts, and the texts that have too little contrast."""
        return dict(json.loads(json.dumps(self.tab.evaluate(FAINT_TEXTS))))

    def overflow_px(self) -> int:
        """Return the number of pixels by which the page is wider than the window."""
        root = "document.documentElement"
        return int(self.tab.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))

    def close(self) -> None:
        self._context.close()


def value_of(unit: str, text: str) -> float:
    """Return the number that a text of the page shows, converted from ``unit`` to the unit of
    /metrics.
    """
    number = float(text.split(" ")[0].replace(",", ""))
    return number * {"count": 1, "percent": 0.01, "mebibytes": 1 << 20}[unit]


def rounding_of(unit: str) -> float:
    """Return the largest rounding error of texts in ``unit``, in the unit of /metrics."""
    return {"count": 1e-9, "percent": 0.00051, "mebibytes": 0.051 * (1 << 20)}[unit]
