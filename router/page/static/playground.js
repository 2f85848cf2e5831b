// The playground: chats with the fleet, and what each answer says of its placement and its time.

import { ApiError, call, events } from "./api.js";
import { byId, duration, make, setText, short } from "./dom.js";

const MAX_PICTURE_BYTES = 20 << 20;
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "seed"];

/** The form, the chat and the request that runs. */
export class Playground {
  /** `onError` is told of errors that concern the whole page, such as a missing key. */
  constructor(onError) {
    this.onError = onError;
    this.messages = [];
    this.pictures = [];
    this.running = null;
    this.results = null; // the form for the results of the last answer's tool calls
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => this.take(byId("file")));
    byId("prompt").addEventListener("paste", (event) => this.take(event.clipboardData));
  }

  /** These are the models that can be asked. */
  showModels(names) {
    const select = byId("model");
    if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.results = null;
    byId("chat").replaceChildren(byId("chat-note") ?? make("p", { id: "chat-note", className: "note" }, "Ask something."));
    byId("prompt").focus();
  }

  // Pictures.

  async take(source) {
    const files = [...source.files].filter((file) => file.type.startsWith("image/"));
    for (const file of files) {
      if (file.size > MAX_PICTURE_BYTES) {
        this.onError(new ApiError(`${file.name} has ${short(file.size / 1e6)} MB; at most 20 are sent.`, { status: 413 }));
        continue;
      }
      this.pictures.push({ name: file.name, url: await dataUrl(file) });
    }
    if (source === byId("file")) byId("file").value = "";
    this.showPictures();
  }

  showPictures() {
    byId("pictures").replaceChildren(...this.pictures.map((picture) => {
      const remove = make("button", { type: "button", className: "remove", "aria-label": `Remove ${picture.name}` }, "×");
      remove.addEventListener("click", () => {
        this.pictures = this.pictures.filter((one) => one !== picture);
        this.showPictures();
        byId("prompt").focus();
      });
      return make("span", { className: "picture" }, make("img", { src: picture.url, alt: picture.name }), remove);
    }));
  }

  // A request.

  send() {
    if (this.running) return;
    const text = byId("prompt").value.trim();
    if (!text && !this.pictures.length) return;
    const pictures = this.pictures;
    const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    if (text) parts.push({ type: "text", text });
    const turn = make("article", { className: "turn user" }, make("h3", { className: "hidden" }, "You"),
      ...pictures.map(({ url, name }) => make("img", { src: url, alt: name })), make("p", {}, text));
    show(turn);
    byId("prompt").value = "";
    this.pictures = [];
    this.showPictures();
    const results = this.closeResults();
    // Each call of a tool must have a result before anything else is said.
    const unanswered = results?.messages("error: the user gave no result") ?? [];
    this.ask([...unanswered, { role: "user", content: pictures.length ? parts : text }], () => {
      turn.dataset.state = "refused";
      byId("prompt").value = [text, byId("prompt").value].filter(Boolean).join("\n");
      this.pictures = [...pictures, ...this.pictures];
      this.showPictures();
      this.openResults(results);
    });
  }

  sendResults() {
    if (this.running) return;
    const results = this.closeResults();
    this.ask(results.messages(""), () => this.openResults(results));
  }

  openResults(results) {
    this.results = results;
    results?.open();
  }

  closeResults() {
    const { results } = this;
    this.results = null;
    if (results?.element.contains(document.activeElement)) byId("prompt").focus();
    results?.element.remove();
    return results;
  }

  /** Ask with `added` behind the conversation. If nothing comes of it they are taken off, and `takeBack` is called. */
  async ask(added, takeBack) {
    const { messages } = this; // "New chat" begins another list meanwhile
    const answer = new AnswerView();
    const controller = new AbortController();
    const { signal } = controller;
    let explained = null;
    messages.push(...added);
    show(answer.element);
    this.setRunning(controller);
    try {
      const body = this.body(messages);
      if (byId("explain").checked) explained = this.explain(body, answer, signal);
      const response = await call("v1/chat/completions", {
        body: { ...body, return_placement: true, ...(byId("stream").checked && { stream: true, stream_options: { include_usage: true } }) },
        signal,
      });
      if (byId("stream").checked) for await (const event of events(response)) answer.add(event, "delta");
      else answer.add(await response.json(), "message");
      answer.finish();
    } catch (error) {
      if (error.name === "AbortError") answer.finish("stopped");
      else {
        answer.fail(error);
        if (error.status === 401) this.onError(error);
      }
    }
    const message = answer.message();
    if (message) messages.push(message);
    else if (!answer.isDone) messages.length -= added.length;
    if (messages === this.messages) {
      if (!message && !answer.isDone) takeBack();
      if (message?.tool_calls) this.openResults(answer.askResults(() => this.sendResults()));
    }
    this.setRunning(null);
    await explained;
  }

  async explain(body, answer, signal) {
    try {
      answer.explain(await (await call("page/explain", { body, signal })).json());
    } catch (error) {
      if (error.name !== "AbortError") answer.explainError(error);
    }
  }

  setRunning(controller) {
    const focused = document.activeElement;
    this.running = controller;
    byId("stop").hidden = !controller;
    byId("send").disabled = Boolean(controller);
    // Else the focus would be lost, and the next Tab begin at the top of the page.
    if (focused === byId(controller ? "send" : "stop")) byId("prompt").focus();
    byId("chat").setAttribute("aria-busy", String(Boolean(controller)));
  }

  body(messages) {
    const body = { model: byId("model").value, messages: [...messages] };
    const system = byId("system").value.trim();
    if (system) body.messages.unshift({ role: "system", content: system });
    for (const name of NUMBERS) if (byId(name).value !== "") body[name] = Number(byId(name).value);
    const tools = parsed("tools", "The tools");
    if (tools !== undefined) body.tools = tools;
    const schema = parsed("schema", "The JSON schema");
    if (schema !== undefined)
      body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    return body;
  }
}

function parsed(id, what) {
  const text = byId(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    byId("settings").open = true;
    throw new ApiError(`${what} in the settings are no JSON: ${error.message}`, { status: 400, param: id === "schema" ? "response_format" : id });
  }
}

function show(element) {
  const chat = byId("chat");
  byId("chat-note")?.remove();
  chat.append(element);
  chat.scrollTop = chat.scrollHeight;
  element.scrollIntoView({ block: "nearest" }); // on a phone the chat doesn't scroll, but the page
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** One answer as it comes. */
class AnswerView {
  constructor() {
    this.began = performance.now();
    this.text = this.reasoning = "";
    this.calls = [];
    this.content = make("p", { className: "content" });
    this.thought = make("details", { className: "thought", hidden: true, open: true }, make("summary", {}, "Reasoning"), make("p"));
    this.callBox = make("div", { className: "calls" });
    this.problem = make("div", { className: "problem", hidden: true });
    this.where = make("p", { className: "placed", hidden: true });
    this.time = make("div", { className: "time", hidden: true });
    this.why = make("details", { className: "why", hidden: true }, make("summary", {}, "Why there"));
    this.element = make("article", { className: "turn answer", data: { state: "running" } },
      make("h3", { className: "hidden" }, "Answer"),
      this.thought, this.content, this.callBox, this.problem, this.time, this.where, this.why);
  }

  /** More of it; `field` holds the text: `delta` of an event, `message` of a whole answer. */
  add(event, field) {
    const [choice] = event.choices;
    const part = choice?.[field];
    if (part?.reasoning_content) {
      this.reasoning += part.reasoning_content;
      this.thought.hidden = false;
      this.thought.lastChild.textContent = this.reasoning;
    }
    if (part?.content) {
      this.text += part.content;
      this.content.textContent = this.text;
    }
    for (const [index, call] of (part?.tool_calls ?? []).entries()) this.addCall(call.index ?? index, call);
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (event.usage) this.usage = event.usage;
    if (event.quartet?.choices.length) [this.quartet] = event.quartet.choices;
    if (event.quartet) this.showPlacement();
    const chat = byId("chat");
    if (chat.scrollHeight - chat.scrollTop - chat.clientHeight < 160) chat.scrollTop = chat.scrollHeight;
  }

  get isDone() {
    return this.element.dataset.state === "done";
  }

  /** What the conversation keeps of it, if anything: calls only of a whole answer, since part of one is no JSON. */
  message() {
    const hasCalls = this.isDone && this.calls.length > 0;
    if (!this.text && !hasCalls) return null;
    const message = { role: "assistant", content: this.text };
    if (hasCalls) message.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return message;
  }

  finish(how = "") {
    this.element.dataset.state = how || "done";
    if (how === "stopped") this.stoppedAfter = (performance.now() - this.began) / 1000;
    if (!this.text && !this.calls.length) {
      this.content.classList.add("note");
      this.content.textContent = how === "stopped" ? "Stopped before the first token." : "The answer is empty.";
    }
    this.showPlacement();
    this.showTime();
    this.compare();
  }

  fail(error) {
    this.element.dataset.state = "failed";
    this.problem.hidden = false;
    this.problem.replaceChildren(...problemNodes(error));
    if (this.why.querySelector(".problem")) this.why.hidden = true; // mostly for the same reason
    this.showPlacement();
  }

  // Tools.

  addCall(index, call) {
    const known = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.name = call.function.name;
    known.arguments += call.function?.arguments ?? "";
    this.callBox.replaceChildren(...this.calls.map((one) => make("code", { className: "call" }, `${one.name}(${one.arguments})`)));
  }

  /** A form for the results of its calls, which `onSubmit` sends. */
  askResults(onSubmit) {
    return new ResultsForm(this.callBox, this.calls, onSubmit);
  }

  // Placement and time.

  showPlacement() {
    const placement = this.quartet?.placement;
    if (!placement) return;
    this.where.hidden = false;
    const hops = ["encode", "prefill", "decode"].filter((role) => placement[role]).map((role) => rankName(placement[role]));
    const nodes = hops.flatMap((hop, index) => [...(index ? [" → "] : []), make("b", {}, hop)]);
    const facts = [];
    const { first_token_s: first, total_s: total } = this.quartet.time ?? {};
    if (total) facts.push(`${first ? `first token ${duration(first)}, ` : ""}all ${duration(total)}`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(`${short(this.usage.prompt_tokens)} prompt tokens, ${short(cached)} cached`, `${short(this.usage.completion_tokens)} new`);
    }
    if (this.quartet.num_attempts > 1) facts.push(`${this.quartet.num_attempts} attempts`);
    if (this.reason === "length") facts.push("cut at the most tokens");
    if (this.stoppedAfter) facts.push(`stopped after ${duration(this.stoppedAfter)}`);
    this.where.replaceChildren(make("span", { className: "hops" }, ...nodes), ...facts.map((fact) => make("span", { className: "fact" }, fact)));
  }

  showTime() {
    const time = this.quartet?.time;
    if (!time?.total_s) return;
    const parts = timeParts(time);
    const bar = make("div", { className: "time-bar", role: "img", "aria-label": parts.map(({ name, seconds }) => `${name} ${duration(seconds)}`).join(", ") });
    for (const { name, seconds } of parts) {
      const part = make("span", { className: `segment ${name}`, title: `${name} ${duration(seconds)}` });
      part.style.flexGrow = String(seconds / time.total_s);
      bar.append(part);
    }
    const legend = parts.map(({ name, seconds }) => make("li", {}, make("span", { className: `swatch ${name}` }), `${name} `, make("b", {}, duration(seconds))));
    this.time.hidden = false;
    this.time.replaceChildren(bar, make("ul", { className: "time-legend" }, ...legend));
  }

  // Why.

  explain(explanation) {
    const chosen = explanation.options.filter((option) => option.is_chosen).map((option) => rankName(option.rank));
    const choice = chosen.length ? `${explanation.policy} chose ${[...new Set(chosen)].join(" and ")}` : `${explanation.policy} found no room: it waits in the router`;
    const queue = explanation.num_waiting ? `; ${explanation.num_waiting} waited before it` : "";
    const kept = explanation.wait_s ? `, after keeping it for ${duration(explanation.wait_s)}` : "";
    const head = ["rank", "role", "matched tokens", "cost", "made of", ""];
    const rows = explanation.options.map((option) => make("tr", { className: option.is_chosen ? "chosen" : option.obstacle ? "out" : "" },
      make("th", { scope: "row" }, rankName(option.rank)),
      make("td", {}, option.role),
      make("td", { className: "amount" }, short(option.num_matched_tokens)),
      make("td", { className: "amount" }, option.cost === null ? "–" : amount(option.cost, option.cost_unit)),
      make("td", {}, terms(option.terms)),
      make("td", {}, option.obstacle || (option.is_chosen ? "chosen" : ""))));
    this.why.hidden = false;
    this.chosen = chosen;
    this.why.append(make("p", {}, `${choice}${kept}${queue}.`, (this.difference = make("span"))),
      make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Options of the policy" },
        make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows))));
    this.compare();
  }

  /** Both questions are asked at once, but not answered at once: say so where that shows. */
  compare() {
    const placement = this.quartet?.placement;
    if (!this.difference || !placement || !this.chosen.length) return;
    const places = [...new Set([placement.prefill ?? placement.decode, placement.decode].map(rankName))];
    const isSame = places.every((place) => this.chosen.includes(place));
    setText(this.difference, isSame ? "" : ` A moment later the fleet had changed: it went to ${places.join(" and ")}.`);
  }

  explainError(error) {
    if (this.element.dataset.state === "failed") return;
    this.why.hidden = false;
    this.why.append(make("div", { className: "problem" }, ...problemNodes(error)));
  }
}

/** Asks for the results of an answer's tool calls. */
class ResultsForm {
  constructor(box, calls, onSubmit) {
    this.box = box;
    this.calls = calls;
    this.inputs = calls.map((call) => make("input", { type: "text", "aria-label": `Result of ${call.name}`, placeholder: `result of ${call.name}` }));
    this.element = make("form", { className: "results" }, ...this.inputs, make("button", { type: "submit" }, "Send results"));
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      onSubmit();
    });
  }

  open() {
    this.box.append(this.element);
  }

  /** A message for each call; `missing` stands for a result that was not entered. */
  messages(missing) {
    return this.calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: this.inputs[index].value || missing }));
  }
}

/** An error as nodes: what is wrong, and what to do. */
export function problemNodes(error) {
  const advice = error instanceof ApiError ? error.advice : "This is a fault of the page: reload it.";
  return [make("strong", {}, error.message), ...(advice ? [" ", make("span", {}, advice)] : [])];
}

/** The parts of an answer's time, in order; they add up to its total. */
function timeParts(time) {
  const of = (name) => time[name] ?? 0;
  const queue = of("tokenize_s") + of("router_queue_s") + of("prefill_queue_s") + of("decode_queue_s");
  const parts = [
    ["queue", queue],
    ["encode", of("media_s")],
    ["onboard", of("onboard_s")],
    ["prefill", Math.max(0, of("prefill_s") - of("prefill_queue_s") - of("onboard_s"))],
    ["transfer", of("transfer_s")],
  ];
  const known = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  parts.push(["decode", Math.max(0, time.total_s - known)]);
  return parts.filter(([, seconds]) => seconds > 0).map(([name, seconds]) => ({ name, seconds }));
}

/** `decode-0/0` is the only rank of most workers. */
function rankName(rank) {
  return rank.replace(/\/0$/, "");
}

function terms(values) {
  return Object.entries(values).filter(([, value]) => value).sort(([, one], [, other]) => Math.abs(other) - Math.abs(one))
    .map(([name, value]) => (name.endsWith("_s") ? `${words(name.slice(0, -2))} ${duration(value)}` : `${words(name)} ${amount(value, "")}`)).join(", ");
}

const words = (name) => name.replaceAll("_", " ");

function amount(value, unit) {
  return unit === "s" ? duration(value) : `${Number(value.toPrecision(3))} ${unit}`.trim();
}
