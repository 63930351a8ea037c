// The search field, what is asked, and the keyboard. `results.js` shows what was found.
import { get, pictureUrl } from "./calls.js";
import { showHits } from "./results.js";

const byId = (id) => document.getElementById(id);
const query = byId("query"), results = byId("results"), status = byId("status"), more = byId("more");
const PAUSE = 120; // milliseconds without a key until a search begins
const STEP = 24; // results at a time
const LARGEST = 1600; // pixels of a side; larger pictures are scaled down before they are sent

let info = null;
let timer = 0, running = null;
// What is asked: `kind` is "text", "like" (the id of an image) or "picture" (a file).
let asked = { kind: "text", value: "", side: null, k: STEP };

const plural = (n, one) => `${n.toLocaleString()} ${one}${n === 1 ? "" : "s"}`;

function say(message, wrong = false) {
  status.textContent = message;
  status.classList.toggle("wrong", wrong);
}

async function loadInfo() {
  info = await get("/info");
  const captions = info.captions ? `, ${plural(info.captions, "caption")}` : "";
  byId("holds").textContent = `${plural(info.images, "picture")}${captions} · ${info.models.join(" + ")}`;
  byId("sides").hidden = !(info.images && info.captions);
  byId("pick").hidden = !info.accepts_pictures;
}

/* Asking */

function sideOf() {
  if (!info.captions) return "images";
  if (!info.images) return "captions";
  return asked.side ?? (asked.kind === "picture" ? "captions" : "images");
}

function requestOf(side) {
  // An image is not among the images like it.
  const most = side === "images" ? info.images - (asked.kind === "like") : info.captions;
  const options = new URLSearchParams({ of: side, k: Math.max(1, Math.min(asked.k, most, info.limits.k)) });
  if (asked.kind === "picture") {
    const headers = { "content-type": asked.value.type || "application/octet-stream" };
    return [`/search?${options}`, { method: "POST", body: asked.value, headers }];
  }
  options.set(asked.kind === "like" ? "like" : "q", asked.value);
  return [`/search?${options}`, {}];
}

function ask(change, pause = 0) {
  asked = { ...asked, k: STEP, ...change };
  clearTimeout(timer);
  running?.abort();
  timer = setTimeout(run, pause);
}

async function run({ again = true } = {}) {
  if (!info) return; // What is typed before is asked below, when it is there.
  running?.abort();
  const own = (running = new AbortController());
  const side = sideOf(), { revision } = info;
  for (const button of byId("sides").children) button.setAttribute("aria-pressed", String(button.dataset.side === side));
  showChosen();
  rememberInAddress();
  if (asked.kind === "text" && !asked.value.trim()) return showSamples();
  const started = performance.now();
  results.classList.add("old");
  try {
    const [url, options] = requestOf(side);
    const answer = await get(url, { ...options, signal: own.signal });
    if (own !== running) return;
    if (answer.revision !== info.revision) await loadInfo();
    show(answer.hits, side);
    const unknown = answer.unknown.length ? ` Not known to the model: ${answer.unknown.join(", ")}.` : "";
    const all = side === "images" ? plural(info.images, "picture") : plural(info.captions, "caption");
    say(`Best ${answer.hits.length} of ${all} in ${Math.round(performance.now() - started)} ms.${unknown}`);
    more.hidden = answer.hits.length < asked.k || answer.hits.length >= info.limits.k;
  } catch (error) {
    if (error.name === "AbortError" || own !== running) return;
    // The index may have changed, and hold fewer items than were asked for.
    if (again) await loadInfo().catch(() => {});
    if (own !== running) return;
    if (again && info.revision !== revision) return run({ again: false });
    // The earlier results stay, pale, while a word is being typed.
    more.hidden = true;
    say(error.message, true);
  }
}

function rememberInAddress() {
  const address = new URLSearchParams();
  if (asked.kind === "text" && asked.value.trim()) address.set("q", asked.value);
  if (asked.kind === "like") address.set("like", asked.value);
  if (asked.side) address.set("of", asked.side);
  const text = address.toString();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
  document.title = asked.kind === "text" && asked.value.trim() ? `${asked.value.trim()} – Search` : "Search";
}

function fromAddress() {
  const address = new URLSearchParams(location.search);
  const side = ["images", "captions"].includes(address.get("of")) ? address.get("of") : null;
  const like = address.get("like");
  query.value = like ? "" : (address.get("q") ?? "");
  ask(like ? { kind: "like", value: like, side } : { kind: "text", value: query.value, side });
}

/* Showing */

function showSamples() {
  show(info.samples, "images");
  more.hidden = true;
  const captions = [...new Set(info.samples.map((item) => item.captions[0]).filter((text) => text && text.length < 30))];
  byId("tries").replaceChildren(
    ...captions.slice(0, 6).map((text) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.onclick = () => {
        query.value = text;
        query.focus();
        ask({ kind: "text", value: text });
      };
      return button;
    }),
  );
  byId("tries").hidden = !captions.length;
  say(`Type what you look for${info.accepts_pictures ? ", or drop a picture" : ""}.`);
}

function show(hits, side) {
  byId("tries").hidden = true;
  const text = asked.kind === "text" ? asked.value.trim() : "";
  showHits(results, hits, side, { text, like: asked.kind === "like" ? asked.value : "", info, similar: searchLike });
}

let chosenUrl = "";
function showChosen() {
  URL.revokeObjectURL(chosenUrl);
  chosenUrl = asked.kind === "picture" ? URL.createObjectURL(asked.value) : "";
  byId("chosen").hidden = asked.kind === "text";
  if (asked.kind !== "text") {
    byId("chosen-picture").src = chosenUrl || pictureUrl(asked.value, info.revision);
    byId("chosen-name").textContent = asked.kind === "like" ? `Like ${asked.value}` : (asked.value.name ?? "picture");
  }
  query.placeholder = asked.kind === "text" ? (info.images ? "Describe a picture" : "Describe a caption") : "";
}

/* Pictures as queries */

function searchLike(id) {
  query.value = "";
  history.pushState(null, "", location.href);
  ask({ kind: "like", value: id, side: "images" });
  scrollTo({ top: 0 });
}

async function searchPicture(file) {
  if (!info.accepts_pictures) return say("This index was built from features; a picture cannot be a query.", true);
  say("Reading the picture");
  query.value = "";
  ask({ kind: "picture", value: await smaller(file) });
}

/* Return a file that the service accepts: one with too many bytes or pixels is scaled down here. */
async function smaller(file) {
  try {
    const bitmap = await createImageBitmap(file);
    if (file.size <= info.limits.body / 4 && bitmap.width * bitmap.height <= info.limits.pixels) return file;
    const scale = Math.min(1, LARGEST / Math.max(bitmap.width, bitmap.height));
    const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
    const canvas = new OffscreenCanvas(width, height);
    const pen = canvas.getContext("2d");
    pen.fillStyle = "white"; // as the index sees transparent pixels
    pen.fillRect(0, 0, width, height);
    pen.drawImage(bitmap, 0, 0, width, height);
    const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
    return new File([blob], file.name, { type: blob.type });
  } catch {
    return file; // The service tells what is wrong with it.
  }
}

byId("pick").onclick = () => byId("file").click();
byId("file").onchange = (event) => {
  if (event.target.files[0]) searchPicture(event.target.files[0]);
  event.target.value = "";
};
let depth = 0;
const carriesFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
addEventListener("dragenter", (event) => {
  if (carriesFile(event)) byId("drop").hidden = !++depth;
});
addEventListener("dragleave", (event) => {
  if (carriesFile(event)) byId("drop").hidden = !(depth = Math.max(0, depth - 1));
});
addEventListener("dragover", (event) => carriesFile(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!carriesFile(event)) return;
  event.preventDefault();
  byId("drop").hidden = !(depth = 0);
  if (event.dataTransfer.files[0]) searchPicture(event.dataTransfer.files[0]);
});
addEventListener("paste", (event) => {
  const file = event.clipboardData?.files[0];
  if (file) searchPicture(file);
});

/* Input and keyboard */

query.oninput = () => {
  const side = asked.kind === "text" ? asked.side : null;
  ask({ kind: "text", value: query.value, side }, PAUSE);
};
byId("form").onsubmit = (event) => {
  event.preventDefault();
  if (asked.kind === "text") ask({ value: query.value });
};
byId("drop-chosen").onclick = () => {
  query.focus();
  ask({ kind: "text", value: "", side: null });
};
byId("sides").onclick = (event) => {
  if (event.target.dataset.side) ask({ side: event.target.dataset.side });
};
more.onclick = () => ask({ k: asked.k + STEP });
addEventListener("popstate", fromAddress);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("pair").open) return;
  const cards = [...results.querySelectorAll(".hit")];
  const place = cards.indexOf(document.activeElement);
  if (event.key === "/" && document.activeElement !== query) {
    event.preventDefault();
    query.focus();
    query.select();
  } else if (event.key === "Escape" && document.activeElement === query && asked.kind !== "text") {
    byId("drop-chosen").click();
  } else if (event.key === "ArrowDown" && document.activeElement === query && cards.length) {
    event.preventDefault();
    cards[0].focus();
  } else if (place >= 0) {
    const columns = cards.filter((one) => one.offsetTop === cards[0].offsetTop).length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!step) return;
    event.preventDefault();
    if (place + step < 0) query.focus();
    else cards[Math.min(place + step, cards.length - 1)].focus();
  }
});

try {
  await loadInfo();
  if (query.value) ask({ kind: "text", value: query.value });
  else fromAddress();
} catch (error) {
  say(error.message, true);
}
