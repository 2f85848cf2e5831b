// Calls of the router: the key, events of a stream, and errors that say what to do.

const KEY = "quartet-api-key";
let memory = "";

/** The API key of this tab; empty: none. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory; // the browser keeps nothing for this page
  }
}

/** Keep the key for this tab; empty: forget it. */
export function setApiKey(key) {
  memory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // it stays in memory
  }
}

/** What went wrong, and what to do about it. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }

  get advice() {
    if (CODES[this.code]) return CODES[this.code];
    const field = this.param?.split(/[.[]/)[0];
    if (FIELDS[field]) return `Change ${FIELDS[field]}.`;
    if (field && this.status === 400) return `Change what the settings say of ${field}.`;
    const advice = STATUSES[this.status] ?? (this.status >= 500 ? STATUSES[500] : "");
    return this.retryAfter ? `${advice} Try again in ${this.retryAfter} s.` : advice;
  }
}

const FIELDS = {
  messages: "the message, which is in the composer again, or remove its picture",
  model: "the model in the settings",
  temperature: "the temperature in the settings",
  top_p: "top p in the settings",
  top_k: "top k in the settings",
  seed: "the seed in the settings",
  max_tokens: "the most tokens in the settings",
  tools: "the tools in the settings, or choose a model whose template takes tools",
  response_format: "the JSON schema in the settings, or choose a model whose workers follow one",
};
const CODES = {
  invalid_api_key: "Enter a key of the router's http.keys_file with “API key” above.",
  model_not_found: "Choose a model of the list in the settings.",
  context_length_exceeded: "Begin a new chat, or ask for fewer tokens.",
  worker_unavailable: "See in the fleet which role has no ready worker, and start one.",
  queue_full: "The router has as much to do as it takes. Try again, or add workers.",
};
const STATUSES = {
  0: "See that the router runs, and that this address is its http.port.",
  400: "Change the message or the settings: the router does not take them as they are.",
  401: CODES.invalid_api_key,
  403: "Ask who runs this router: its configuration does not allow this.",
  404: "This router may be of another version: reload the page.",
  413: "Send a smaller picture or a shorter text.",
  429: "The router is busy.",
  500: "This is a fault of the server: its log has more under the request's id.",
  503: "No worker can take it: see in the fleet which role has none, and start one.",
  504: "It took too long: ask for fewer tokens, or add workers.",
};

/** Fetch `path` with the key. Raises `ApiError`, or an `AbortError` if `signal` says so. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The router does not answer.");
  }
  if (!response.ok) throw await toError(response);
  return response;
}

/** The data of each event of a response, parsed; ends with the response or `[DONE]`. Raises `ApiError`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw ofBody(event.error, 0);
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection to the router broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function toError(response) {
  let body = {};
  try {
    body = (await response.json()).error ?? {};
  } catch {
    // a proxy's page
  }
  return ofBody(body, response.status, response.headers.get("Retry-After"));
}

function ofBody(body, status, retryAfter = null) {
  const message = body.message ?? `The router answered with status ${status}.`;
  const kinds = { service_unavailable_error: 503, rate_limit_error: 429, timeout_error: 504, server_error: 500 };
  return new ApiError(message, { status: status || kinds[body.type] || 400, code: body.code, param: body.param, retryAfter });
}
