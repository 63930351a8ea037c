"""The modules of the page under node, with the few parts of a browser that they need."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from itm_fast.search import Index
from itm_fast.serve import app as app_module
from itm_fast.serve import service as service_module
from python_tests.helpers.emoji_index import write_emoji_index
from python_tests.helpers.processes import HANGS
from python_tests.helpers.service import service_in_thread

# Types each line of stdin into the search field, and prints the line below the field once it tells the outcome.
BROWSER = """
import { createInterface } from "node:readline";
const elements = new Map();
const element = () => ({
  hidden: false, value: "", textContent: "", dataset: {}, children: [], append() {}, focus() {}, replaceChildren() {},
  setAttribute() {}, addEventListener() {}, classList: { add() {}, remove() {}, toggle() {} },
});
const byId = (id) => elements.get(id) ?? elements.set(id, element()).get(id);
let told;
const outcome = () => new Promise((done) => (told = done));
byId("status").classList.toggle = () => told(byId("status").textContent);
globalThis.document = { getElementById: byId, createElement: element };
globalThis.Image = class { constructor() { return element(); } };
globalThis.location = { search: "", pathname: "/", href: "/" };
globalThis.history = { replaceState() {}, pushState() {} };
globalThis.addEventListener = () => {};
const [address, page] = process.argv.slice(2);
const { fetch } = globalThis;
globalThis.fetch = (path, options) => fetch(address + path, options);
let next = outcome();
await import(page);
await next;
console.log(byId("holds").textContent);
for await (const line of createInterface({ input: process.stdin })) {
  next = outcome();
  byId("query").value = line;
  byId("query").oninput();
  console.log(await next);
}
"""


def test_a_page_stays_usable_when_the_index_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LOOK_EVERY", 0.01)
    index = write_emoji_index(tmp_path)
    # Outside of the package, node needs to be told that .js files are modules.
    shutil.copytree(app_module._PAGE, tmp_path / "page")
    (tmp_path / "page" / "package.json").write_text('{"type": "module"}')
    (tmp_path / "browser.mjs").write_text(BROWSER)
    pipe = subprocess.PIPE
    with service_in_thread(index) as address:
        command = ["node", "browser.mjs", address, "./page/search.js"]
        with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as node:
            assert node.stdin is not None
            assert node.stdout is not None

            def typed(text: str) -> str:
                node.stdin.write(f"{text}\n")
                node.stdin.flush()
                return node.stdout.readline().partition(" in ")[0]

            try:
                assert node.stdout.readline() == "12 pictures, 60 captions · scan\n"
                assert typed("face") == "Best 12 of 12 pictures"
                changed = Index.open(index)
                changed.delete([item.id for item in changed.items()[:3]])
                wait_for_images(address, 9)
                assert typed("dark face") == "Best 9 of 9 pictures"
                assert typed("xyzzy") == "query: the model knows none of the words of 'xyzzy'\n"
                assert typed("face") == "Best 9 of 9 pictures"
            finally:
                node.kill()


def wait_for_images(address: str, count: int) -> None:
    end = time.monotonic() + HANGS
    while json.load(urlopen(f"{address}/health"))["images"] != count:
        assert time.monotonic() < end
        time.sleep(0.01)
