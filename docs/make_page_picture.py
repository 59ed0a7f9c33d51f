"""Makes docs/images/report.png and report-dark.png, the page's picture: what make demo trains, in headless Chromium.

Run it with ``python docs/make_page_picture.py``: about a minute on two cores. It needs Chromium with its driver
(Debian: chromium and chromium-driver) and ``pip install -e '.[dev,report]'``. A folder with runs as its argument shows
these instead.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from fedrane import Experiment, Partitioning, report
from fedrane.report import comparison

IMAGES = Path(__file__).parent / "images"
METHODS = ("fedavg", "spherefed", "fedrane")
WIDTH, HEIGHT = 1280, 900
MARGIN = 16
PATIENCE = 120.0
COLOURS = 128


def train(folder: Path) -> None:
    """The runs of make demo."""
    experiments = {
        name: Experiment(method=name, clients=20, batch=16, rounds=10, partition=Partitioning(alpha=0.1))
        for name in METHODS
    }
    comparison.compare(experiments, [0], folder)


def browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def photograph(driver: webdriver.Chrome, page: Path, dark: bool, picture: Path) -> None:
    """From the results to the accuracies over rounds, as wide as a laptop's screen."""
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wish = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wish})
    driver.get(page.as_uri())
    ends = time.monotonic() + PATIENCE
    while driver.execute_script("return document.documentElement.dataset.ready") != "true":
        if time.monotonic() > ends:
            raise SystemExit(f"{page} was not drawn in {PATIENCE:.0f} s")
        time.sleep(0.1)
    top, bottom = driver.execute_script("""
        const box = (id) => document.getElementById(id).getBoundingClientRect();
        return [scrollY + box("results").top, scrollY + box("accuracy").bottom];""")
    clip = {"x": 0, "y": top - MARGIN, "width": WIDTH, "height": bottom - top + 2 * MARGIN, "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    with Image.open(io.BytesIO(base64.b64decode(shot["data"]))) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        runs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made) / "runs"
        if len(sys.argv) == 1:
            train(runs)
        page = report.write([runs], Path(made) / "report.html", samples=0)
        driver = browser()
        try:
            for dark, name in ((False, "report.png"), (True, "report-dark.png")):
                photograph(driver, page, dark, IMAGES / name)
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
