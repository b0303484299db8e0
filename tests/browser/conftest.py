"""The built site in a real browser: fixtures that every browser test uses.

``site`` is the folder of the built pages, built first if it is out of date.
``open_page("labs/memory_ledger.html")`` opens one of them, over http or from ``file://``, wide or narrow,
light or dark. It notes every request and every console message, and the test fails at its end if a page asked
for anything outside the site, if a request failed or if the console has an error.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, Route, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_FLAGS = [
    "--no-sandbox",  # refuses to start as root otherwise
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # Chromium's own calls home are not the site's requests.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: The widget manager's own schemas make its validator say this on every page with a widget. It is a warning.
ALLOWED_MESSAGES = ("allowUnionTypes",)
WIDE, NARROW = 1280, 390


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder: `make check` leaves them out by that mark."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


class Watch:
    """What a page asked for and what its console said; `problems` is empty on a page without fault."""

    def __init__(self, site: Path, origin: str) -> None:
        self.allowed = (f"{origin}/", f"{site.as_uri()}/", "data:", "blob:", "about:")
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.problems: list[str] = []

    def attach(self, page: Page) -> None:
        """Listen to ``page``; a request that would leave the site is stopped, and noted."""
        page.route("**/*", self._route)
        page.on("request", self._request)
        page.on("requestfailed", self._failed)
        page.on("response", self._response)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))

    def _route(self, route: Route) -> None:
        if route.request.url.startswith(self.allowed):
            route.continue_()
        else:
            route.abort()

    def _request(self, request: Request) -> None:
        self.requests.append(request.url)
        if not request.url.startswith(self.allowed):
            self.problems.append(f"a request leaves the site: {request.url}")

    def _failed(self, request: Request) -> None:
        # Leaving a page cancels what it was still loading, and where a test has switched scripts off the
        # browser stops them ("csp"): no faults of the page.
        excused = any(reason in (request.failure or "") for reason in ("ERR_ABORTED", "csp"))
        if request.url.startswith(self.allowed) and not excused:
            self.problems.append(f"request failed ({request.failure}): {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.problems.append(f"status {response.status}: {response.url}")

    def _console(self, message: ConsoleMessage) -> None:
        self.messages.append(f"{message.type}: {message.text}")
        allowed = message.type == "warning" and any(text in message.text for text in ALLOWED_MESSAGES)
        if message.type in ("error", "warning") and not allowed:
            self.problems.append(f"console {message.type}: {message.text}")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serve files without a line a request on stderr."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def serve(folder: Path) -> tuple[http.server.ThreadingHTTPServer, str]:
    """Start serving ``folder`` on localhost; return the server and its origin."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


@pytest.fixture(scope="package")
def origin(site: Path) -> Iterator[str]:
    """Serve the site on localhost and return its address."""
    server, address = serve(site)
    yield address
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium once for all browser tests."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        pytest.fail(
            f"found no browser (looked for {', '.join(CHROMIUM_NAMES)}); `make test` installs Debian's as "
            "root; elsewhere install Chromium or set CHROMIUM to a Chromium or Chrome",
            pytrace=False,
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(chromium: Browser, site: Path, origin: str) -> Iterator[OpenPage]:
    """Return ``open_page(path, scheme="http", width=1280, scheme_colour="light", **context_options)``.

    The `Page` comes loaded, with mathematics typeset and widgets drawn. ``page.watch`` is its `Watch`. At the
    test's end a problem on any opened page fails the test.
    """
    contexts, watches = [], []

    def open_one(
        path: str,
        scheme: Literal["http", "file"] = "http",
        width: int = WIDE,
        scheme_colour: Literal["light", "dark"] = "light",
        **options: Any,
    ) -> Page:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme_colour, **options
        )
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        watch = Watch(site, origin)
        watch.attach(page)
        watches.append(watch)
        page.watch = watch  # type: ignore[attr-defined]
        page.goto(f"{origin if scheme == 'http' else site.as_uri()}/{path}", wait_until="load")
        if path == "index.html":  # sends the reader on to the first page
            page.wait_for_url("**/book/index.html")
        if options.get("java_script_enabled", True):
            settle(page)
        return page

    yield open_one
    for context in contexts:
        context.close()
    problems = [problem for watch in watches for problem in watch.problems]
    assert not problems, "\n".join(problems)


def settle(page: Page) -> None:
    """Wait until mathematics is typeset and every widget of the page has been drawn."""
    page.evaluate("() => window.MathJax && window.MathJax.startup ? window.MathJax.startup.promise : null")
    page.wait_for_function(
        """() => [...document.querySelectorAll('script[type="application/vnd.jupyter.widget-view+json"]')]
            .every(script => script.parentElement.querySelector('.jupyter-widgets'))"""
    )
