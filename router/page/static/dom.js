// Elements and numbers as all parts of the page make them. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element: `properties` are set on it, `children` are nodes or texts. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A new element of SVG with these attributes. */
export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Set the text of an element, if it is another one: what does not change is not laid out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A number in few characters: 0.42, 7.1, 123, 12.3k. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}k`;
  return trimmed(value);
}

/** Seconds as people say them: 850 µs, 12.3 ms, 1.42 s. */
export function duration(seconds) {
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${trimmed(seconds * 1e3)} ms`;
  return `${trimmed(seconds)} s`;
}

/** Bytes as people say them, in powers of 1000. */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(Math.max(count, 1)) / 3), units.length - 1);
  return `${trimmed(count / 1000 ** power)} ${units[power]}`;
}

/** `1 block`, `2 blocks`. */
export const counted = (count, noun) => `${short(count)} ${noun}${count === 1 ? "" : "s"}`;

function trimmed(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toFixed(size >= 10 ? 1 : 2)));
}
