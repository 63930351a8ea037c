"""Tests that drive Chromium; pytest collects them only where it is installed, with its driver and selenium."""

import importlib.util
import shutil

import pytest

from python_tests.helpers.service import running_service

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
INSTALLED = BROWSER is not None and DRIVER is not None and importlib.util.find_spec("selenium") is not None

collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


@pytest.fixture(scope="module")
def service(served_index):
    with running_service(served_index) as running:
        yield running


@pytest.fixture(scope="module")
def chromium():
    """Start one browser for all tests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    # Root and containers have neither the sandbox nor much shared memory.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()
