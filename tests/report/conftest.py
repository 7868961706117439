"""A real browser, for the tests of the report."""

import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("chromium and chromedriver are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-sync", "--no-first-run", "--window-size=1200,900",
        "--force-prefers-reduced-motion",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(driver)
    chrome = selenium.Chrome(options=options, service=service)
    yield chrome
    chrome.quit()
