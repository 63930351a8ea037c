// The list of results. `pair.js` shows one of them with the attention of each word.
import { pictureUrl } from "./calls.js";
import { openPair } from "./pair.js";

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/* Fill a list with hits, or with items that have no score. `context` is as `openPair` takes it. */
export function showHits(list, hits, side, context) {
  list.classList.toggle("captions", side === "captions");
  list.classList.remove("old");
  const scores = hits.map((hit) => hit.score ?? 0);
  const range = { low: Math.min(0, ...scores), high: Math.max(...scores) };
  list.replaceChildren(
    ...hits.map((hit, place) => {
      const button = card(hit, range, context.info);
      button.onclick = () => openPair(hits, place, context);
      const row = document.createElement("li");
      row.append(button);
      return row;
    }),
  );
}

function card(hit, range, info) {
  const button = element("button", "hit");
  button.type = "button";
  const tile = element("span", "tile");
  if (hit.picture) {
    const image = new Image();
    image.loading = "lazy";
    image.alt = "";
    image.src = pictureUrl(hit.image, info.revision);
    tile.append(image);
  } else tile.textContent = "no picture";
  const texts = element("span", "words-of");
  texts.append(element("span", "name", hit.captions[0] ?? hit.id));
  if (hit.score !== undefined) {
    const score = element("span", "score");
    const meter = element("meter", "");
    meter.value = (hit.score - range.low) / Math.max(range.high - range.low, 1e-9);
    meter.setAttribute("aria-hidden", "true");
    score.append(meter, element("span", "", hit.score.toFixed(3)));
    texts.append(score);
  }
  button.append(tile, texts);
  return button;
}
