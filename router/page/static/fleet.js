// The topology: the router, its workers by role, and the hand-offs between them as they happen.

import { byId, bytes, counted, make, makeSvg, setText, short } from "./dom.js";

const ROLES = ["encode", "prefill", "decode"];
const STATES = {
  ready: "ready",
  joining: "joining",
  suspect: "no contact",
  draining: "draining",
  incompatible: "other version",
  gone: "gone",
};
// A worker that is gone is shown for so long: it may come back.
const GONE_MS = 120_000;
const MAX_CHANGES = 4;
// More cards in a column than this are small.
const MANY = 5;
// Pairs that never handed over are drawn if there are no more than this.
const MAX_FAINT_EDGES = 16;
const RATE_S = 5;
const PULSE_MS = 900;
const MAX_PULSES = 3;

const stillness = matchMedia("(prefers-reduced-motion: reduce)");

/** Draws each state. */
export class Fleet {
  constructor() {
    this.columns = new Map();
    this.workers = new Map();
    this.edges = new Map();
    this.history = [];
    this.router = new RouterCard();
    byId("router").append(this.router.element);
    new ResizeObserver(() => {
      for (const dot of byId("edges").querySelectorAll(".pulse")) dot.remove();
      this.drawEdges();
    }).observe(byId("topology"));
  }

  /** One more state came. */
  show(state) {
    byId("topology").hidden = byId("hand-offs").hidden = false;
    byId("legend").hidden = false;
    byId("fleet-note").hidden = state.workers.length > 0;
    setText(byId("fleet-note"), "No worker has joined. The router finds workers through discovery: see that they run.");
    this.router.show(state);
    const now = Date.now();
    const listed = new Set();
    for (const worker of state.workers) {
      listed.add(worker.id);
      this.card(worker).show(worker, now);
    }
    for (const [id, card] of this.workers) {
      if (listed.has(id)) continue;
      card.lose(now);
      if (now - card.goneAt > GONE_MS) {
        card.remove();
        this.workers.delete(id);
      }
    }
    this.arrange();
    this.showHandOffs(state);
  }

  /** This key may not see the fleet: nothing of it stays. */
  forget(note) {
    byId("topology").hidden = byId("hand-offs").hidden = byId("legend").hidden = true;
    byId("fleet-note").hidden = false;
    setText(byId("fleet-note"), note);
    byId("changes").replaceChildren();
    for (const one of [...this.workers.values(), ...this.edges.values()]) one.remove();
    this.workers.clear();
    this.edges.clear();
    this.history = [];
  }

  /** The next state follows a pause. */
  pause() {
    this.history = [];
  }

  card(worker) {
    let card = this.workers.get(worker.id);
    if (card && card.role !== worker.role) {
      card.remove();
      card = undefined;
    }
    if (!card) {
      card = new WorkerCard(worker);
      this.workers.set(worker.id, card);
      const list = this.column(worker.role).list;
      const next = [...list.children].find((one) => one.dataset.worker.localeCompare(worker.id, "en", { numeric: true }) > 0);
      list.insertBefore(card.element, next ?? null);
    }
    return card;
  }

  column(role) {
    let column = this.columns.get(role);
    if (!column) {
      const list = make("ul", { className: "workers" });
      const count = make("span", { className: "count" });
      const title = `${role[0].toUpperCase()}${role.slice(1)}`;
      const element = make("div", { className: "column", data: { role } }, make("h3", {}, title, " ", count), list);
      column = { element, list, count };
      this.columns.set(role, column);
      const later = ROLES.slice(ROLES.indexOf(role) + 1).map((one) => this.columns.get(one)?.element).find(Boolean);
      byId("columns").insertBefore(element, later ?? null);
    }
    return column;
  }

  arrange() {
    for (const [role, column] of this.columns) {
      const cards = [...this.workers.values()].filter((card) => card.role === role);
      column.element.classList.toggle("many", cards.length > MANY);
      const ready = cards.filter((card) => card.state === "ready").length;
      setText(column.count, ready === cards.length ? String(ready) : `${ready} of ${cards.length}`);
      column.element.hidden = !cards.length;
    }
  }

  // Hand-offs.

  showHandOffs(state) {
    const last = this.history.at(-1);
    if (last && (last.router.id !== state.router.id || last.at_s > state.at_s)) this.history = [];
    const known = new Map((this.history.at(-1)?.hand_offs ?? []).map(([from, to, count]) => [`${from} ${to}`, count]));
    const isFirst = !this.history.length;
    this.history.push(state);
    while (state.at_s - this.history[0].at_s > RATE_S) this.history.shift();
    for (const [from, to, count] of state.hand_offs) {
      const before = known.get(`${from} ${to}`) ?? 0;
      const edge = this.edge(from, to);
      edge.fresh = isFirst || count < before ? 0 : count - before;
      edge.total = count;
    }
    this.addFaintEdges();
    this.drawEdges();
    for (const edge of this.edges.values()) edge.pulse();
    setText(byId("hand-offs"), this.handOffLine(state));
  }

  edge(from, to) {
    const name = `${from} ${to}`;
    if (!this.edges.has(name)) this.edges.set(name, new Edge(from, to));
    return this.edges.get(name);
  }

  addFaintEdges() {
    const here = ROLES.map((role) => [...this.workers.values()].filter((card) => card.role === role));
    const pairs = here[0].length * here[1].length + here[1].length * here[2].length;
    if (pairs > MAX_FAINT_EDGES) return;
    for (const index of [0, 1])
      for (const from of here[index]) for (const to of here[index + 1]) this.edge(from.id, to.id);
  }

  drawEdges() {
    const origin = byId("topology").getBoundingClientRect();
    if (!origin.width) return;
    byId("edges").setAttribute("viewBox", `0 0 ${origin.width} ${origin.height}`);
    const [first, second] = [...byId("columns").children].map((column) => column.getBoundingClientRect());
    const isStacked = second !== undefined && second.top >= first.bottom; // on a phone
    for (const [name, edge] of this.edges) {
      const from = this.workers.get(edge.from);
      const to = this.workers.get(edge.to);
      if (from && to) edge.draw(from, to, origin, isStacked);
      else {
        edge.remove();
        this.edges.delete(name);
      }
    }
  }

  handOffLine(state) {
    const then = this.history[0];
    const seconds = state.at_s - then.at_s;
    const sum = (one) => one.hand_offs.reduce((total, [, , count]) => total + count, 0);
    const moved = (one) => one.workers.flatMap((worker) => worker.pulled);
    const total = (one) => moved(one).reduce((size, [, count]) => size + count, 0);
    if (!seconds) return "Hand-offs: measuring";
    const perS = Math.max(0, sum(state) - sum(then)) / seconds;
    const bytesPerS = Math.max(0, total(state) - total(then)) / seconds;
    const ways = [...new Set(moved(state).map(([way]) => way))].join(", ");
    const speed = bytesPerS ? `${bytes(bytesPerS)}/s pulled${ways ? ` by ${ways}` : ""}` : "nothing is pulled";
    return `Hand-offs: ${short(perS)}/s, ${speed}`;
  }
}

class RouterCard {
  constructor() {
    this.dot = make("span", { className: "dot" });
    this.numbers = make("span", { className: "numbers" });
    this.policy = make("span", { className: "policy" });
    this.element = make("div", { className: "router-card" }, this.dot, make("strong", {}, "Router"), this.numbers, this.policy);
  }

  show(state) {
    this.dot.dataset.state = state.router.is_ready ? "ready" : "suspect";
    const { running, queued } = state.totals;
    setText(this.numbers, `${counted(running, "request")}, ${short(queued)} waiting${state.router.is_ready ? "" : ", not ready"}`);
    setText(this.policy, `policy ${state.router.policy}`);
  }
}

class WorkerCard {
  constructor(worker) {
    this.id = worker.id;
    this.role = worker.role;
    this.state = "";
    this.goneAt = 0;
    this.dot = make("span", { className: "dot" });
    this.word = make("span", { className: "state" });
    this.load = make("span", { className: "load" });
    this.bar = new Bar("batch", ["used"]);
    this.blocks = new Bar("blocks", ["used", "held", "cached"]);
    this.cached = make("span", { className: "load" });
    this.facts = make("dl", { className: "facts" });
    this.box = make("details", {},
      make("summary", {},
        make("span", { className: "line" }, this.dot, make("strong", {}, worker.id), this.word),
        make("span", { className: "meter" }, this.load, this.bar.element),
        make("span", { className: "meter" }, this.cached, this.blocks.element)),
      this.facts);
    this.element = make("li", { className: "worker", data: { worker: worker.id } }, this.box);
    this.box.addEventListener("toggle", () => this.showFacts());
  }

  show(worker, now) {
    this.worker = worker;
    if (this.epoch !== undefined && this.epoch !== worker.epoch && this.state !== "gone") note(this.id, "started again");
    this.epoch = worker.epoch;
    this.setState(worker.state);
    this.seenAt = now;
    const most = worker.max_running || Math.max(worker.running, 1);
    setText(this.load, `${short(worker.running)} running${worker.waiting ? `, ${short(worker.waiting)} waiting` : ""}`);
    this.bar.show([worker.running], most);
    const { used, held, cached, total } = worker.blocks;
    setText(this.cached, total ? `${short(cached)} of ${short(total)} cached` : "no blocks");
    this.blocks.show([used, held, cached], total);
    this.showFacts();
  }

  lose(now) {
    if (this.state === "gone") return;
    this.goneAt = now;
    this.setState("gone");
    setText(this.load, "not listed any more");
    this.bar.show([0], 1);
    setText(this.cached, "its blocks are lost");
    this.blocks.show([0, 0, 0], 1);
  }

  remove() {
    this.element.remove();
  }

  setState(state) {
    if (state === this.state) return;
    if (this.state) note(this.id, STATES[state] ?? state);
    this.state = state;
    this.element.dataset.state = this.dot.dataset.state = state;
    setText(this.word, STATES[state] ?? state);
  }

  showFacts() {
    if (!this.box.open || !this.worker) return;
    const one = this.worker;
    const pulled = one.pulled.map(([way, size, seconds]) => `${bytes(size)} by ${way}${seconds ? `, ${bytes(size / seconds)}/s` : ""}`);
    const facts = [
      ["Model", one.model],
      ["Address", one.address],
      ["Blocks", `${short(one.blocks.used)} in use, ${short(one.blocks.held)} held`],
      ["Prompt tokens to compute", short(one.queued_tokens)],
      ["Ways to pull from it", one.ways.join(", ") || "none"],
      ["Pulled", pulled.join("; ") || "nothing"],
      ["Last report", one.report_age_s === null ? "none" : `${one.report_age_s} s ago`],
    ];
    if (!this.values) {
      this.values = facts.map(() => make("dd"));
      this.facts.append(...facts.flatMap(([name], index) => [make("dt", {}, name), this.values[index]]));
    }
    facts.forEach(([, value], index) => setText(this.values[index], value));
  }
}

class Bar {
  constructor(name, parts) {
    this.parts = parts.map((part) => make("span", { className: `part ${part}` }));
    this.element = make("span", { className: `bar ${name}`, "aria-hidden": "true" }, ...this.parts);
  }

  show(values, total) {
    values.forEach((value, index) => {
      const width = `${total ? Math.min(100, (100 * value) / total).toFixed(1) : 0}%`;
      if (this.parts[index].style.width !== width) this.parts[index].style.width = width;
    });
  }
}

class Edge {
  constructor(from, to) {
    this.from = from;
    this.to = to;
    this.fresh = this.total = 0;
    this.path = makeSvg("path", { class: "edge" });
    byId("edges").append(this.path);
  }

  draw(from, to, origin, isStacked) {
    const one = from.element.getBoundingClientRect();
    const other = to.element.getBoundingClientRect();
    const [x1, y1, x2, y2] = !isStacked
      ? [one.right, one.top + Math.min(one.height / 2, 40), other.left, other.top + Math.min(other.height / 2, 40)]
      : [one.left + one.width / 2, one.bottom, other.left + other.width / 2, other.top];
    const [ax, ay, bx, by] = [x1 - origin.left, y1 - origin.top, x2 - origin.left, y2 - origin.top].map((v) => Math.round(v));
    const bend = !isStacked ? `${(ax + bx) / 2} ${ay} ${(ax + bx) / 2} ${by}` : `${ax} ${(ay + by) / 2} ${bx} ${(ay + by) / 2}`;
    const line = `M${ax} ${ay}C${bend} ${bx} ${by}`;
    if (line !== this.line) this.path.setAttribute("d", (this.line = line));
    this.path.classList.toggle("seen", this.total > 0);
    this.path.classList.toggle("lost", from.state === "gone" || to.state === "gone");
    if (this.fresh) this.heat = performance.now();
    this.path.classList.toggle("hot", this.heat !== undefined && performance.now() - this.heat < 1500);
  }

  pulse() {
    const count = stillness.matches || document.hidden ? 0 : Math.min(this.fresh, MAX_PULSES);
    this.fresh = 0;
    for (let number = 0; number < count; number += 1) {
      const dot = makeSvg("circle", { r: 3.5, class: "pulse" });
      dot.style.offsetPath = `path("${this.line}")`;
      byId("edges").append(dot);
      const moves = dot.animate(
        [{ offsetDistance: "0%", opacity: 0 }, { opacity: 1, offset: 0.15 }, { opacity: 1, offset: 0.85 }, { offsetDistance: "100%", opacity: 0 }],
        { duration: PULSE_MS, delay: number * 160, easing: "ease-in-out", fill: "both" });
      moves.finished.then(() => dot.remove(), () => dot.remove());
    }
  }

  remove() {
    this.path.remove();
  }
}

/** Note a change of a worker, for people who look, and for those who listen. */
function note(worker, what) {
  const time = new Date().toLocaleTimeString([], { hour12: false });
  const list = byId("changes");
  list.prepend(make("li", {}, make("time", {}, time), ` ${worker}: ${what}`));
  while (list.children.length > MAX_CHANGES) list.lastChild.remove();
}
