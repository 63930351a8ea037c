// One result: its picture, and what each word of a text attends to.
import { get, pictureUrl } from "./calls.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("pair"), large = byId("large");
const SMALL = 96; // pixels of a word's picture

let hits = [], place = 0, context = null;
let loading = null;

/* Show a result. `context` has the text or the image that was searched for, facts of the index, and `similar`. */
export function openPair(of, at, given) {
  [hits, place, context] = [of, at, given];
  if (!dialog.open) dialog.showModal();
  show();
}

async function show() {
  loading?.abort();
  const own = (loading = new AbortController());
  const hit = hits[place];
  const isCaption = hit.side === "captions";
  byId("pair-place").textContent = hit.rank ? `Result ${hit.rank} of ${hits.length}` : "";
  byId("previous").disabled = place === 0;
  byId("next").disabled = place === hits.length - 1;
  byId("pair-title").textContent = hit.captions[0] ?? hit.id;
  byId("pair-facts").textContent = hit.score === undefined ? hit.id : `${hit.id} · score ${hit.score.toFixed(4)}`;
  const others = isCaption ? [] : hit.captions.slice(1);
  const row = (text) => Object.assign(document.createElement("li"), { textContent: text });
  byId("captions").replaceChildren(...others.map(row));
  byId("captions-title").hidden = !others.length;
  byId("similar").hidden = !hit.image || context.info.images < 2;
  byId("attention").hidden = true;
  byId("words").replaceChildren();
  byId("where").textContent = "";
  note("");
  // A caption that was found for an image of the index is explained with that image, other results with the text.
  const image = isCaption && context.like ? context.like : hit.image;
  const text = isCaption ? hit.captions[0] : context.text || hit.captions[0];
  const picture = image && hit.picture ? await load(pictureUrl(image, context.info.revision)) : null;
  if (own !== loading) return;
  draw(large, picture, null);
  large.hidden = !picture;
  large.setAttribute("aria-label", hit.captions[0] ?? hit.id);
  if (!image || !text || !context.info.explains) {
    if (!context.info.explains) note("This model has no attention between words and regions.");
    return;
  }
  try {
    const address = new URLSearchParams({ q: text, image });
    const pair = await get(`/explain?${address}`, { signal: own.signal });
    if (own === loading) showWords(pair, picture, text);
  } catch (error) {
    if (error.name !== "AbortError") note(error.message);
  }
}

function note(message) {
  byId("pair-note").textContent = message;
  byId("pair-note").hidden = !message;
}

const load = (url) =>
  new Promise((done) => {
    const image = new Image();
    image.onload = () => done(image);
    image.onerror = () => done(null);
    image.src = url;
  });

/* Return the weights over the regions for each word. Of several steps, the last one decides. */
function weightsOf(pair) {
  if (pair.directions.t2i) return pair.directions.t2i.at(-1);
  const rows = pair.directions.i2t.at(-1);
  return pair.words.map((_, word) => rows.map((row) => row[word]));
}

function showWords(pair, picture, text) {
  const weights = weightsOf(pair);
  const drawn = pair.grid && picture;
  const heading = pair.directions.t2i ? "What each word looks at" : "Where each word is looked at";
  byId("attention-title").textContent = `${heading}: “${text}”`;
  const buttons = [];
  if (drawn) buttons.push(choice(buttons, picture, null, "all", "", ""));
  pair.words.forEach((word, number) => {
    if (pair.special[number]) return;
    const most = Math.max(...weights[number]);
    const share = drawn ? percent(most) : `region ${weights[number].indexOf(most) + 1}: ${percent(most)}`;
    const lit = drawn ? cells(pair, weights[number]) : null;
    const button = choice(buttons, drawn ? picture : null, lit, word, share, described(pair, word, weights[number]));
    if (!pair.known[number]) {
      button.classList.add("unknown");
      button.title = "The model does not know this word.";
    }
    buttons.push(button);
  });
  if (drawn) buttons[0].setAttribute("aria-pressed", "true");
  byId("words").replaceChildren(...buttons);
  byId("attention").hidden = !buttons.length;
}

/* Return a button that lights the picture by the attention of a word, and tells where it is. */
function choice(all, picture, lit, name, share, where) {
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  if (picture) {
    const small = document.createElement("canvas");
    draw(small, picture, lit);
    button.append(small);
  }
  for (const [className, text] of [["word", name], ["share", share]])
    button.append(Object.assign(document.createElement("span"), { className, textContent: text }));
  button.onclick = button.onfocus = () => {
    for (const other of all) other.setAttribute("aria-pressed", String(other === button));
    draw(large, picture, lit);
    byId("where").textContent = where;
  };
  return button;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

function described(pair, word, weights) {
  const order = weights.map((weight, region) => [weight, region]).sort((a, b) => b[0] - a[0]);
  const [most, region] = order[0];
  if (!pair.grid) {
    const best = order.slice(0, 3).map(([weight, number]) => `region ${number + 1} with ${percent(weight)}`);
    return `“${word}”: ${best.join(", ")}`;
  }
  const inside = region - pair.before;
  const [row, column] = [Math.floor(inside / pair.grid[1]) + 1, (inside % pair.grid[1]) + 1];
  const spot = inside < 0 ? "the class token" : `row ${row}, column ${column}`;
  return `“${word}”: ${percent(most)} of the attention in ${spot} of ${pair.grid[0]} × ${pair.grid[1]}`;
}

function cells(pair, weights) {
  return { weights: weights.slice(pair.before), rows: pair.grid[0], columns: pair.grid[1] };
}

/* Draw a picture; cells with little attention become dark and grey, as in the reports. */
function draw(canvas, picture, attention) {
  if (!picture) return;
  const side = canvas === large ? 480 : SMALL;
  const scale = side / Math.max(picture.naturalWidth, picture.naturalHeight);
  const [width, height] = [Math.round(picture.naturalWidth * scale), Math.round(picture.naturalHeight * scale)];
  [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.imageSmoothingQuality = "high";
  pen.drawImage(picture, 0, 0, width, height);
  if (!attention) return;
  const pixels = pen.getImageData(0, 0, width, height);
  const most = Math.max(...attention.weights, 1e-12);
  const light = attention.weights.map((weight) => Math.sqrt(weight / most));
  for (let y = 0, at = 0; y < height; y++) {
    const row = Math.floor((y * attention.rows) / height) * attention.columns;
    for (let x = 0; x < width; x++, at += 4) {
      const lit = light[row + Math.floor((x * attention.columns) / width)];
      const [r, g, b] = [pixels.data[at], pixels.data[at + 1], pixels.data[at + 2]];
      const dark = 0.4 * (0.299 * r + 0.587 * g + 0.114 * b) * (1 - lit);
      pixels.data[at] = r * lit + 0.92 * dark;
      pixels.data[at + 1] = g * lit + 0.98 * dark;
      pixels.data[at + 2] = b * lit + 1.15 * dark;
    }
  }
  pen.putImageData(pixels, 0, 0);
}

function move(step) {
  if (place + step < 0 || place + step >= hits.length) return;
  place += step;
  show();
}

byId("close").onclick = () => dialog.close();
byId("previous").onclick = () => move(-1);
byId("next").onclick = () => move(1);
byId("similar").onclick = () => {
  dialog.close();
  context.similar(hits[place].image);
};
dialog.onclick = (event) => {
  if (event.target === dialog) dialog.close();
};
dialog.onclose = () => {
  loading?.abort();
  document.querySelectorAll("#results .hit")[place]?.focus();
};
dialog.onkeydown = (event) => {
  if (event.key === "PageDown" || event.key === "PageUp") {
    event.preventDefault();
    move(event.key === "PageDown" ? 1 : -1);
    return;
  }
  const words = [...byId("words").children];
  const at = words.indexOf(document.activeElement);
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !words.length) return;
  event.preventDefault();
  words[at < 0 ? 0 : Math.min(Math.max(at + step, 0), words.length - 1)].focus();
};
