// The figures that people look at first, of the last two minutes, each as a number and a line.

import { byId, make, makeSvg, setText, short } from "./dom.js";

const KEPT_S = 120;
const WIDTH = 200;
const HEIGHT = 40;

// Rates are over so many seconds: shorter, and a request of two seconds makes them jump.
const RATE_S = 5;
const TTFT_S = 15;
const CACHE_S = 30;

const FIGURES = [
  { name: "Requests", unit: "/s", read: (states) => rate(states, "requests"), add: failures },
  { name: "Tokens", unit: "/s", read: (states) => rate(states, "output_tokens") },
  { name: "First token", unit: "p50", read: ttft, show: (seconds) => milliseconds(seconds) },
  { name: "Queue", unit: "waiting", read: (states) => states.at(-1).totals.queued, floor: 4 },
  { name: "Cache hits", unit: "of prompts", read: cacheHits, show: (share) => `${Math.round(100 * share)} %`, ceiling: 1 },
];

// What became of prompt tokens that might have been found cached, as `quartet_router_reuse_tokens_total` counts them.
const LOST = [
  ["evicted", "evicted before"],
  ["elsewhere", "at another worker"],
  ["missing", "not there as the router thought"],
];

/** Draws the figures of each state. */
export class Charts {
  constructor() {
    this.states = [];
    this.cards = FIGURES.map((figure) => new Card(figure));
    byId("figures").append(...this.cards.map((card) => card.element));
  }

  /** One more state came. */
  add(state) {
    const last = this.states.at(-1);
    if (last && (state.router.id !== last.router.id || state.at_s < last.at_s)) this.forget();
    this.states.push(state);
    while (state.at_s - this.states[0].at_s > KEPT_S) this.states.shift();
    for (const card of this.cards) {
      card.add(state.at_s, card.figure.read(this.states));
      if (card.figure.add) setText(card.unit, card.figure.unit + card.figure.add(this.states));
    }
    const line = reuse(this.states);
    byId("reuse").hidden = !line;
    setText(byId("reuse"), line);
  }

  /** Begin anew: another router, or a pause. */
  forget() {
    this.states = [];
    for (const card of this.cards) card.points = [];
  }
}

class Card {
  constructor(figure) {
    this.figure = figure;
    this.points = [];
    this.value = make("span", { className: "value" }, "–");
    this.line = makeSvg("path", { class: "line" });
    this.area = makeSvg("path", { class: "area" });
    const svg = makeSvg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "chart", "aria-hidden": "true",
    });
    svg.append(this.area, this.line);
    this.unit = make("span", { className: "unit" }, figure.unit);
    this.element = make("div", { className: "figure" },
      make("span", { className: "name" }, figure.name),
      make("span", { className: "number" }, this.value, " ", this.unit),
      svg);
  }

  add(at, value) {
    this.points.push([at, value]);
    while (at - this.points[0][0] > KEPT_S) this.points.shift();
    setText(this.value, value === null ? "–" : (this.figure.show ?? short)(value));
    const known = this.points.filter(([, one]) => one !== null);
    const top = this.figure.ceiling ?? Math.max(this.figure.floor ?? 0, 1e-9, ...known.map(([, one]) => one)) * 1.1;
    const x = (when) => WIDTH * (1 - (at - when) / KEPT_S);
    const y = (one) => HEIGHT - 1.5 - (HEIGHT - 3) * (one / top);
    const path = known.map(([when, one]) => `${x(when).toFixed(1)},${y(one).toFixed(1)}`).join("L");
    this.line.setAttribute("d", known.length > 1 ? `M${path}` : "");
    this.area.setAttribute("d", known.length > 1
      ? `M${path}L${x(known.at(-1)[0]).toFixed(1)},${HEIGHT}L${x(known[0][0]).toFixed(1)},${HEIGHT}Z` : "");
  }
}

function milliseconds(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** The last state that is at least so many seconds old, or the first. */
function before(states, seconds) {
  const at = states.at(-1).at_s - seconds;
  for (let index = states.length - 1; index > 0; index -= 1) if (states[index].at_s <= at) return states[index];
  return states[0];
}

function rate(states, name) {
  const now = states.at(-1);
  const then = before(states, RATE_S);
  const seconds = now.at_s - then.at_s;
  return seconds > 0 ? Math.max(0, now.totals[name] - then.totals[name]) / seconds : null;
}

/** What to say of requests that failed, or were refused. */
function failures(states) {
  const failed = states.at(-1).totals.failed_requests - before(states, CACHE_S).totals.failed_requests;
  return failed > 0 ? `, ${short(failed)} failed` : "";
}

function cacheHits(states) {
  const now = states.at(-1).totals;
  const then = before(states, CACHE_S).totals;
  const prompts = now.prompt_tokens - then.prompt_tokens;
  return prompts > 0 ? (now.cached_tokens - then.cached_tokens) / prompts : null;
}

/** Why no more is found cached; empty if no prompt came. */
function reuse(states) {
  const now = states.at(-1).totals;
  const then = before(states, CACHE_S).totals;
  const prompts = now.prompt_tokens - then.prompt_tokens;
  if (prompts <= 0) return "";
  const of = (part) => now.reuse[part] - then.reuse[part];
  const lost = LOST.filter(([part]) => of(part) > 0).map(([part, what]) => `${short(of(part))} ${what}`);
  const known = `Reuse: of ${short(prompts)} prompt tokens ${short(of("held"))} held, ${short(of("matched"))} where they went, ${short(of("cached"))} found`;
  const unannounced = of("unannounced") > 0 ? [`${short(of("unannounced"))} found unannounced`] : [];
  return [known, ...lost, ...unannounced].join(", ");
}

/** The median, taken evenly within its bucket. */
function ttft(states) {
  const now = states.at(-1).totals;
  const then = before(states, TTFT_S).totals;
  const counts = now.ttft_counts.map((count, index) => count - (then.ttft_counts[index] ?? 0));
  let rest = counts.reduce((sum, count) => sum + count, 0) / 2;
  if (rest <= 0) return null;
  for (const [index, count] of counts.entries()) {
    if (count >= rest) {
      const low = index ? now.ttft_bounds_s[index - 1] : 0;
      const high = now.ttft_bounds_s[index] ?? low;
      return low + (high - low) * (rest / count);
    }
    rest -= count;
  }
  return null;
}
