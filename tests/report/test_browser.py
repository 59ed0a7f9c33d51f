"""The page in a real browser: it draws, sorts, follows light and dark, fits a phone, and sends no requests.

Needs Chromium with its driver (Debian: ``chromium`` and ``chromium-driver``). Where they are not, these tests are left
out; under ``CI=true`` they fail instead, so that an untested page is noticed.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from problems import SLOW
from report_pages import FORMULA, HOSTILE, full, many

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver") or shutil.which("chromedriver", path=os.environ.get("CHROMEWEBDRIVER"))
PATIENCE = 300.0
PHONE, DESKTOP = (390, 844), (1280, 900)


class Page:
    """A page on the screen."""

    def __init__(self, driver: webdriver.Chrome, path: Path) -> None:
        self.driver, self.path = driver, path

    def open(self, size: tuple[int, int] = DESKTOP, dark: bool = False, name: str = "report.html") -> None:
        """As a reader with such a screen and such wishes."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.wish(dark)
        self.driver.get((self.path / name).as_uri())
        self.wait("document.documentElement.dataset.ready === 'true'")

    def wish(self, dark: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def __call__(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str) -> None:
        ends = time.monotonic() + PATIENCE
        while not self(f"return {condition}"):
            assert time.monotonic() < ends, f"never came true: {condition}; {self.complaints()}"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What was logged in the browser's console since the last call."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def click(self, selector: str) -> None:
        self("document.querySelector(arguments[0]).click()", selector)

    def background(self) -> int:
        """How light the page is, 0 … 255."""
        colour = self("return getComputedStyle(document.body).backgroundColor")
        return max(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(","))

    def ink(self) -> int:
        """How light the names of the first plot's axes are."""
        colour = self("return getComputedStyle(document.querySelector('#accuracy-global .xtick text')).fill")
        return max(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(","))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if BROWSER is None or DRIVER is None:
        reason = "Chromium and its driver are not here (Debian: chromium and chromium-driver)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("page")
    (root / "report.html").write_text(full(root / "runs"), encoding="utf-8")
    (root / "many.html").write_text(many(root / "many"), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (
        "--headless=new",
        "--no-sandbox",  # in a container there is often none to be had
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--proxy-server=127.0.0.1:9",  # any request fails, and is logged in the console
        f"--user-data-dir={root / 'profile'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        opened = Page(driver, root)
        opened.open()
        yield opened
    finally:
        driver.quit()


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (DESKTOP, True), (PHONE, False), (PHONE, True)])
def test_every_plot_is_drawn(page: Page, size: tuple[int, int], dark: bool) -> None:
    """With marks for its data, inside the page; nothing is fetched and the console stays empty."""
    page.open(size, dark)
    drawn = page("""
        const marks = ".trace path, .trace .point, .heatmaplayer image, .boxlayer path";
        return Array.from(document.querySelectorAll(".plot"), (plot) => ({
          key: plot.id,
          marks: plot.querySelectorAll(marks).length,
          traces: (plot.data || []).length,
          width: plot.querySelector("svg.main-svg").getBoundingClientRect().width,
          room: plot.clientWidth,
        }))""")
    assert len(drawn) >= 17
    for plot in drawn:
        assert plot["traces"] > 0, plot
        assert plot["marks"] > 0, plot
        assert 200 < plot["width"] <= plot["room"] + 1, plot
    assert page("return document.documentElement.scrollWidth <= innerWidth")
    assert page("return innerWidth") == size[0]
    assert _beyond_the_edge(page) == []
    assert _cut_off(page) == []
    assert _too_small(page) == []
    assert page("return performance.getEntriesByType('resource').length") == 0
    assert page.complaints() == []


@pytest.mark.parametrize(
    ("size", "dark"),
    [(PHONE, True), *(pytest.param(*case, marks=SLOW) for case in [(PHONE, False), (DESKTOP, False), (DESKTOP, True)])],
)
def test_fifteen_methods(page: Page, size: tuple[int, int], dark: bool) -> None:
    """Small plots side by side, two on a phone; everything is inside the page and can be read."""
    page.open(size, dark, "many.html")
    tops = page("""
        const box = (element) => element.getBoundingClientRect();
        return Array.from(document.querySelectorAll(".plot[id^=accuracy-global]"), (plot) => [
          Math.round(box(plot).top), box(plot.querySelector("svg.main-svg")).width,
        ])""")
    assert len(tops) == 15
    beside = sum(top == tops[0][0] for top, _ in tops)
    assert beside == 2 if size == PHONE else beside >= 3
    assert min(width for _, width in tops) > 120
    assert page("return document.documentElement.scrollWidth <= innerWidth")
    assert _beyond_the_edge(page) == []
    assert _cut_off(page) == []
    assert _too_small(page) == []
    assert page.complaints() == []


def test_names_stand_beside_lines_where_there_is_room(page: Page) -> None:
    """On a phone the legend has them."""
    names = "return document.getElementById('accuracy-global').data.filter((trace) => trace.meta === 'name').length"
    page.open(PHONE)
    assert page(names) == 0
    page.open(DESKTOP)
    assert page(names) == 3
    inside = page("""
        const plot = document.getElementById("accuracy-global").getBoundingClientRect();
        const texts = Array.from(document.querySelectorAll("#accuracy-global .textpoint text"));
        return texts.length === 3 && texts.every((text) => text.getBoundingClientRect().right <= plot.right + 1)""")
    assert inside, "names are whole"


def test_the_data_can_be_downloaded(page: Page, tmp_path: Path) -> None:
    """As CSV, a row for each round, and as JSON. A name that a spreadsheet would take for a formula is a text."""
    page.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path), "eventsEnabled": False}
    )
    page.open(name="many.html")
    for kind in ("csv", "json"):
        page.click(f"[data-download={kind}]")
        ends = time.monotonic() + PATIENCE
        while not (tmp_path / f"report.{kind}").is_file():
            assert time.monotonic() < ends, page.complaints()
            time.sleep(0.05)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    with (tmp_path / "report.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = [
        (method["name"], run["seed"], round, run["metrics"]["global/accuracy"][k])
        for method in data["methods"]
        for run in method["runs"]
        for k, round in enumerate(run["metrics"]["round"])
    ]
    assert len(wanted) == 5 * 3 + 10 * 4
    assert FORMULA in {name for name, *_ in wanted}
    shown = [(row["method"], int(row["seed"]), int(row["round"]), float(row["global/accuracy"])) for row in rows]
    assert shown == [("'" + name if name.startswith(("=", "-")) else name, *rest) for name, *rest in wanted]
    assert {row["personal/accuracy"] for row in rows if row["method"] == "M00"} == {""}, "it has no personal models"
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]
    assert page.complaints() == []


def _beyond_the_edge(page: Page) -> list[str]:
    """The elements that overflow the page, except those in a box that scrolls."""
    return page("""
        return Array.from(document.querySelectorAll("body *")).filter((element) =>
          !element.closest(".scroll, .plot, script") && element.getBoundingClientRect().right > innerWidth + 1
        ).map((element) => element.outerHTML.slice(0, 120))""")


def _cut_off(page: Page) -> list[str]:
    """The words of plots that do not fit into their plot."""
    return page("""
        return Array.from(document.querySelectorAll(".plot svg.main-svg text")).filter((words) => {
          const box = words.getBoundingClientRect(), plot = words.closest(".plot").getBoundingClientRect();
          return box.width && (box.left < plot.left - 1 || box.right > plot.right + 1);
        }).map((words) => `${words.closest(".plot").id}: ${words.textContent}`)""")


def _too_small(page: Page) -> list[str]:
    return page("""
        return Array.from(document.querySelectorAll("p, td, th, dt, dd, li, button, figcaption")).filter((element) =>
          element.textContent.trim() && parseFloat(getComputedStyle(element).fontSize) < 12
        ).map((element) => element.outerHTML.slice(0, 120))""")


@pytest.mark.parametrize("table", ["results-table", "cost-table"])
def test_tables_sort_by_each_column(page: Page, table: str) -> None:
    """Down and up again, by the value and not by its text; missing values come last; announced to screen readers."""
    heads = page(f"return document.querySelectorAll('#{table} thead tr:last-child th').length")
    assert heads >= 6
    for column in range(heads):
        head = f"#{table} thead tr:last-child th:nth-child({column + 1})"
        seen = []
        for _ in range(2):
            page.click(f"{head} button")
            seen.append(page(f"return document.querySelector('{head}').getAttribute('aria-sort')"))
            others = page(f"return document.querySelectorAll('#{table} th[aria-sort$=ending]').length")
            assert others == 1
            values = page(
                f"return Array.from(document.querySelector('#{table} tbody:not([hidden])').rows, "
                f"(row) => row.cells[{column}].dataset.value)"
            )
            there = [value for value in values if value != ""]
            assert values == there + [""] * (len(values) - len(there))
            order = [value.lower() if column == 0 else float(value) for value in there]
            assert order == sorted(order, reverse=seen[-1] == "descending")
        assert sorted(seen) == ["ascending", "descending"]
    assert page.complaints() == []


def test_another_target(page: Page) -> None:
    """The choice of an accuracy shows its rows and no others."""
    choices = page("return document.getElementById('target').options.length")
    assert choices >= 2
    for choice in range(choices):
        page(
            "const select = document.getElementById('target'); select.value = arguments[0];"
            "select.dispatchEvent(new Event('change'))",
            str(choice),
        )
        shown = page(
            "return Array.from(document.querySelectorAll('#cost-table tbody:not([hidden])'), (b) => b.dataset.choice)"
        )
        assert shown == [str(choice)]


def test_light_and_dark(page: Page) -> None:
    """As the system wishes, also when it changes its mind; after the button, as the button was set, also next time."""
    page.open()
    assert page.background() > 200
    assert page.ink() < 150
    page.wish(dark=True)
    page.wait("getComputedStyle(document.body).backgroundColor === 'rgb(17, 21, 26)'")
    page.wait("document.getElementById('theme').textContent === 'Light'")
    assert page.ink() > 150
    page.click("#theme")
    assert page.background() > 200
    assert page.ink() < 150
    assert page("return document.getElementById('theme').getAttribute('aria-pressed')") == "false"
    page.driver.refresh()
    page.wait("document.documentElement.dataset.ready === 'true'")
    assert page.background() > 200, "the system is dark, but light was chosen"
    page("localStorage.clear()")
    assert page.complaints() == []


def test_a_method_can_be_hidden(page: Page) -> None:
    """In all plots of lines and boxes at once, and shown again."""
    count = (
        "return Array.from(document.querySelectorAll('.plot')).flatMap((plot) => plot.data)"
        ".filter((trace) => trace.legendgroup === '2' && trace.visible === false).length"
    )
    assert page(count) == 0
    page.click(".chip[data-line='2']")
    assert page(count) > 5
    pressed = page("return Array.from(document.querySelectorAll('.chip'), (c) => [c.dataset.line, c.ariaPressed])")
    assert all((line != "2") == (state == "true") for line, state in pressed)
    page.click(".chip[data-line='2']")
    assert page(count) == 0


def test_hostile_names_stay_names(page: Page) -> None:
    """No script of theirs runs, no element of theirs is made, and they can be read, on the page and in its plots."""
    page.open()
    assert page("return document.title") == "4 methods on digits"
    assert page("return document.querySelectorAll('img, iframe, body b').length") == 0
    names = page("return Array.from(document.querySelectorAll('#results-table tbody th'), (cell) => cell.textContent)")
    assert HOSTILE in [name.strip() for name in names]
    classes = page("return Array.from(document.querySelectorAll('#partition-0 .ytick text'), (t) => t.textContent)")
    assert "<b>one</b>" in classes
    assert "'two\" & $3$" in classes


def test_on_paper(page: Page) -> None:
    """Light, with the settings open and plots as wide as the paper; afterwards all is as it was."""
    page.open(dark=True)
    page("dispatchEvent(new Event('beforeprint'))")
    assert page.ink() < 150
    assert page("return Array.from(document.querySelectorAll('details')).every((d) => d.open)")
    wide = "return Array.from(document.querySelectorAll('.plot svg.main-svg'), (s) => s.getBoundingClientRect().width)"
    assert max(page(wide)) <= 680
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = "return Array.from(document.querySelectorAll(arguments[0])).some((element) => element.offsetParent)"
    assert not page(shown, "nav, #theme, .skip, [data-download]"), "of no use on paper"
    assert page(shown, ".facts dd, .legend, table")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page.wish(dark=True)
    page("dispatchEvent(new Event('afterprint'))")
    page.wait(f"Math.max(...(() => {{ {wide} }})()) > 800")
    assert page.ink() > 150
    assert page.complaints() == []
